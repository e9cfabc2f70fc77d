"""Guided requests in the engine's loop: their tokens fit, whatever happens, and guides do not outlive them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from headway.core import SchedulerOutput
from headway.executor.fake import FakeExecutor, FakeStep
from headway.loader import open_checkpoint
from headway.loader.embedded import embedded_model_path
from headway.outputs import CompletionOutput
from headway.sampling_params import SamplingParams, StructuredOutputsParams
from headway.structured.guides import GuidedStep
from headway.tokenizer import Tokenizer
from tests.unit.no_model import engine_on

YES_OR_NO = StructuredOutputsParams(choice=["yes", "no, never"])
DIGITS = StructuredOutputsParams(regex="[0-9]{4}")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = open_checkpoint(embedded_model_path()).tokenizer()
    assert found is not None
    return found


class Executor(FakeExecutor):
    """Wants a token that no grammar here begins with, so masks decide."""

    def __init__(self, max_in_flight: int) -> None:
        super().__init__(lambda request_id, num_tokens: 5000, max_in_flight=max_in_flight)
        self.forwarded: list[int] = []

    def forward(self, output: SchedulerOutput) -> FakeStep:
        self.forwarded.append(output.step_id)
        return super().forward(output)

    def forget_steps(self) -> None:
        """Steps that were interrupted are never asked for their result."""
        self._in_flight.clear()


class Loop:
    """An engine, and what has come out of it."""

    def __init__(self, tokenizer: Tokenizer, max_in_flight: int) -> None:
        self.executor = Executor(max_in_flight)
        self.engine = engine_on(self.executor, tokenizer=tokenizer, vocab_size=tokenizer.vocab_size, max_num_seqs=8)
        self.ends: dict[str, CompletionOutput] = {}
        self.errors: dict[str, str] = {}

    def add(self, name: str, structured: StructuredOutputsParams | None, **fields: Any) -> None:
        params = SamplingParams(max_tokens=40, structured_outputs=structured, **fields)
        self.engine.add_request(name, [1, 2, 3], params)

    def step(self) -> None:
        done = self.engine.step()
        self.errors |= done.errors
        self.ends |= {output.request_id: output.outputs[0] for output in done.outputs if output.finished}
        self.engine.check_invariants()

    def run(self) -> None:
        while self.engine.has_unfinished_requests():
            self.step()
        assert not self.engine.guides.live

    def text(self, name: str) -> str:
        assert self.ends[name].finish_reason == "stop"
        return self.ends[name].text


@pytest.fixture(params=[1, 2], ids=["one at a time", "overlap"])
def loop(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Iterator[Loop]:
    made = Loop(tokenizer, request.param)
    yield made
    made.engine.shutdown()


def test_guided_and_other_requests_in_one_batch(loop: Loop) -> None:
    loop.add("choice", YES_OR_NO)
    loop.add("digits", DIGITS)
    loop.add("free", None)
    loop.run()
    assert loop.text("choice") in ("yes", "no, never")
    assert loop.text("digits").isdigit() and len(loop.text("digits")) == 4
    assert set(loop.ends["free"].token_ids) == {5000} and loop.ends["free"].finish_reason == "length"


def test_an_engine_without_guided_requests_pays_nothing_for_them(loop: Loop) -> None:
    loop.add("free", None)
    loop.run()
    assert loop.engine.core.executor is loop.executor and not loop.executor.forwarded


def test_steps_overlap_with_masks(loop: Loop) -> None:
    """Forward of a guided step is launched before the result of the one ahead is known."""
    loop.add("digits", DIGITS)
    loop.step()
    assert loop.executor.forwarded == [0, 1][: loop.executor.max_in_flight]
    loop.run()


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 30}], ids=str)
def test_a_grammar_ends_a_request_whose_end_token_is_barred(loop: Loop, fields: dict[str, Any]) -> None:
    loop.add("digits", DIGITS, **fields)
    loop.add("free", None)
    loop.run()
    assert loop.text("digits").isdigit() and len(loop.text("digits")) == 4
    assert len(loop.ends["free"].token_ids) == 40


def test_a_request_is_aborted_and_its_name_used_again_at_any_time(loop: Loop) -> None:
    for num_steps in range(5):
        loop.add("a", YES_OR_NO)
        loop.add("b", DIGITS)
        for _ in range(num_steps):
            loop.step()
        loop.engine.abort("a")
        loop.add("a", DIGITS)
        loop.run()
        assert loop.text("a").isdigit() and loop.text("b").isdigit()


def test_a_matcher_that_breaks_fails_its_request_alone(loop: Loop) -> None:
    loop.add("broken", DIGITS)
    loop.add("whole", YES_OR_NO)
    loop.step()
    matcher = loop.engine.guides.live["broken"].matcher
    assert matcher is not None
    while matcher.consume_token(5000):
        pass
    loop.run()
    assert loop.ends["broken"].finish_reason == "error" and loop.errors["broken"]
    assert loop.text("whole") in ("yes", "no, never")


@pytest.mark.parametrize("num_before", range(4))
def test_an_interruption_while_masks_are_awaited(loop: Loop, num_before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the step's requests, and the engine goes on."""
    loop.add("a", DIGITS)
    for _ in range(num_before):
        loop.step()
    result = Future.result

    def interrupted(self: Future[Any], timeout: float | None = None) -> Any:
        found = result(self, timeout)
        if isinstance(found, GuidedStep):
            monkeypatch.setattr(Future, "result", result)
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    loop.executor.forget_steps()
    loop.run()
    assert loop.ends["a"].finish_reason == "error"
    loop.add("b", DIGITS)
    loop.run()
    assert loop.text("b").isdigit()
