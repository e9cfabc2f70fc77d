"""A request that cannot enter the batch fails alone, on both runners: its neighbours get the tokens they would have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.triton_device import DEVICE  # isort: split

from headway import LLM, SamplingParams
from headway.core.scheduler_output import NewRequest
from headway.outputs import CompletionOutput
from headway.runner.base import RunnerSettings
from headway.runner.rows import RowTable
from headway.runner.sampler import SamplingRows
from tests.unit.runner.tiny_llm import MAX_MODEL_LEN, VOCAB_SIZE, TinyLLM, finish_all, random_prompts

PROMPTS = random_prompts(3, 5, 2)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=5, repetition_penalty=1.3, max_tokens=2, ignore_eos=True),
    SamplingParams(temperature=0, logit_bias={7: 3.0}, max_tokens=2, ignore_eos=True),
]
RUNNERS: dict[str, Callable[[TinyLLM], LLM]] = {
    "cpu": lambda tiny: tiny.on_cpu(max_num_seqs=4),
    "gpu": lambda tiny: tiny.on_gpu(max_num_seqs=4),
    "gpu, overlapped": lambda tiny: tiny.on_gpu(max_num_seqs=4, async_scheduling=True),
}


def break_params(request: Any) -> None:
    """As if the edge had let a token pass that the model does not have."""
    object.__setattr__(request.sampling_params, "bad_word_token_ids", ((VOCAB_SIZE + 3,),))


def break_type(request: Any) -> None:
    request.sampling_params = "nonsense"


def break_length(request: Any) -> None:
    """More tokens than a row has room for, where the scheduler believes in few."""
    request.prompt_token_ids = (1,) * (MAX_MODEL_LEN + 5)


def answers(llm: LLM, **more: Callable[[], None]) -> tuple[dict[str, CompletionOutput], dict[str, str]]:
    for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS)):
        more.get(f"before_{number}", lambda: None)()
        llm.engine.add_request(str(number), prompt, params, stream=False)
    return finish_all(llm)


CASES = [
    *(("cpu", broken) for broken in (break_params, break_type, break_length)),
    ("gpu", break_length),
    ("gpu, overlapped", break_params),
]


@pytest.mark.parametrize(("runner", "broken"), CASES)
def test_a_request_that_cannot_be_seated_fails_alone(tiny: TinyLLM, runner: str, broken: Callable[[Any], None]) -> None:
    llm = RUNNERS[runner](tiny)
    expected = {name: output.token_ids for name, output in answers(llm)[0].items()}

    def submit_broken() -> None:
        prepared = llm.engine.prepare("broken", [3, 1, 4], SamplingParams(temperature=0, max_tokens=4))
        llm.engine.submit(prepared, stream=False)
        broken(prepared.children[0])

    for place in ("before_1", "before_0"):  # all rows are needed each time: none may be lost
        done, errors = answers(llm, **{place: submit_broken})
        failed = done.pop("broken")
        assert failed.finish_reason == "error" and not failed.token_ids
        assert errors["broken"]
        assert {name: output.token_ids for name, output in done.items()} == expected


def test_rows_stay_free_when_a_request_does_not_fit() -> None:
    rows = RowTable(RunnerSettings(DEVICE, 2, 8, max_model_len=4, block_size=2, eos_token_ids=(3,)), VOCAB_SIZE)
    params = SamplingParams(repetition_penalty=2.0, logit_bias={1: 1.0}, prompt_logprobs=0)
    good = NewRequest("good", (1, 2), (), params)
    for bad, message in (
        (NewRequest("long", (1,) * 5, (), params), "does not fit"),
        (NewRequest("wide", (1,), (), params, block_ids=(1, 2, 3)), "does not fit"),
        (NewRequest("unknown", (1,), (), SamplingParams(logit_bias={VOCAB_SIZE: 1.0})), "vocabulary"),
        (NewRequest("untyped", (1,), (), None), "sampling_params"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            rows.seat([good, bad])
        assert not rows.row_of and not rows.wanted_prompts and not rows.sampling.flags.any()
    assert [seat.row for seat in rows.seat([good, NewRequest("other", (7, 8, 9), (), params)])] == [0, 1]
    with pytest.raises(ValueError, match="1 requests for 0 free rows"):
        rows.seat([NewRequest("third", (1,), (), params)])
    rows.free("good")
    assert [seat.row for seat in rows.seat([NewRequest("third", (1,), (), params)])] == [0]


def test_completions_of_a_request_share_their_edits() -> None:
    rows = RowTable(RunnerSettings(DEVICE, 4, 8, max_model_len=4, block_size=2), VOCAB_SIZE)
    params = SamplingParams(n=3, seed=5, logit_bias=dict.fromkeys(range(50), 1.0))
    rows.seat([NewRequest(str(index), (1,), (), params.for_choice(index)) for index in range(3)])
    rows.seat([NewRequest("another", (1,), (), SamplingParams(logit_bias={1: 2.0}))])
    edits = rows.sampling._edits._edits
    assert edits[0] is edits[1] is edits[2] is not edits[3]


def test_end_tokens_outside_the_vocabulary_reach_no_kernel() -> None:
    with pytest.raises(ValueError, match="vocabulary of 10"):
        SamplingRows(1, 10, eos_token_ids=[3, 10])
