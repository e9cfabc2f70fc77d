"""What users get from the engine: outputs, finish reasons and times, with and without overlapping steps."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from headway import tracing
from headway.core import ModelRunnerOutput, PromptLogprobs, RequestUpdate, SchedulerOutput, TokenLogprobs
from headway.engine import output_processor
from headway.engine.completion import Completion, position_logprobs
from headway.engine.llm_engine import LLMEngine
from headway.engine.request_preparer import RequestPreparer
from headway.executor.fake import FakeExecutor, FakeStep
from headway.outputs import Delivered, Logprob
from headway.sampling_params import SamplingParams
from tests.unit.engine_process.small_engine import create_engine, small_tokenizer
from tests.unit.no_model import all_outputs, engine_on


class Executor(FakeExecutor):
    """Also finds logprobs of whole prompts: of each position, its number."""

    def _answer(self, step: FakeStep, output: SchedulerOutput) -> ModelRunnerOutput:
        found = {
            share.request_id: PromptLogprobs(1, tuple(logprob(place) for place in range(1, share.num_tokens)))
            for share in output.scheduled
            if share.num_tokens > 1
        }
        return ModelRunnerOutput(super()._answer(step, output).sampled, found)


def logprob(place: int) -> TokenLogprobs:
    return TokenLogprobs(token_id=place, logprob=-float(place), rank=1, top_ids=[], top_logprobs=[])


def make_engine(
    next_token: Callable[[str, int], int] = lambda name, count: count,
    *,
    overlap: bool,
    executor_class: type[FakeExecutor] = FakeExecutor,
    **options: Any,
) -> LLMEngine:
    return engine_on(
        executor_class(next_token, max_in_flight=2 if overlap else 1), now=itertools.count(1.0).__next__, **options
    )


both = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])


@both
def test_a_stream_grows_by_a_token_and_its_outputs_do_not_change_later(overlap: bool) -> None:
    engine = make_engine(overlap=overlap)
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=4))
    outputs = all_outputs(engine)
    assert [output.outputs[0].token_ids for output in outputs] == [[3], [3, 4], [3, 4, 5], [3, 4, 5, 6]]
    assert [output.finished for output in outputs] == [False, False, False, True]
    assert all(output.prompt_token_ids == [1, 2, 3] for output in outputs)
    assert outputs[-1].outputs[0].finish_reason == "length"


@both
def test_times_are_those_of_the_request(overlap: bool) -> None:
    engine = make_engine(overlap=overlap)
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=3))
    outputs = all_outputs(engine)
    first, last = outputs[0].metrics, outputs[-1].metrics
    assert first is not None and last is not None
    assert first.arrival_time_s < first.first_scheduled_s < first.first_token_s
    assert first.finished_s is None
    assert last.first_token_s == first.first_token_s < last.finished_s
    assert last.num_preemptions == 0


def test_a_new_request_inherits_nothing_from_an_aborted_one_with_its_id() -> None:
    engine = make_engine(lambda name, count: 7, overlap=True, executor_class=Executor)
    params = SamplingParams(max_tokens=9, prompt_logprobs=0)
    engine.add_request("b", [1, 2], SamplingParams(max_tokens=20, prompt_logprobs=0))
    engine.step()
    engine.add_request("a", [1, 2, 3, 4], params)
    engine.step()  # the step with its prompt is under way
    assert engine.abort("a") is not None
    engine.add_request("a", [5, 6], params)
    arrived_s = engine._now()
    outputs = [output for output in all_outputs(engine) if output.request_id == "a"]
    assert outputs[-1].outputs[0].token_ids == [7] * 9
    assert len(outputs) == 9
    metrics = outputs[-1].metrics
    assert metrics is not None and metrics.first_scheduled_s > arrived_s and metrics.first_token_s > arrived_s
    assert outputs[-1].prompt_logprobs == [None, position_logprobs(logprob(1))]


@both
def test_the_failure_of_one_completion_is_told_with_the_requests_outputs(overlap: bool) -> None:
    def next_token(name: str, count: int) -> int:
        if name == "a#1":
            raise RuntimeError("the kernel caught fire")
        return count

    engine = make_engine(next_token, overlap=overlap, max_num_seqs=1)  # one after the other
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=2, n=3, temperature=1.0), stream=False)
    steps = []
    while engine.has_unfinished_requests():
        steps.append(engine.step())
    (last,) = [step for step in steps if step.outputs]
    assert [completion.finish_reason for completion in last.outputs[0].outputs] == ["length", "error", "length"]
    assert "caught fire" in last.errors["a"]
    assert not any(step.errors for step in steps if step is not last)


def test_the_report_has_the_time_of_planning() -> None:
    engine = make_engine(overlap=True)
    schedule, clock = engine.core.scheduler.schedule, engine._now

    def slow(*, now_s: float) -> SchedulerOutput:
        until_s = clock() + 10.0
        while clock() < until_s:
            pass
        return schedule(now_s=now_s)

    engine.core.scheduler.schedule = slow  # type: ignore[method-assign]
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=4))
    times_s = []
    while engine.has_unfinished_requests():
        times_s.append(engine.step().report.schedule_s)
    assert times_s[0] >= 20.0, "it plans the first two steps before it takes a result"
    assert all(10.0 <= time_s < 20.0 for time_s in times_s[1:])


@pytest.mark.parametrize("overlap", [False, True])
def test_a_recorder_sees_the_parts_of_every_step(overlap: bool) -> None:
    engine = make_engine(overlap=overlap)
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=2))
    recorder = tracing.Recorder()
    tracing.record_into(recorder)
    try:
        while engine.has_unfinished_requests():
            engine.step()
    finally:
        tracing.record_into(None)
    names = [recorded.name for recorded in recorder.spans]
    one, two = ["schedule", "submit"], ["wait", "update", "outputs"]
    assert names == (one + one + two + ["schedule"] + two if overlap else one + two + one + two)


def test_bad_words_are_spelt_once_for_all_prompts_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, encoded = small_tokenizer(), []
    encode = tokenizer.encode

    def note(text: str, **options: Any) -> list[int]:
        encoded.append(text)
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", note)
    preparer = RequestPreparer(tokenizer=tokenizer, vocab_size=tokenizer.vocab_size, max_model_len=64)
    params = SamplingParams(bad_words=["no"], max_tokens=50)
    for number in range(20):
        prepared = preparer.prepare(f"r{number}", [1] * (number + 1), params)
        assert prepared.params.bad_word_token_ids == (tuple(encode("no")), tuple(encode(" no")))
    assert encoded == ["no", " no"]


def test_a_sequence_whose_tokens_make_no_output_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(overlap=False)
    for name in ("good", "bad"):
        engine.add_request(name, [1, 2, 3], SamplingParams(max_tokens=4))
    take = Completion.take

    def take_or_raise(completion: Completion, update: RequestUpdate) -> bool:
        if completion.request_id == "bad" and len(completion.token_ids) == 2:
            raise ZeroDivisionError
        return take(completion, update)

    monkeypatch.setattr(Completion, "take", take_or_raise)
    errors: dict[str, str] = {}
    ends = {output.request_id: output.outputs[0] for output in all_outputs(engine, errors) if output.finished}
    assert (ends["good"].finish_reason, len(ends["good"].token_ids)) == ("length", 4)
    assert (ends["bad"].finish_reason, len(ends["bad"].token_ids)) == ("error", 2)
    assert errors == {"bad": output_processor.OUTPUT_FAILED}


def test_logprobs_of_a_position_begin_with_its_token_and_repeat_nothing() -> None:
    record = TokenLogprobs(5, -3.0, 9, [2, 5, 1], [-1.0, -3.0, -4.0])
    told = position_logprobs(record, str)
    assert told == {5: Logprob(-3.0, 9, "5"), 2: Logprob(-1.0, 1, "2"), 1: Logprob(-4.0, 3, "1")}
    assert list(position_logprobs(record)) == [5, 2, 1]
    assert position_logprobs(record)[2].decoded_token is None
    with_named = dataclasses.replace(record, named_ids=(7, 1), named_logprobs=(-9.0, -4.0))
    assert position_logprobs(with_named, str) == told | {7: Logprob(-9.0, None, "7")}


@both
@pytest.mark.parametrize("max_tokens", [1, 3])
def test_prompt_logprobs_come_once_with_the_first_delta(overlap: bool, max_tokens: int) -> None:
    engine = make_engine(overlap=overlap, executor_class=Executor)
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=max_tokens, prompt_logprobs=0), stream="delta")
    first, *others = all_outputs(engine)
    assert [None if p is None else list(p) for p in first.prompt_logprobs or ()] == [None, [1], [2]]
    assert [output.prompt_logprobs for output in others] == [None] * (max_tokens - 1)


def test_an_aborted_delta_stream_returns_what_was_new() -> None:
    engine = create_engine({})
    engine.add_request("a", [5], SamplingParams(max_tokens=40, stop=["bcz"]), stream="delta")
    told = "".join(output.outputs[0].text for output in (engine.step().outputs + engine.step().outputs))
    last = engine.abort("a")
    assert told == "" and last is not None
    assert (last.outputs[0].text, last.outputs[0].token_ids, last.outputs[0].finish_reason) == ("bc", [], "abort")


def test_what_was_told_elsewhere_is_not_told_again() -> None:
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=1)

    def tokens(told: list[int]) -> list[int]:
        engine = create_engine({})
        assert engine.resume(engine.prepare("a", "The line", params), [Delivered(told)]) is None
        found: list[int] = []
        while engine.has_unfinished_requests():
            for output in engine.step().outputs:
                found += output.outputs[0].token_ids
        return found

    whole = tokens([])
    assert len(whole) == 6 and tokens(whole[:2]) == whole[2:]
