"""The loop that steps an engine, against a channel that is written down beforehand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from headway.core import SchedulerOutput
from headway.engine.driver import BrokenEngineError, EngineDriver, Newcomer
from headway.engine.step_report import EngineStep
from headway.executor import PendingStep
from headway.sampling_params import SamplingParams
from tests.unit.engine_process.small_engine import create_engine


class ScriptedCallers:
    """Does one entry of its script per look; at the end it is over."""

    def __init__(self, **options: Any) -> None:
        self.is_over = False
        self.wants_steps = True
        self.engine = create_engine(options)
        self.script: list[Callable[[], None]] = []
        self.looks: list[tuple[bool, float]] = []
        self.tokens: dict[str, int] = {}
        self.lost: list[BaseException] = []
        self.can_lose = True
        self.now_s = 0.0

    def drive(self, *script: Callable[[], None], is_replaceable: bool = False) -> EngineDriver:
        self.script += script
        self.driver = EngineDriver(self.engine, self, is_replaceable=is_replaceable, now=lambda: self.now_s)
        self.driver.run()
        return self.driver

    def add(self, request_id: str, *, takes_s: float = 0.0, max_tokens: int = 4) -> None:
        self.driver.queue(Newcomer(request_id, partial(self._enter, request_id, takes_s, max_tokens)))

    def _enter(self, request_id: str, takes_s: float, max_tokens: int) -> None:
        self.now_s += takes_s
        self.engine.add_request(request_id, [5, 6], SamplingParams(max_tokens=max_tokens), stream="delta")
        self.tokens[request_id] = 0

    def receive(self, *, is_idle: bool, timeout_s: float) -> None:
        self.looks.append((is_idle, timeout_s))
        if self.script:
            self.script.pop(0)()
        else:
            self.is_over = True

    def admitted(self) -> None:
        pass

    def hand_out(self, step: EngineStep) -> None:
        for output in step.outputs:
            self.tokens[output.request_id] += len(output.outputs[0].token_ids)

    def lose_all(self, error: BaseException) -> None:
        self.lost.append(error)
        if not self.can_lose:
            raise error


def nothing() -> None:
    """A look without a message."""


@pytest.fixture
def callers() -> ScriptedCallers:
    return ScriptedCallers()


def test_it_sleeps_only_when_there_is_nothing_to_do(callers: ScriptedCallers) -> None:
    callers.drive(nothing, lambda: callers.add("a", max_tokens=2), nothing, nothing)
    assert callers.looks == [(True, 1.0), (True, 1.0), (False, 0.0), (True, 1.0), (True, 1.0)]
    assert callers.tokens == {"a": 2}


def test_no_step_is_made_that_no_caller_waits_for(callers: ScriptedCallers) -> None:
    callers.wants_steps = False
    callers.drive(lambda: callers.add("a"), nothing, lambda: setattr(callers, "wants_steps", True), nothing)
    assert callers.tokens == {"a": 2}


def test_a_burst_is_admitted_between_steps(callers: ScriptedCallers) -> None:
    def burst() -> None:
        for number in range(6):
            callers.add(f"b{number}", takes_s=0.02)

    callers.drive(lambda: callers.add("a"), burst, nothing)
    assert callers.tokens == {"a": 3, "b0": 2, "b1": 2, "b2": 2, "b3": 1, "b4": 1, "b5": 1}


def test_requests_leave_the_line(callers: ScriptedCallers) -> None:
    def burst() -> None:
        for name in "abc":
            callers.add(name, takes_s=1.0)

    def leave() -> None:
        assert callers.driver.waiting_ids == ["b", "c"]
        callers.driver.leave_line({"b"})

    callers.drive(burst, leave, nothing)
    assert callers.tokens.keys() == {"a", "c"}


def break_steps(callers: ScriptedCallers) -> None:
    def fail(output: SchedulerOutput) -> PendingStep:
        raise RuntimeError("a broken device")

    callers.engine.core.executor.submit = fail  # type: ignore[method-assign]


def test_an_engine_that_can_be_replaced_is_given_up_if_a_plain_request_fails_too(callers: ScriptedCallers) -> None:
    break_steps(callers)
    requests = [partial(callers.add, f"r{number}") for number in range(5)]
    with pytest.raises(BrokenEngineError, match="^3 steps in a row have failed, and so has a plain request"):
        callers.drive(*requests, is_replaceable=True)
    assert callers.tokens.keys() == {"r0", "r1", "r2"} and callers.driver.waiting_ids == ["r3"]


def test_one_that_cannot_goes_on_to_try(callers: ScriptedCallers) -> None:
    break_steps(callers)
    driver = callers.drive(*[partial(callers.add, f"r{number}") for number in range(10)])
    assert len(callers.tokens) == 10 and driver.failure is None and not callers.lost


def test_requests_that_fail_do_not_cost_the_engine(callers: ScriptedCallers) -> None:
    callers.drive(
        *[partial(callers.add, f"fail-{number}") for number in range(5)],
        lambda: callers.add("good"),
        *[nothing] * 5,
        is_replaceable=True,
    )
    assert callers.tokens["good"] == 4


class Bug(Exception):
    """Raised where no request is to blame."""


def test_what_no_request_is_to_blame_for_ends_all_and_the_engine_goes_on_empty(callers: ScriptedCallers) -> None:
    step, bug = callers.engine.step, Bug("in the loop")

    def fail_once() -> EngineStep:
        callers.engine.step = step  # type: ignore[method-assign]
        raise bug

    callers.drive(
        partial(callers.add, "a"),
        lambda: setattr(callers.engine, "step", fail_once),
        partial(callers.add, "b"),
        nothing,
    )
    assert callers.lost == [bug] and callers.driver.failure is None
    assert callers.tokens == {"a": 1, "b": 2}


def test_an_engine_that_cannot_be_emptied_is_not_used_again(callers: ScriptedCallers) -> None:
    bug = Bug("for good")
    callers.engine.abort_all = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    callers.drive(lambda: callers.driver.recover(bug))
    assert callers.driver.failure is bug


def test_a_channel_may_end_the_driver_instead(callers: ScriptedCallers) -> None:
    callers.can_lose = False
    callers.engine.step = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        callers.drive(lambda: callers.add("a"), nothing)
