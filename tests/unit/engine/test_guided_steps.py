"""Guided requests in the engine's loop: their tokens fit, whatever happens, and guides do not outlive them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from headway.core import Request, RequestStatus, RequestUpdate, SchedulerOutput
from headway.engine.engine_core import EngineCore
from headway.executor.fake import FakeExecutor, FakeStep
from headway.loader import open_checkpoint
from headway.loader.embedded import embedded_model_path
from headway.sampling_params import SamplingParams, StructuredOutputsParams
from headway.structured.compiling import GrammarCompiler
from headway.structured.grammars import grammar_of
from headway.structured.guides import GuidedStep, Guides
from headway.tokenizer import Tokenizer
from tests.unit.core.driver import make_scheduler

YES_OR_NO = StructuredOutputsParams(choice=["yes", "no, never"])
DIGITS = StructuredOutputsParams(regex="[0-9]{4}")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = open_checkpoint(embedded_model_path()).tokenizer()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


@pytest.fixture
def guides(compiler: GrammarCompiler) -> Iterator[Guides]:
    made = Guides(compiler, compiler.vocab_size)
    yield made
    made.close()


class Executor(FakeExecutor):
    """Wants a token that no grammar here begins with, so masks decide."""

    def __init__(self, max_in_flight: int) -> None:
        super().__init__(lambda request_id, num_tokens: 5000, max_in_flight=max_in_flight)
        self.forwarded: list[int] = []
        self.fails_at: int | None = None

    def forward(self, output: SchedulerOutput) -> FakeStep:
        self.forwarded.append(output.step_id)
        if output.step_id == self.fails_at:
            raise ValueError("the device is gone")
        return super().forward(output)

    def forget_steps(self) -> None:
        """Steps that were interrupted are never asked for their result."""
        self._in_flight.clear()


class Loop:
    """An engine core, and what has come out of it."""

    def __init__(self, guides: Guides, tokenizer: Tokenizer, max_in_flight: int) -> None:
        self.tokenizer, self.guides = tokenizer, guides
        self.executor = Executor(max_in_flight)
        self.core = EngineCore(
            make_scheduler(max_num_seqs=8, num_blocks=64), self.executor, now=lambda: 0.0, guides=guides
        )
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, RequestUpdate] = {}

    def add(self, name: str, structured: StructuredOutputsParams | None, **fields: Any) -> None:
        params = SamplingParams(max_tokens=40, structured_outputs=structured, **fields)
        if structured is not None:
            params = params.with_grammar(grammar_of(structured))
        stops = frozenset() if params.ignore_eos else frozenset(self.tokenizer.eos_token_ids)
        self.core.add_request(
            Request(
                name,
                (1, 2, 3),
                max_tokens=40,
                min_tokens=params.min_tokens,
                stop_token_ids=stops,
                sampling_params=params,
            )
        )

    def step(self) -> None:
        for update in self.core.step().updates:
            self.tokens.setdefault(update.request_id, []).extend(update.new_token_ids)
            if update.finish_status is not None:
                self.ends[update.request_id] = update
        self.core.check_invariants()

    def run(self) -> None:
        for _ in range(200):
            if not self.core.has_unfinished_requests:
                self.core.drain()
                return
            self.step()
        raise AssertionError("no end")

    def text(self, name: str) -> str:
        return self.tokenizer.decode(self.tokens[name])


@pytest.fixture(params=[1, 2], ids=["one at a time", "overlap"])
def loop(request: pytest.FixtureRequest, guides: Guides, tokenizer: Tokenizer) -> Loop:
    return Loop(guides, tokenizer, request.param)


def test_guided_and_other_requests_in_one_batch(loop: Loop) -> None:
    loop.add("choice", YES_OR_NO)
    loop.add("digits", DIGITS)
    loop.add("free", None)
    loop.run()
    assert loop.text("choice") in ("yes", "no, never") and len(loop.text("digits")) == 4
    assert loop.text("digits").isdigit() and set(loop.tokens["free"]) == {5000}
    assert {name: end.finish_status for name, end in loop.ends.items()} == {
        "choice": RequestStatus.FINISHED_STOPPED,
        "digits": RequestStatus.FINISHED_STOPPED,
        "free": RequestStatus.FINISHED_LENGTH,
    }
    assert not loop.guides.live


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
    assert loop.ends["digits"].finish_status is RequestStatus.FINISHED_STOPPED
    assert len(loop.tokens["free"]) == 40


def test_a_request_is_aborted_and_its_name_used_again_at_any_time(loop: Loop) -> None:
    for num_steps in range(5):
        loop.tokens.clear(), loop.ends.clear()
        loop.add("a", YES_OR_NO)
        loop.add("b", DIGITS)
        for _ in range(num_steps):
            loop.step()
        if "a" not in loop.ends:
            loop.core.finish_request("a", RequestStatus.FINISHED_ABORTED)
        loop.tokens.pop("a", None)
        loop.add("a", DIGITS)
        loop.run()
        assert loop.text("a").isdigit() and loop.text("b").isdigit()
        assert not loop.guides.live


def test_a_matcher_that_breaks_fails_its_request_alone(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop.add("broken", DIGITS)
    loop.add("whole", YES_OR_NO)
    loop.step()
    matcher = loop.guides.live["broken"].matcher
    assert matcher is not None
    while matcher.consume_token(5000):
        pass
    loop.run()
    assert loop.ends["broken"].finish_status is RequestStatus.FINISHED_ERROR and loop.ends["broken"].error
    assert loop.text("whole") in ("yes", "no, never")


def test_a_step_that_fails_takes_its_requests_and_no_guide_stays(loop: Loop) -> None:
    loop.executor.fails_at = 1
    loop.add("a", DIGITS)
    loop.run()
    assert loop.ends["a"].finish_status is RequestStatus.FINISHED_ERROR
    assert "the device is gone" in str(loop.ends["a"].error)
    loop.add("a", YES_OR_NO)
    loop.tokens.clear()
    loop.run()
    assert loop.text("a") in ("yes", "no, never") and not loop.guides.live


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
    assert loop.ends["a"].finish_status is RequestStatus.FINISHED_ERROR
    loop.tokens.clear()
    loop.add("b", DIGITS)
    loop.run()
    assert loop.text("b").isdigit() and not loop.guides.live
