"""`best_of`: the most likely of all completions are returned, and how they were found is not shown."""

from __future__ import annotations

import pytest

from headway.engine.output_processor import choose_best
from headway.outputs import CompletionOutput
from headway.sampling_params import SamplingParams
from tests.unit.engine.scripted_logprobs import make_engine, run_to_end

PROMPT = [3, 1, 4, 1, 5]
both = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])


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


def test_logprobs_are_shown_only_if_asked_for() -> None:
    for completion in completions_of(SamplingParams(n=1, best_of=3, max_tokens=4)):
        assert completion.logprobs is None and completion.cumulative_logprob is None
    for completion in completions_of(SamplingParams(n=1, best_of=3, max_tokens=4, logprobs=0)):
        assert completion.logprobs is not None and len(completion.logprobs) == 4


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
