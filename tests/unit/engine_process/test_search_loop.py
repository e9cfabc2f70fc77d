"""Beam search and `best_of` in the engine's loop: what the front end is told, what is counted, what a viewer sees."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from headway.engine.llm_engine import LLMEngine
from headway.sampling_params import SamplingParams
from headway.wire.messages import AbortRequests, AddRequest, Delta, StepSnapshot, Watch
from tests.unit.engine.scripted_logprobs import VOCAB_SIZE, make_engine, run_to_end
from tests.unit.engine_process.scripted_channel import ScriptedChannel, run
from tests.unit.engine_stats import numbers

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
WIDTH, NUM_TOKENS = 4, 6
BEAMS: dict[str, Any] = {"n": 2, "best_of": WIDTH, "use_beam_search": True, "max_tokens": NUM_TOKENS}
BEST: dict[str, Any] = {"n": 2, "best_of": WIDTH, "max_tokens": NUM_TOKENS}
kinds = pytest.mark.parametrize("params", [BEAMS, BEST], ids=["beams", "best of"])
overlaps = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])


def ask(request_id: str, params: dict[str, Any], prompt: list[int] | None = None, **more: Any) -> AddRequest:
    return AddRequest(request_id, prompt or PROMPT, SamplingParams(**{**params, **more}))


def looped(*script: Any, overlap: bool = False, **options: Any) -> tuple[ScriptedChannel, LLMEngine]:
    engine = make_engine(overlap=overlap, **options)
    return run(*script, engine=engine), engine


def offline(params: dict[str, Any]) -> list[list[int]]:
    engine = make_engine()
    engine.add_request("a", PROMPT, SamplingParams(**params), stream=False)
    return [completion.token_ids for completion in run_to_end(engine)["a"].outputs]


def progress(deltas: list[Delta]) -> list[tuple[int, int]]:
    return [(each.progress.num_started, each.progress.num_tokens) for each in deltas if each.progress is not None]


# ---- what the front end is told -------------------------------------------------------------------------------------


@kinds
@overlaps
def test_progress_and_then_everything_at_once(params: dict[str, Any], overlap: bool) -> None:
    channel, engine = looped([ask("a", params)], *[[]] * 30, overlap=overlap)
    deltas = channel.deltas("a")
    *told, one, other = deltas
    assert [delta.token_ids for delta in (one, other)] == offline(params)
    assert [(delta.index, delta.finish_reason, delta.is_last) for delta in (one, other)] == [
        (0, "length", False),
        (1, "length", True),
    ]
    assert other.timings is not None and other.timings.decode_s > 0
    assert all(delta.progress is not None and not delta.token_ids and not delta.is_last for delta in told)
    steps = progress(deltas)
    assert sum(started for started, _ in steps) == WIDTH
    assert sum(tokens for _, tokens in steps) == WIDTH * NUM_TOKENS
    assert steps[0][0] > 0, "the first step that brings a token says that it has started"
    assert engine.core.scheduler.kv_cache.num_used_blocks == 0


def test_sequences_that_have_no_seat_wait_and_have_not_started() -> None:
    channel, _ = looped([ask("a", BEST)], *[[]] * 30, max_num_seqs=2)
    started = [num for num, _ in progress(channel.deltas("a"))]
    assert started[0] <= 2 < sum(started) == WIDTH
    channel, _ = looped([ask("a", BEAMS)], [], max_num_seqs=3)
    stats = channel.batches[0].stats
    assert (stats.batch.num_running, stats.batch.num_waiting) == (3, 1)


def test_beams_that_have_ended_or_fallen_out_count() -> None:
    channel, _ = looped([ask("a", BEAMS, stop_token_ids=[0, 7])], *[[]] * 30)
    deltas = channel.deltas("a")
    made = sum(tokens for _, tokens in progress(deltas))
    assert made > sum(len(delta.token_ids) for delta in deltas)
    assert channel.batches[-1].stats.batch.generation_tokens == made


def test_others_stream_as_ever_beside_them() -> None:
    greedy = {"temperature": 0.0, "max_tokens": 8, "logprobs": 2}
    channel, _ = looped([ask("a", BEAMS), ask("b", greedy), ask("c", BEST)], *[[]] * 30)
    for delta in (deltas := channel.deltas("b")):
        ((best, second),) = delta.logprobs or ()
        assert [best.token_id] == delta.token_ids and best.rank == 1 and second.logprob <= best.logprob
    assert len(deltas) == 8
    assert channel.batches[-1].stats.batch.generation_tokens == 2 * WIDTH * NUM_TOKENS + 8


def test_a_search_without_any_result_is_refused_and_hurts_nobody() -> None:
    nowhere = ask("a", BEAMS, stop_token_ids=list(range(VOCAB_SIZE)), min_tokens=3)
    channel, _ = looped([nowhere, ask("b", BEAMS)], *[[]] * 30)
    refusal = channel.deltas("a")[-1]
    assert (refusal.error_status, refusal.error_param, refusal.is_last) == (400, "stop_token_ids", True)
    assert [delta.token_ids for delta in channel.deltas("b")[-2:]] == offline(BEAMS)


@kinds
@pytest.mark.parametrize("num_steps", [1, 3])
def test_an_abort_frees_every_block(params: dict[str, Any], num_steps: int) -> None:
    """With three seats some beams of a position have come back, and others wait, or hold blocks in the batch."""
    script = [[ask("a", params, max_tokens=30)], *[[]] * num_steps, [AbortRequests(["a"])], [], []]
    channel, engine = looped(*script, max_num_seqs=3)
    last = numbers(channel.batches[-1].stats)
    assert (last.num_running, last.num_waiting, last.num_used_blocks) == (0, 0, 0)
    assert not engine.core.scheduler.requests
    assert all(delta.progress is not None for delta in channel.deltas("a"))


# ---- what is counted ------------------------------------------------------------------------------------------------


@overlaps
def test_a_search_counts_as_one_request_with_one_prompt(overlap: bool) -> None:
    channel, _ = looped([ask("a", BEAMS)], *[[]] * 20, [ask("b", BEAMS)], *[[]] * 20, overlap=overlap)
    last = numbers(channel.batches[-1].stats)
    assert (last.prompt_tokens, last.generation_tokens) == (2 * len(PROMPT), 2 * WIDTH * NUM_TOKENS)
    assert last.num_queried_tokens == 2 * len(PROMPT)
    assert last.num_hit_tokens == last.num_saved_tokens == len(PROMPT) - 1
    timings = channel.deltas("b")[-1].timings
    assert timings is not None and timings.num_cached_tokens == len(PROMPT) - 1


@overlaps
def test_the_counters_of_lookups_never_fall(overlap: bool) -> None:
    requests = [ask("a", BEAMS), ask("b", BEAMS, PROMPT[:5]), ask("c", {"temperature": 0.0, "max_tokens": 30})]
    channel, _ = looped(requests, *[[]] * 60, overlap=overlap, num_blocks=14)
    for name in ("num_queried_tokens", "num_hit_tokens", "num_saved_tokens", "prompt_tokens", "generation_tokens"):
        values = [batch.stats.as_dict()[name] for batch in channel.batches]
        assert values == sorted(values), name
    last = numbers(channel.batches[-1].stats)
    assert 0 <= last.num_hit_tokens <= last.num_queried_tokens
    assert last.prompt_tokens == 2 * len(PROMPT) + 5


# ---- what a viewer sees ---------------------------------------------------------------------------------------------


def snapshots(channel: ScriptedChannel) -> list[StepSnapshot]:
    return [message for message in channel.sent if isinstance(message, StepSnapshot)]


def test_a_viewer_sees_beams_that_go_on() -> None:
    channel, _ = looped([Watch(True), ask("a", BEAMS)], *[[]] * 20)
    first, *others = snapshots(channel)
    assert [(row.request_id, row.num_tokens, row.is_decode) for row in first.rows] == [("a#0", len(PROMPT), False)]
    for position, snapshot in enumerate(others, start=1):
        assert [row.request_id for row in snapshot.rows] == [f"a#{place}" for place in range(WIDTH)]
        for row in snapshot.rows:
            assert (row.num_prompt_tokens, row.num_output_tokens) == (len(PROMPT), position)
            assert (row.num_tokens, row.is_decode, row.num_cached_tokens) == (1, True, 0)
        assert snapshot.waiting == [] and snapshot.num_running == WIDTH
    assert [snapshot.finished for snapshot in others[:-1]] == [[]] * (NUM_TOKENS - 2)
    assert others[-1].finished == [f"a#{place}" for place in range(WIDTH)]


def test_blocks_belong_to_beams_by_the_same_names() -> None:
    shown: set[str] = set()
    now_s = map(float, itertools.count())
    script = [[Watch(True), ask("a", BEAMS), ask("b", {"max_tokens": 20})], *[[]] * 60]
    engine = make_engine(max_chunk_tokens=2, enable_prefix_caching=False)
    channel = run(*script, engine=engine, now=lambda: next(now_s))  # a beam takes several steps, and holds blocks
    for snapshot in snapshots(channel):
        assert snapshot.blocks is not None
        shown |= set(snapshot.blocks.owners)
    assert shown == {"b", *(f"a#{place}" for place in range(WIDTH))}
