"""The engine's loop against a scripted front end, and the process around it where that needs no engine."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headway.core import ModelRunnerOutput, SampledTokens, SchedulerOutput
from headway.core.request_options import RequestOptions
from headway.engine.driver import BrokenEngineError
from headway.engine.request_preparer import PreparedRequest
from headway.engine_process.engine_loop import EngineLoop
from headway.engine_process.engine_report import block_map
from headway.errors import InvalidRequestError
from headway.executor import PendingStep
from headway.sampling_params import SamplingParams
from headway.structured.compiling import Compiled
from headway.wire.channel import ChannelClosedError, EngineChannel
from headway.wire.engine_stats import EngineStats, TransferStats
from headway.wire.frames import FrameReader, pack
from headway.wire.messages import (
    CACHED,
    SHARED,
    AbortRequests,
    AddRequest,
    BlockSnapshot,
    CacheResetDone,
    Delta,
    Heartbeat,
    ResetCache,
    Shutdown,
    StepBatch,
    StepSnapshot,
    UnreadableRequest,
    Watch,
    decode_to_engine,
    encode,
)
from tests.unit.engine_process.scripted_channel import ScriptedChannel, add, add_raw, run
from tests.unit.engine_process.small_engine import create_engine
from tests.unit.engine_stats import engine_stats, numbers


def test_a_request_becomes_deltas() -> None:
    channel = run([add("a")], *[[]] * 4)
    deltas = channel.deltas("a")
    assert "".join(delta.text for delta in deltas) == "cdef"
    assert [len(delta.token_ids) for delta in deltas] == [1, 1, 1, 1]
    assert [delta.is_last for delta in deltas] == [False, False, False, True]
    assert deltas[-1].finish_reason == "length" and deltas[-1].timings is not None
    assert deltas[-1].timings.prefill_s > 0 and deltas[-1].timings.decode_s > 0
    last = numbers(channel.batches[-1].stats)
    assert (last.num_steps, last.prompt_tokens, last.generation_tokens) == (4, 2, 4)
    assert (last.num_running, last.num_waiting, last.num_used_blocks) == (0, 0, 0)
    assert [batch.stats.step.kind for batch in channel.batches] == ["prefill", "decode", "decode", "decode"]
    assert all(batch.stats.step.schedule_s > 0 for batch in channel.batches)


def test_each_request_is_forecast_when_it_is_queued_and_before_the_next_step() -> None:
    """The first one comes before any step, from which it could be told how long steps take."""
    more = [AddRequest("c", [5], SamplingParams(n=3, max_tokens=2)), add("d", use_beam_search=True, n=2)]
    channel = run([add("a")], [], [add("b"), *more, add("bad", prompt=[10**6])], [AbortRequests(["b"])], *[[]] * 9)
    batches = channel.batches
    told = [forecast for batch in batches for forecast in batch.forecasts]
    assert [forecast.request_id for forecast in told] == ["b", "c", "d"]
    assert all(forecast.first_token_s > 0 for forecast in told)
    (index,) = (index for index, batch in enumerate(batches) if batch.forecasts)
    assert batches[index].stats.batch.num_steps == 2 and not channel.deltas("b")[0].is_last
    assert not any(delta.request_id == "b" and delta.token_ids for batch in batches[:index] for delta in batch.deltas)


def test_it_waits_only_when_there_is_nothing_to_do() -> None:
    channel = run([], [add("a", max_tokens=2)], [], [], [])
    assert channel.waits == [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]


def test_an_idle_engine_checks_itself(caplog: pytest.LogCaptureFixture) -> None:
    engine = create_engine({})

    def leak() -> None:
        engine.core.scheduler.kv_cache.device.pool.allocate(1)

    def repair() -> None:
        pool = engine.core.scheduler.kv_cache.device.pool
        assert pool.drop(1)
        pool.put_back(1)

    with caplog.at_level(logging.ERROR):
        run([add("a", max_tokens=1)], leak, [], [], repair, engine=engine)
    assert [record.message.split(":")[0] for record in caplog.records] == ["requests and blocks disagree"]


def test_aborts_take_effect_before_the_next_step_and_the_numbers_follow() -> None:
    channel = run([add("a", max_tokens=50)], [], [AbortRequests(["a", "nobody"])], [])
    assert len(channel.deltas("a")) == 2
    assert channel.batches[-2].stats.blocks.num_used_blocks == 1
    last = channel.batches[-1]
    assert last.deltas == [] and (last.stats.batch.num_running, last.stats.blocks.num_used_blocks) == (0, 0)


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (add_raw("bad", [5], {"temperature": -1}), "temperature"),
        (add_raw("bad", [5], {"temperature": "hot"}), None),
        (add_raw("bad", [5], [1, 2]), None),
        (add_raw("bad", ["a"], {}), None),
        (add_raw("bad", [5], {}, {"ttft_target_s": -1}), "ttft_target_s"),
        (add_raw("bad", [5], {}, {"cache_salt": 5}), None),
        (add_raw("bad", [5], None, {}), "params"),
        (add("bad", prompt=[10**6]), "prompt"),
        (add("bad", prompt=[1] * 5000), "prompt"),
        (AddRequest("bad", [], SamplingParams()), "prompt"),
        (add("bad", stop_token_ids=[10**6]), "stop_token_ids"),
        (add("good"), "request_id"),
        (add("", prompt=[1]), "request_id"),
    ],
)
def test_a_bad_request_fails_alone(request_: AddRequest | UnreadableRequest, param: str | None) -> None:
    before = [] if isinstance(request_, AddRequest) and request_.params is None else [add("good")]
    channel = run([*before, request_], [] if before else [add("good")], *[[]] * 5)
    refusals = [delta for batch in channel.batches for delta in batch.deltas if delta.error is not None]
    (refusal,) = refusals
    assert (refusal.request_id, refusal.finish_reason, refusal.is_last) == (request_.request_id, "error", True)
    assert (refusal.error_status, refusal.error_param) == (400, param)
    assert channel.deltas("good")[-1].finish_reason == "length"


@pytest.mark.parametrize("payload", [["AddRequest", 5, [5], {}], ["AddRequest"], ["Nonsense", "a"], {"a": 1}, 7])
def test_what_is_no_request_is_no_message(payload: Any) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_to_engine(encode(payload))


def test_failed_steps_end_their_requests_say_nothing_of_why_and_never_cost_the_engine() -> None:
    names = [f"fail-{number}" for number in range(20)]
    script = [[add(name), add(f"beside-{name}")] for name in names]
    channel = run(*script, [], [add("after")], *[[]] * 5)
    for request_id in (*names, "beside-fail-0"):
        (failure,) = channel.deltas(request_id)
        assert failure.finish_reason == "error" and failure.is_last and failure.error_status == 500
        assert failure.error is not None and "secret" not in failure.error
    assert channel.deltas("after")[-1].finish_reason == "length"
    told = {delta.request_id for batch in channel.batches for delta in batch.deltas}
    assert told == {*names, *(f"beside-{name}" for name in names), "after"}, "the loop's own request is never told of"


def test_what_fails_with_one_row_is_no_failure_of_the_step() -> None:
    engine = create_engine({})
    executor = engine.core.executor
    submit = executor.submit

    def submit_and_spoil(output: SchedulerOutput) -> PendingStep:
        result = submit(output).result()
        sampled = {
            name: SampledTokens((), error="a logit of nan") if name.startswith("nan") else tokens
            for name, tokens in result.sampled.items()
        }
        return SimpleNamespace(result=lambda: ModelRunnerOutput(sampled, {}))

    executor.submit = submit_and_spoil  # type: ignore[method-assign]
    steps = [[add(f"nan-{number}")] for number in range(20)]
    channel = run(*steps, [add("nan-last"), add("a")], *[[]] * 5, engine=engine)
    assert channel.deltas("a")[-1].finish_reason == "length"
    (failure,) = channel.deltas("nan-last")
    assert failure.error == "the engine failed to process this request: a logit of nan"


@pytest.mark.parametrize(("num_beside", "num_steps"), [(0, 3), (10, 17)], ids=["alone", "under load"])
def test_an_engine_that_fails_on_a_plain_request_too_is_given_up(num_beside: int, num_steps: int) -> None:
    """What keeps coming waits in line, and does not put off the answer."""
    engine = create_engine({"max_num_seqs": 2})

    def fail(output: SchedulerOutput) -> PendingStep:
        raise RuntimeError("secret words")

    engine.core.executor.submit = fail  # type: ignore[method-assign]
    load = [[add(f"{turn}-{number}") for number in range(1 + num_beside)] for turn in range(4 + 10 * num_beside)]
    with pytest.raises(BrokenEngineError, match=f"^{num_steps} steps"):
        run(*load, engine=engine)


def test_what_was_aborted_is_dropped_before_it_is_prepared() -> None:
    engine = create_engine({})
    prepared = []
    prepare = engine.prepare

    def note(request_id: str, *args: Any, **options: Any) -> PreparedRequest:
        prepared.append(request_id)
        return prepare(request_id, *args, **options)

    engine.prepare = note  # type: ignore[method-assign]
    channel = run([add("a"), add("b"), AbortRequests(["b"])], *[[]] * 4, engine=engine)
    assert prepared == ["a"] and channel.deltas("b") == []


def test_a_grammar_is_compiled_as_long_as_a_request_waits_for_it() -> None:
    engine = create_engine({})
    jobs: dict[str, Future[Compiled]] = {}
    tried: list[int | None] = []

    def compile_later(params: SamplingParams) -> Future[Compiled]:
        tried.append(params.grammar_bytes)
        return jobs.setdefault(str(params.grammar), Future())

    engine.guides.compile = compile_later  # type: ignore[method-assign]
    shared = SamplingParams(structured_outputs={"regex": "s"}).with_grammar("shared", 5)
    own = SamplingParams(structured_outputs={"regex": "o"}).with_grammar("own")
    run(
        [AddRequest("a", [5], shared), AddRequest("b", [5], shared), AddRequest("c", [5], own)],
        [AbortRequests(["a", "c"])],
        engine=engine,
    )
    assert jobs["own"].cancelled() and not jobs["shared"].cancelled()
    assert tried == [5, 5, None]


def test_a_loop_that_sleeps_is_woken_when_a_grammar_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, job, woken = create_engine({}), Future[Compiled](), []
    engine.guides.compile = lambda params: job  # type: ignore[method-assign]
    monkeypatch.setattr(ScriptedChannel, "wake", lambda _: woken.append(job.done()))
    guided = SamplingParams(structured_outputs={"regex": "s"}).with_grammar("own")
    refused = InvalidRequestError("too large", param="structured_outputs")
    channel = run([AddRequest("a", [5], guided)], lambda: job.set_exception(refused), [], engine=engine)
    assert woken == [True]
    (delta,) = channel.deltas("a")
    assert (delta.error, delta.error_status, delta.error_param) == ("too large", 400, "structured_outputs")


def test_the_loop_knows_for_how_long_it_has_been_in_a_turn() -> None:
    engine = create_engine({})
    now_s, seen = 0.0, []
    submit = engine.core.executor.submit

    def slow(output: SchedulerOutput) -> PendingStep:
        nonlocal now_s
        now_s += 7.0
        seen.append(loop.turn_s)
        return submit(output)

    engine.core.executor.submit = slow  # type: ignore[method-assign]
    channel = ScriptedChannel([add("a", max_tokens=2)], [], lambda: seen.append(loop.turn_s))
    loop = EngineLoop(engine, channel, now=lambda: now_s)
    with pytest.raises(ChannelClosedError):
        loop.run()
    assert seen == [7.0, 7.0, 0.0]


def test_bad_words_come_spelt_and_the_loop_checks_no_parameters_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = create_engine({})
    assert engine.tokenizer is not None
    params = SamplingParams(max_tokens=2, bad_words=["x"]).with_bad_word_token_ids([[7], [8, 9]])
    monkeypatch.setattr(engine.tokenizer, "encode", lambda *args, **options: pytest.fail("the loop tokenises"))
    prepare, check, checked = engine.prepare, SamplingParams.__post_init__, []

    def note(request_id: str, prompt: Any, params: SamplingParams, options: RequestOptions) -> PreparedRequest:
        prepared = prepare(request_id, prompt, params, options)
        assert prepared.params.bad_word_token_ids == ((7,), (8, 9))
        return prepared

    def note_check(made: SamplingParams) -> None:
        checked.append(made)
        check(made)

    engine.prepare = note  # type: ignore[method-assign, assignment]
    monkeypatch.setattr(SamplingParams, "__post_init__", note_check)
    first = decode_to_engine(encode(AddRequest("first", [5, 6], params)))
    assert isinstance(first, AddRequest)
    others = [AddRequest(f"r{number}", [5, 6], None) for number in range(50)]
    long = AddRequest("long", [5] * 4095, None)  # cuts its max_tokens
    channel = run([first, *others], [long], *[[]] * 10, engine=engine)
    assert all(channel.deltas(each.request_id)[-1].finish_reason == "length" for each in (first, *others, long))
    assert not checked, "a record that has been unpacked has checked itself"


def test_shutdown_finishes_what_runs_and_refuses_what_comes() -> None:
    channel = run([add("a")], [Shutdown(60.0), add("b")], *[[]] * 10)
    assert channel.deltas("a")[-1].finish_reason == "length"
    (refusal,) = channel.deltas("b")
    assert refusal.error_status == 503
    assert len(channel.waits) < 8, "it must end by itself"


def test_shutdown_ends_what_is_not_done_in_time() -> None:
    channel = run([add("a", max_tokens=4000), add("b", max_tokens=4000)], [], [Shutdown(0.0)], [])
    for request_id in ("a", "b"):
        last = channel.deltas(request_id)[-1]
        assert last.is_last and last.error_status == 503
    assert channel.batches[-1].stats.blocks.num_used_blocks == 0


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preemptions_and_what_is_computed_again_are_counted(prefix_caching: bool) -> None:
    requests = [add(name, prompt=[5 + number] * 2, max_tokens=20) for number, name in enumerate("abc")]
    channel = run(requests, *[[]] * 120, num_kv_blocks=16, enable_prefix_caching=prefix_caching)
    last = numbers(channel.batches[-1].stats)
    assert all(channel.deltas(name)[-1].finish_reason == "length" for name in "abc")
    preemptions = [delta.timings.num_preemptions for name in "abc" if (delta := channel.deltas(name)[-1]).timings]
    assert last.num_preemptions == sum(preemptions) > 0
    # What was computed: each token but the last of each request, and some of them again.
    computed = sum(batch.stats.step.num_tokens for batch in channel.batches)
    assert computed == 3 * (2 + 20 - 1) + last.num_recomputed_tokens
    assert (last.prompt_tokens, last.generation_tokens, last.num_saved_tokens) == (6, 60, 0)
    if not prefix_caching:
        assert last.num_queried_tokens == last.num_hit_tokens == last.num_cached_blocks == 0
    else:
        assert 0 < last.num_hit_tokens < last.num_queried_tokens, "they find some of their own blocks again"


def test_counters_go_on_where_an_engine_before_ended() -> None:
    before = engine_stats(
        num_steps=100,
        generation_tokens=7,
        num_queried_tokens=100,
        num_hit_tokens=60,
        num_saved_tokens=50,
        num_inserted_blocks=9,
        num_evicted_blocks=2,
    )
    channel = run([add("a", prompt=PROMPT)], *[[]] * 4, [add("b", prompt=PROMPT)], *[[]] * 4, counted=before)
    last = numbers(channel.batches[-1].stats)
    assert (last.num_steps, last.generation_tokens) == (108, 15)
    assert (last.num_queried_tokens, last.num_hit_tokens, last.num_saved_tokens) == (126, 72, 62)
    assert last.num_inserted_blocks > 9 + 3 and last.num_evicted_blocks == 2


# ---- the prefix cache -----------------------------------------------------------------------------------------------

PROMPT = list(range(5, 18))
"""Three full blocks, and one token."""


def cached_tokens(channel: ScriptedChannel, request_id: str) -> int:
    timings = channel.deltas(request_id)[-1].timings
    assert timings is not None
    return timings.num_cached_tokens


@pytest.mark.parametrize("params", [{}, {"n": 3, "temperature": 1.0}], ids=["one", "several completions"])
def test_the_second_of_two_equal_requests_finds_the_first(params: dict[str, Any]) -> None:
    channel = run([add("a", prompt=PROMPT, **params)], *[[]] * 8, [add("b", prompt=PROMPT, **params)], *[[]] * 8)
    assert (cached_tokens(channel, "a"), cached_tokens(channel, "b")) == (0, 12)
    last = numbers(channel.batches[-1].stats)
    assert (last.num_used_blocks, last.num_table_entries) == (0, 0)
    assert last.num_cached_blocks + last.num_free_blocks == 1024 and last.num_cached_blocks >= 4


def test_a_watcher_hears_of_blocks_at_once_and_when_all_is_quiet() -> None:
    requests = [add("a", prompt=PROMPT), add("b", prompt=PROMPT)]
    channel = run([Watch(True)], [*requests], *[[]] * 8, num_kv_blocks=16)
    maps = [message.blocks for message in channel.sent if isinstance(message, BlockSnapshot)]
    assert [(run.owner, run.num_blocks) for run in maps[0].runs] == [(None, 16)]
    assert len(maps) == 2 and {run.owner for run in maps[-1].runs} == {CACHED, None}
    num_cached = sum(run.num_blocks for run in maps[-1].runs if run.owner == CACHED)
    assert num_cached == channel.batches[-1].stats.blocks.num_cached_blocks > 0


def test_a_block_map_tells_shared_blocks_from_others() -> None:
    engine = create_engine({"num_kv_blocks": 16})
    run(
        [add("done", prompt=PROMPT, max_tokens=2)],
        [],
        [],
        [add("a", prompt=PROMPT), add("b", prompt=PROMPT)],
        engine=engine,
    )
    found = block_map(engine.core.scheduler.kv_cache)
    num_blocks = Counter[int | None]()
    for each in found.runs:
        num_blocks[each.owner] += each.num_blocks
    assert found.owners == ["a", "b"]
    assert num_blocks[SHARED] == 3 and num_blocks[0] == num_blocks[1] == 1
    assert sum(num_blocks.values()) == 16


# ---- who watches ----------------------------------------------------------------------------------------------------


def test_snapshots_come_only_while_somebody_watches() -> None:
    requests = [add("a", prompt=[5] * 9), add("b"), add("c")]
    channel = run([*requests, Watch(True)], [], [Watch(False)], [], [], max_num_seqs=2)
    snapshots = [message for message in channel.sent if isinstance(message, StepSnapshot)]
    assert len(snapshots) == 2
    first, second = snapshots
    assert [(row.request_id, row.num_tokens, row.is_decode) for row in first.rows] == [("a", 9, False), ("b", 2, False)]
    assert [(row.request_id, row.num_output_tokens, row.is_decode) for row in second.rows] == [
        ("a", 1, True),
        ("b", 1, True),
    ]
    assert [row.request_id for row in first.waiting] == ["c"] and first.num_waiting == 1
    (before,) = [message for message in channel.sent if isinstance(message, BlockSnapshot)]
    assert [run.num_blocks for run in before.blocks.runs] == [first.num_blocks]
    assert first.blocks is None and second.blocks is None, "maps keep their distance"


def test_a_step_brings_a_map_if_there_was_none_for_a_while() -> None:
    now_s = 0.0

    def let_time_pass() -> None:
        nonlocal now_s
        now_s = 1.0

    channel = run([Watch(True)], let_time_pass, [add("a", prompt=[5] * 9), add("b")], [], now=lambda: now_s)
    blocks = next(message for message in channel.sent if isinstance(message, StepSnapshot)).blocks
    assert blocks is not None and blocks.owners == ["a", "b"]
    assert [(run.owner, run.num_blocks) for run in blocks.runs][:2] == [(0, 3), (1, 1)]
    assert sum(run.num_blocks for run in blocks.runs) == 1024


def test_a_block_map_shows_gaps() -> None:
    engine = create_engine({"num_kv_blocks": 8})
    loop = [[add("a"), add("b"), add("c")], [AbortRequests(["b"])]]
    run(*loop, engine=engine)
    found = block_map(engine.core.scheduler.kv_cache)
    assert [(run.owner, run.num_blocks) for run in found.runs] == [(0, 1), (None, 1), (1, 1), (None, 5)]
    assert found.owners == ["a", "c"]


# ---- the channel ----------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, EngineChannel]]:
    ours, theirs = socket.socketpair()
    channel = EngineChannel(theirs)
    yield ours, channel
    ours.close()
    channel.close()


def test_all_that_has_come_is_received_at_once_and_who_is_gone_is_noticed(
    pair: tuple[socket.socket, EngineChannel],
) -> None:
    ours, channel = pair
    assert channel.receive(timeout_s=0.0) == []
    ours.sendall(pack(Watch(True)) + pack(Watch(False)) + pack(Watch(True))[:3])
    assert channel.receive(timeout_s=10.0) == [Watch(True), Watch(False)]
    ours.sendall(pack(Watch(True))[3:])
    assert channel.receive(timeout_s=10.0) == [Watch(True)]
    ours.close()
    with pytest.raises(ChannelClosedError):
        channel.receive(timeout_s=10.0)
    with pytest.raises(ChannelClosedError):
        channel.send(Heartbeat())


def test_a_slow_front_end_does_not_stop_the_engine(pair: tuple[socket.socket, EngineChannel]) -> None:
    ours, channel = pair
    batch = StepBatch([Delta("a", text="x" * 1000)], EngineStats())
    for _ in range(1000):
        channel.send(batch)  # far more than the socket holds
    reader, found = FrameReader(), 0
    ours.settimeout(10.0)
    while found < 1000:
        channel.receive(timeout_s=0.0)  # sends on
        found += len(reader.feed(ours.recv(65536)))
    assert channel.flush(timeout_s=0.0)


# ---- the process ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"", 0), (b"\xff\xff\xff\xff", 2), (b"\x01\x00\x00\x00\xc1", 2), (pack(Watch(True)), 2)],
    ids=["nothing", "too long", "no message", "not the first"],
)
def test_without_a_proper_first_message_there_is_no_engine(sent: bytes, status: int) -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "headway.engine_process.main", "--fd", str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=(theirs.fileno(),), stderr=subprocess.DEVNULL) as process:
        theirs.close()
        ours.sendall(sent)
        if not sent:
            ours.shutdown(socket.SHUT_WR)
        assert process.wait(timeout=60) == status
    ours.close()


def test_blocks_of_the_last_step_are_served_before_the_loop_sleeps() -> None:
    events: list[str] = []
    server: Any = SimpleNamespace(
        stats=TransferStats(),
        note_request=lambda request_id: events.append(f"begins {request_id}"),
        note_end=lambda request_id: events.append(f"ends {request_id}"),
        serve=lambda: events.append("serves"),
    )

    class Sleeping(ScriptedChannel):
        def receive(self, *, timeout_s: float) -> list[Any]:
            if timeout_s:
                events.append("sleeps")
            return super().receive(timeout_s=timeout_s)

    with pytest.raises(ChannelClosedError):
        EngineLoop(create_engine({}), Sleeping([add("r", max_tokens=1)], [], []), blocks=server).run()
    assert "begins r" in events
    after = events[events.index("ends r") :]
    assert after.index("serves") < after.index("sleeps")


def test_a_reset_of_the_cache_is_answered_and_what_runs_goes_on() -> None:
    prompt = list(range(5, 30))
    channel = run(
        [add("a", prompt)], *[[]] * 6, [ResetCache("idle")], [add("b", prompt)], [], [ResetCache("busy")], *[[]] * 8
    )
    idle, busy = (message for message in channel.sent if isinstance(message, CacheResetDone))
    assert idle.name == "idle" and idle.num_forgotten > 0 and idle.num_kept == 0
    assert busy.name == "busy" and busy.num_forgotten == 0 and busy.num_kept > 0
    assert channel.deltas("b")[-1].finish_reason == "length"
    timings = channel.deltas("b")[-1].timings
    assert timings is not None and timings.num_cached_tokens == 0, "nothing is found after a reset"
