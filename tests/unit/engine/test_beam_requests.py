"""Beam searches and `best_of` in the engine: the same result whatever happens around them, and nothing is left."""

from __future__ import annotations

from typing import Any, cast

import pytest

from headway.core.request_options import RequestOptions
from headway.engine.beam_search import BeamRules, BeamSearch
from headway.engine.llm_engine import LLMEngine
from headway.engine.output_processor import choose_best
from headway.errors import InvalidRequestError, RequestTooLargeError
from headway.outputs import CompletionOutput, RequestOutput
from headway.sampling_params import SamplingParams
from tests.unit.engine.scripted_logprobs import BLOCK_SIZE, ScriptedExecutor, make_engine, most_likely, run_to_end

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
STOPS = (0, 7)
both = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])


def beams(width: int = 4, max_tokens: int = 10, **changes: Any) -> SamplingParams:
    return SamplingParams(n=width, use_beam_search=True, max_tokens=max_tokens, stop_token_ids=STOPS, **changes)


def expected(prompt: list[int], params: SamplingParams) -> list[tuple[int, ...]]:
    """The same search without an engine."""
    assert params.max_tokens is not None
    rules = BeamRules(
        width=params.num_choices,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=frozenset(params.extra_stop_token_ids),
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
    )
    search = BeamSearch(rules)
    while search.live:
        search.advance([most_likely((*prompt, *beam.token_ids), rules.num_top) for beam in search.live])
    return [beam.token_ids for beam in search.best(params.n)]


def sequences(output: RequestOutput) -> list[tuple[int, ...]]:
    return [tuple(completion.token_ids) for completion in output.outputs]


def nothing_is_left(engine: LLMEngine) -> bool:
    kv_cache = engine.core.scheduler.kv_cache
    return not engine.has_unfinished_requests() and not kv_cache.num_used_blocks and not kv_cache.holdings


@both
@pytest.mark.parametrize(
    "options",
    [{}, {"enable_prefix_caching": False}, {"num_blocks": 6}, {"max_num_seqs": 3}, {"max_chunk_tokens": 2}],
    ids=str,
)
def test_the_same_whatever_the_engine_is_like(overlap: bool, options: dict[str, Any]) -> None:
    engine = make_engine(overlap=overlap, **options)
    params = beams(length_penalty=0.5)
    engine.add_request("a", PROMPT, params, stream=False)
    output = run_to_end(engine)["a"]
    assert sequences(output) == expected(PROMPT, params)
    assert output.finished and output.prompt_token_ids == PROMPT
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    for completion in output.outputs:
        stopped = completion.token_ids[-1] in STOPS
        assert completion.finish_reason == ("stop" if stopped else "length")
        assert completion.stop_reason == (completion.token_ids[-1] if stopped else None)
        assert completion.cumulative_logprob is not None and completion.cumulative_logprob < 0
        assert completion.logprobs is None
    assert nothing_is_left(engine)


@both
def test_many_searches_among_other_requests_in_a_small_cache(overlap: bool) -> None:
    engine = make_engine(overlap=overlap, num_blocks=8, max_num_seqs=6)
    prompts = {f"s{i}": PROMPT[: 4 + i] for i in range(4)}
    params = {name: beams(2, 6 + i, best_of=2 + i, early_stopping=i % 2 == 0) for i, name in enumerate(prompts)}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params[name], stream=False)
        engine.add_request(f"{name} greedy", prompt, SamplingParams(temperature=0, max_tokens=20))
    outputs = run_to_end(engine)
    assert {name: sequences(outputs[name]) for name in prompts} == {
        name: expected(prompt, params[name]) for name, prompt in prompts.items()
    }
    for name, prompt in prompts.items():
        tokens = tuple(prompt)
        for _ in range(20):
            tokens += (most_likely(tokens, 0).token_id,)
        assert sequences(outputs[f"{name} greedy"]) == [tokens[len(prompt) :]]
    preemptions = [output.metrics.num_preemptions for output in outputs.values() if output.metrics]
    assert sum(preemptions) > 0


@both
def test_abort_at_any_time_frees_everything(overlap: bool) -> None:
    num_steps = 0
    while True:
        engine = make_engine(overlap=overlap, num_blocks=16)
        engine.add_request("a", PROMPT, beams(5, early_stopping="never"), stream=False)
        engine.add_request("b", PROMPT[:3], SamplingParams(temperature=0, max_tokens=45))
        other = {}
        for _ in range(num_steps):
            other |= {output.request_id: output for output in engine.step().outputs}
            engine.check_invariants()
        output = engine.abort("a")
        if output is None:
            break
        engine.check_invariants()
        assert output.finished and 1 <= len(output.outputs) <= 5
        assert all(completion.finish_reason is not None for completion in output.outputs)
        assert any(completion.finish_reason == "abort" for completion in output.outputs)
        assert set(engine.core.scheduler.requests) <= {"b"}
        assert engine.abort("a") is None
        assert len((other | run_to_end(engine))["b"].outputs[0].token_ids) == 45
        assert nothing_is_left(engine)
        num_steps += 1
    assert num_steps >= 10


@both
@pytest.mark.parametrize("failing_step", [0, 1, 4])
def test_a_failing_step_ends_the_search_with_the_reason(overlap: bool, failing_step: int) -> None:
    engine = make_engine(overlap=overlap, max_num_seqs=3)  # the beams of a position take two steps
    cast(ScriptedExecutor, engine.core.executor).fails_at = lambda output: output.step_id == failing_step
    engine.add_request("a", PROMPT, beams(), stream=False)
    errors: dict[str, str] = {}
    output = run_to_end(engine, errors)["a"]
    assert output.finished
    assert {completion.finish_reason for completion in output.outputs} == {"error"}
    assert "caught fire" in errors["a"]
    assert nothing_is_left(engine)
    engine.add_request("a", PROMPT, beams(), stream=False)
    assert sequences(run_to_end(engine)["a"]) == expected(PROMPT, beams())


@pytest.mark.parametrize("stream", [True, "full", "delta"])
def test_streaming_is_refused(stream: Any) -> None:
    engine = make_engine()
    for params, name in ((beams(), "use_beam_search"), (SamplingParams(best_of=2), "best_of")):
        with pytest.raises(InvalidRequestError, match="streaming") as caught:
            engine.add_request("a", PROMPT, params, stream=stream)
        assert caught.value.param == name
    assert nothing_is_left(engine)
    engine.add_request("a", PROMPT, SamplingParams(n=2, best_of=2, max_tokens=2), stream=stream)
    run_to_end(engine)


def test_what_can_never_fit_is_refused_and_no_limit_is_that_of_the_context() -> None:
    engine = make_engine(num_blocks=4)
    with pytest.raises(RequestTooLargeError, match="whole cache holds 16"):
        engine.add_request("a", PROMPT, beams(max_tokens=9), stream=False)
    engine.add_request("a", PROMPT, beams(max_tokens=8), stream=False)
    assert sequences(run_to_end(engine)["a"]) == expected(PROMPT, beams(max_tokens=8))
    with pytest.raises(InvalidRequestError, match="too wide") as caught:
        engine.prepare("a", PROMPT, SamplingParams(best_of=1024, use_beam_search=True, stop_token_ids=[1]))
    assert caught.value.param == "best_of"
    engine = make_engine()
    engine.add_request("a", PROMPT, SamplingParams(n=2, use_beam_search=True, max_tokens=None), stream=False)
    assert [len(found) for found in sequences(run_to_end(engine)["a"])] == [64 - len(PROMPT)] * 2


def test_only_the_same_salt_shares() -> None:
    engine = make_engine()
    for name, salt in (("a", "x"), ("b", "x"), ("c", "y")):
        engine.add_request(name, PROMPT, beams(), RequestOptions(cache_salt=salt), stream=False)
        output = run_to_end(engine)[name]
        assert sequences(output) == expected(PROMPT, beams())
        assert output.num_cached_tokens == (len(PROMPT) - 1 if name == "b" else 0)


@pytest.mark.parametrize("params", [beams(8, 16), SamplingParams(n=8, max_tokens=16)], ids=["beams", "samples"])
def test_eight_need_little_more_blocks_than_one(params: SamplingParams) -> None:
    prompt = [token % 12 for token in range(41)]
    alone, together = (_peak_blocks(prompt, each) for each in (SamplingParams(temperature=0, max_tokens=16), params))
    assert together <= alone + 8 * (16 // BLOCK_SIZE + 1)
    assert together > alone


def _peak_blocks(prompt: list[int], params: SamplingParams) -> int:
    engine, peak = make_engine(), 0
    engine.add_request("a", prompt, params, stream=False)
    while engine.has_unfinished_requests():
        peak = max(peak, engine.step().report.num_used_blocks)
        engine.check_invariants()
    return peak


# ---- `best_of`: how completions were found is not shown ------------------------------------------------------------


def completions_of(params: SamplingParams, *, overlap: bool = False) -> list[CompletionOutput]:
    engine = make_engine(overlap=overlap)
    engine.add_request("a", PROMPT, params, stream=False)
    return run_to_end(engine)["a"].outputs


@both
def test_the_best_of_all_are_returned_the_best_first(overlap: bool) -> None:
    everything = completions_of(SamplingParams(n=6, max_tokens=8, stop_token_ids=[0, 1, 2], logprobs=0))
    assert len({len(completion.token_ids) for completion in everything}) > 1

    def per_token(completion: CompletionOutput) -> float:
        assert completion.cumulative_logprob is not None
        return completion.cumulative_logprob / len(completion.token_ids)

    expected = sorted(everything, key=per_token, reverse=True)[:2]
    params = SamplingParams(n=2, best_of=6, max_tokens=8, stop_token_ids=[0, 1, 2], logprobs=0)
    chosen = completions_of(params, overlap=overlap)
    assert [completion.token_ids for completion in chosen] == [completion.token_ids for completion in expected]
    assert [completion.index for completion in chosen] == [0, 1]
    assert [completion.cumulative_logprob for completion in chosen] == [each.cumulative_logprob for each in expected]
    assert [completion.logprobs for completion in chosen] == [each.logprobs for each in expected]


def test_a_failure_is_not_hidden_and_equals_keep_their_order() -> None:
    def completion(index: int, reason: str, logprob: float, tokens: list[int]) -> CompletionOutput:
        return CompletionOutput(index, "", tokens, logprob, [], finish_reason=reason)  # type: ignore[arg-type]

    made = [
        completion(0, "stop", -2.0, [1, 2]),
        completion(1, "stop", -1.0, [3]),
        completion(2, "length", -0.5, [4]),
        completion(3, "abort", 0.0, []),
        completion(4, "error", -9.0, [5]),
    ]
    best = choose_best(made[:4], SamplingParams(n=4, best_of=5, logprobs=0))
    assert [each.token_ids for each in best] == [[4], [1, 2], [3], []]
    (failed,) = choose_best(made, SamplingParams(n=1, best_of=5))
    assert (failed.index, failed.finish_reason, failed.token_ids) == (0, "error", [5])
    assert failed.logprobs is failed.cumulative_logprob is None
