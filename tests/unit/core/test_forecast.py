"""Forecasts of waits: right where all is known, in any order of the queue, and without any effect on the schedule."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from headway.core import PrefixCache, Request, RequestStatus, SchedulerOutput, check_invariants
from headway.core.forecast.answers import RecentAnswers
from headway.core.forecast.waiting_totals import Waiting, WaitingTotals
from headway.core.queue import KeyedQueue
from headway.engine.engine_core import EngineCore
from headway.executor.simulated import SimulatedExecutor, VirtualClock
from headway.outputs import forecast_error
from tests.unit.core.driver import make_request, make_scheduler, request, schedule_rows

BASE_S, TOKEN_S = 0.02, 0.0001


def step_s(output: SchedulerOutput) -> float:
    """So long a step takes, in all of these tests."""
    return BASE_S + TOKEN_S * (output.num_scheduled_tokens - len(output.scheduled))


class Machine:
    """A scheduler on a device that takes known times."""

    def __init__(self, *, max_in_flight: int = 1, **options: Any) -> None:
        self.clock = VirtualClock()
        self.scheduler = make_scheduler(
            **{
                "num_blocks": 2048,
                "block_size": 16,
                "max_num_seqs": 16,
                "max_num_batched_tokens": 512,
                "target_itl_ms": 50.0,
            }
            | options
        )
        executor = SimulatedExecutor(step_s, self.clock, max_in_flight=max_in_flight)
        self.core = EngineCore(self.scheduler, executor, now=self.clock.now, sleep=self.clock.sleep)
        self.first_s: dict[str, float] = {}
        self.expected_s: dict[str, float] = {}
        self.ends_s: dict[str, float] = {}
        self.expected_ends_s: dict[str, float] = {}

    def learn(self) -> None:
        """Run some requests, so that it is known how long steps and answers take."""
        for number in range(30):
            self.core.add_request(make_request(f"learn {number}", [number] * 200, max_tokens=20))
            self.core.step()
            self.core.step()
        self.finish()

    def add(self, request: Request) -> None:
        forecast = self.core.forecast(request)
        if forecast is not None:
            self.expected_s[request.request_id] = self.clock.now_s + forecast.first_token_s
            if forecast.total_s is not None:
                self.expected_ends_s[request.request_id] = self.clock.now_s + forecast.total_s
        self.core.add_request(request)

    def step(self) -> None:
        for update in self.core.step().updates:
            if update.new_token_ids:
                self.first_s.setdefault(update.request_id, self.clock.now_s)
            if update.finish_status is not None:
                self.ends_s[update.request_id] = self.clock.now_s

    def finish(self) -> None:
        while self.core.has_unfinished_requests:
            self.step()
        check_invariants(self.scheduler)

    def error(self, name: str, arrival_s: float) -> float:
        return forecast_error(self.expected_s[name] - arrival_s, self.first_s[name] - arrival_s)


def some(number: int, num_tokens: int, max_tokens: int = 20, **options: Any) -> list[Request]:
    return [
        make_request(f"{num_tokens} {index}", [100 + index] * num_tokens, max_tokens=max_tokens, **options)
        for index in range(number)
    ]


CASES: dict[str, tuple[dict[str, Any], list[Request]]] = {
    "an idle engine": ({}, some(1, 50)),
    "a prompt of several steps": ({}, some(1, 4000)),
    "prompts before it": ({}, some(14, 400)),
    "steps that overlap": ({"max_in_flight": 2}, some(14, 400)),
    "no target between tokens": ({"target_itl_ms": 0.0}, some(14, 400)),
    "no free seat, answers of known length": ({"max_num_seqs": 4}, some(24, 200, predicted_tokens=20.0)),
    "no free seat, answers as before": ({"max_num_seqs": 4}, some(24, 200)),
    "no memory": ({"num_blocks": 75}, some(14, 200)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_forecast_comes_true(case: str) -> None:
    """Of requests that arrive together, each is forecast with those before it in the queue."""
    options, requests = CASES[case]
    machine = Machine(**options)
    machine.learn()
    now_s = machine.clock.now_s
    for one in requests:
        machine.add(one)
    machine.finish()
    errors = {one.request_id: machine.error(one.request_id, now_s) for one in requests}
    assert max(map(abs, errors.values())) < 0.35, errors
    assert abs(errors[requests[-1].request_id]) < 0.25, errors


def test_the_end_is_forecast_from_answers_before_or_predictions() -> None:
    machine = Machine()
    machine.learn()
    now_s = machine.clock.now_s
    for one in (
        request("as before", 200, max_tokens=20),
        request("predicted", 210, max_tokens=80, predicted_tokens=80),
    ):
        machine.add(one)
    machine.finish()
    for name, expected_s in machine.expected_ends_s.items():
        assert forecast_error(expected_s - now_s, machine.ends_s[name] - now_s) == pytest.approx(0, abs=0.4), name


def test_who_goes_first_waits_less() -> None:
    machine = Machine(scheduling_policy="priority", max_num_seqs=4)
    machine.learn()
    for one in some(24, 200, priority=5):
        machine.add(one)
    now_s = machine.clock.now_s
    for name, priority in (("urgent", 0), ("ordinary", 5), ("patient", 9)):
        machine.add(make_request(name, [7] * 200, max_tokens=20, priority=priority))
    expected = {name: machine.expected_s[name] - now_s for name in ("urgent", "ordinary", "patient")}
    assert expected["urgent"] < expected["ordinary"] / 2 < expected["ordinary"] < expected["patient"]
    machine.finish()
    assert abs(machine.error("urgent", now_s)) < 0.4 and abs(machine.error("patient", now_s)) < 0.4


def test_a_tenant_does_not_wait_for_all_of_another() -> None:
    machine = Machine(scheduling_policy="fair", max_num_seqs=4)
    machine.learn()
    for one in some(40, 200, tenant="many"):
        machine.add(one)
    now_s = machine.clock.now_s
    machine.add(make_request("few", [7] * 200, max_tokens=20, tenant="few"))
    machine.add(make_request("more", [8] * 200, max_tokens=20, tenant="many"))
    assert machine.expected_s["few"] - now_s < (machine.expected_s["more"] - now_s) / 4


def test_short_prompts_pass_a_long_one() -> None:
    machine = Machine(short_prompt_share=0.5)
    machine.learn()
    machine.add(make_request("answers", [3] * 20, max_tokens=500))
    machine.step()
    now_s = machine.clock.now_s
    machine.add(make_request("long", [5] * 4000, max_tokens=5))
    machine.add(make_request("short", [6] * 20, max_tokens=5))
    machine.add(make_request("long, too", [7] * 4000, max_tokens=5))
    machine.finish()
    assert machine.first_s["short"] < machine.first_s["long"]
    for name in ("short", "long", "long, too"):
        assert abs(machine.error(name, now_s)) < 0.45, name


def test_cached_tokens_are_not_computed_again() -> None:
    machine = Machine(prefix_cache=PrefixCache())
    machine.learn()
    machine.add(make_request("first", [9] * 1000, max_tokens=2))
    machine.finish()
    now_s = machine.clock.now_s
    machine.add(make_request("again", [9] * 1000, max_tokens=2))
    assert machine.expected_s["again"] - now_s < 0.05
    machine.finish()
    assert abs(machine.error("again", now_s)) < 0.1


@pytest.mark.parametrize(
    ("options", "of_request"),
    [({"batching": "static"}, {}), ({"prefill_mode": "prefill-first"}, {}), ({}, {"blocks_at": "elsewhere"})],
)
def test_what_cannot_be_foreseen_has_no_forecast(options: dict[str, Any], of_request: dict[str, Any]) -> None:
    machine = Machine(**options)
    assert machine.core.forecast(request("before any step", 30)) is None
    machine.learn()
    assert machine.core.forecast(request("a", 30, **of_request)) is None


def test_without_any_answer_there_is_no_end_and_no_wait_for_a_seat() -> None:
    machine = Machine(max_num_seqs=2)
    machine.scheduler.forecaster.answers = RecentAnswers(knows_limits=False)
    for one in some(2, 30, max_tokens=50):
        machine.add(one)
    for _ in range(4):
        machine.step()
    assert machine.core.forecast(request("a", 30)) is None
    machine.core.finish_request("30 0", RequestStatus.FINISHED_ABORTED)
    forecast = machine.core.forecast(request("a", 30))
    assert forecast is not None and forecast.total_s is None


def test_the_schedule_is_the_same_with_forecasts() -> None:
    def rows(forecasts: bool) -> dict[str, str]:
        scheduler = make_scheduler(max_num_seqs=3, num_blocks=12, scheduling_policy="srpt")
        rng = random.Random(5)
        arrivals = {
            at: [request(f"{at}", rng.randint(1, 16), max_tokens=rng.randint(1, 12), predicted_tokens=float(at + 1))]
            for at in range(20)
        }
        if forecasts:
            add = scheduler.add_request

            def add_with_forecast(one: Request, *, now_s: float | None = None) -> None:
                scheduler.forecaster.forecast(one, now_s=now_s or 0.0)
                add(one, now_s=now_s)

            scheduler.add_request = add_with_forecast  # type: ignore[method-assign]
        return schedule_rows(scheduler, arrivals, step_s=0.01)

    assert rows(forecasts=True) == rows(forecasts=False)


def test_a_forecast_does_not_look_at_each_waiting_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """With thousands in the queue it reads sums, and imagines a bounded number of steps."""
    machine = Machine(max_num_seqs=4)
    machine.learn()
    for number in range(1000):
        machine.core.add_request(request(f"{number}", 60))
    num_steps = 0

    def look(*_: object) -> Any:
        raise AssertionError("the queue was walked through")

    foresee = machine.scheduler.pace.foresee

    def counted(**given: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        return foresee(**given)

    monkeypatch.setattr(KeyedQueue, "__iter__", look)
    monkeypatch.setattr(machine.scheduler.pace, "foresee", counted)
    forecast = machine.core.forecast(request("last", 60))
    assert forecast is not None and forecast.first_token_s > 30
    assert num_steps < 80


# ---- the sums -------------------------------------------------------------------------------------------------------


def test_the_sums_are_those_of_the_requests() -> None:
    """Exact for small ranks, and never off by more than an eighth of a rank."""
    rng = random.Random(1)
    totals = WaitingTotals(lambda one: float(one.options.priority))
    waiting: set[Request] = set()
    for number in range(500):
        if waiting and rng.random() < 0.4:
            gone = rng.choice(sorted(waiting, key=lambda one: one.request_id))
            waiting.remove(gone)
            totals.remove(gone)
        one = request(f"{number}", rng.randint(1, 300), priority=rng.randint(-12, 12))
        waiting.add(one)
        totals.add(one)
        totals.check_invariants(waiting)
        newcomer = request("new", 5, priority=rng.randint(-12, 12))
        ahead = [each for each in waiting if each.options.priority <= newcomer.options.priority]
        assert totals.ahead_of(newcomer) == Waiting(len(ahead), sum(each.num_tokens for each in ahead))
        size = rng.randint(1, 300)
        least, most = (sum(each.num_tokens <= limit for each in waiting) for limit in (size, size * 1.125))
        assert least <= totals.up_to_size(size).num_requests <= most


def running(lengths: Sequence[int], max_tokens: int = 1000, **options: Any) -> list[Request]:
    found = []
    for index, length in enumerate(lengths):
        one = request(f"{index}", 10, max_tokens=max_tokens, **options)
        one.resume([1] * length)
        found.append(one)
    return found


def test_departures_of_answers_that_are_all_alike() -> None:
    answers = RecentAnswers(knows_limits=False)
    for _ in range(50):
        answers.note(100)
    departures = answers.departures(running([95, 90, 50, 10]))
    assert departures is not None
    for number, steps in ((1, 5), (2, 10), (3, 50), (4, 90)):
        assert steps / 2 - 2 < departures.steps_until(number) < steps * 1.5 + 2
    assert departures.steps_until(0) == 0.0
    assert departures.steps_until(400) == pytest.approx(100 * 100, rel=0.1)


def test_predictions_come_before_experience_and_limits_before_both() -> None:
    answers = RecentAnswers()
    assert answers.expected_tokens(request("a", 5, max_tokens=30)) is None
    for length in (10, 20, 30, 100):
        answers.note(length)
    assert answers.expected_tokens(request("a", 5, max_tokens=200)) == 40.0
    assert answers.expected_tokens(request("a", 5, max_tokens=30)) == 22.5
    assert answers.expected_tokens(request("a", 5, max_tokens=200, predicted_tokens=70.0)) == 70.0
    assert answers.expected_tokens(request("a", 5, max_tokens=50, predicted_tokens=70.0)) == 50.0
    soon = answers.departures(running([0, 0], predicted_tokens=4.0))
    late = answers.departures(running([0, 0], predicted_tokens=400.0))
    assert soon is not None and late is not None
    assert soon.steps_until(2) <= 4 < 256 < late.steps_until(1)
    assert answers.departures([]) is not None and RecentAnswers().departures([]) is None


def test_only_the_last_answers_count() -> None:
    answers = RecentAnswers()
    for length in [1000] * 300 + [10] * 256:
        answers.note(length)
    assert answers.expected_tokens(request("a", 5, max_tokens=2000)) == 10.0
