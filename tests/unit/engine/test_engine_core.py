"""The pipeline around the scheduler: what is launched when, what fails with whom, what time a step is said to take."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from headway.core import ModelRunnerOutput, Request, RequestStatus, SchedulerOutput
from headway.engine.engine_core import CoreStep, EngineCore
from headway.executor.fake import FakeExecutor, FakeStep
from tests.unit.clock import Clock
from tests.unit.core.driver import make_scheduler, request


class Executor(FakeExecutor):
    """Writes down what happens, and fails when told to."""

    def __init__(
        self, next_token: Callable[[str, int], int] = lambda name, count: 0, *, max_in_flight: int = 2
    ) -> None:
        super().__init__(next_token, max_in_flight=max_in_flight)
        self.events: list[str] = []
        self.plans: list[SchedulerOutput] = []
        self.fail_submit_of: set[int] = set()
        self.fail_result_of: set[int] = set()
        self.on_result: Callable[[], None] = lambda: None
        self.is_shut_down = False

    def submit(self, output: SchedulerOutput) -> FakeStep:
        self.events.append(f"submit {output.step_id}")
        self.plans.append(output)
        if output.step_id in self.fail_submit_of:
            raise RuntimeError("no such kernel")
        return super().submit(output)

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _answer(self, step: FakeStep, output: SchedulerOutput) -> ModelRunnerOutput:
        self.events.append(f"result {output.step_id}")
        self.on_result()
        result = super()._answer(step, output)
        if output.step_id in self.fail_result_of:
            raise RuntimeError("the kernel caught fire")
        return result


def make_core(executor: Executor, *, now: Callable[[], float] | None = None, **options: object) -> EngineCore:
    return EngineCore(make_scheduler(**options), executor, now=now or Clock(0.0))


def step(core: EngineCore) -> CoreStep:
    done = core.step()
    core.check_invariants()
    return done


def run_to_end(core: EngineCore, *, max_steps: int = 2000) -> dict[str, list[int]]:
    """Tokens of all requests that ended, by id."""
    tokens: dict[str, list[int]] = {}
    for _ in range(max_steps):
        if not core.has_unfinished_requests:
            core.drain()
            return tokens
        for update in step(core).updates:
            tokens.setdefault(update.request_id, []).extend(update.new_token_ids)
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize(
    ("max_in_flight", "events"),
    [
        (2, ["submit 0", "submit 1", "result 0", "submit 2", "result 1", "result 2"]),
        (1, ["submit 0", "result 0", "submit 1", "result 1", "submit 2", "result 2"]),
    ],
    ids=["overlapped", "in turn"],
)
def test_a_step_is_launched_before_the_result_of_the_one_before_is_asked_for(
    max_in_flight: int, events: list[str]
) -> None:
    executor = Executor(max_in_flight=max_in_flight)
    core = make_core(executor)
    core.add_request(request("a", 3, max_tokens=3))
    assert run_to_end(core) == {"a": [0, 0, 0]}
    assert executor.events == events


def workload(seed: int) -> list[Request]:
    rng = random.Random(seed)
    return [
        request(f"r{index}", rng.randint(1, 12), rng.randint(1, 12), stop_token_ids=frozenset([3]))
        for index in range(12)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_tokens_do_not_depend_on_overlap(seed: int) -> None:
    def next_token(name: str, count: int) -> int:
        return random.Random(f"{name} {count}").randrange(12)

    tokens = []
    for max_in_flight in (1, 2, 3):
        core = make_core(Executor(next_token, max_in_flight=max_in_flight), num_blocks=9, block_size=3)
        for new in workload(seed):
            core.add_request(new)
        tokens.append(run_to_end(core))
        assert core.scheduler.kv_cache.num_used_blocks == 0
    assert tokens[0] == tokens[1] == tokens[2]
    assert len(tokens[0]) == 12


def test_each_call_brings_a_result_and_everybody_who_left_the_batch_is_reported_to_the_executor() -> None:
    executor = Executor()
    core = make_core(executor, num_blocks=9, block_size=3)
    for new in workload(seed=3):
        core.add_request(new)
    num_results = 0
    while core.has_unfinished_requests:
        step(core)
        num_results += 1
        assert sum(event.startswith("result") for event in executor.events) == num_results
    core.add_request(request("last", 1))
    step(core)
    assert any(plan.preempted_request_ids for plan in executor.plans)
    left = [name for plan in executor.plans for name in (*plan.preempted_request_ids, *plan.finished_request_ids)]
    entered = [new.request_id for plan in executor.plans for new in plan.new_requests]
    assert sorted([*left, "last"]) == sorted(entered)


def test_a_surplus_step_is_drained_before_the_next_request_and_its_tokens_go_nowhere() -> None:
    executor = Executor(lambda name, count: 9)
    core = make_core(executor)
    core.add_request(request("a", 3, stop_token_ids=frozenset([9])))
    (update,) = step(core).updates
    assert update.finish_status is RequestStatus.FINISHED_STOPPED
    assert not core.has_unfinished_requests
    assert executor.events == ["submit 0", "submit 1", "result 0"]
    core.add_request(request("a", 2, max_tokens=1))
    assert executor.events[-1] == "result 1"
    assert run_to_end(core) == {"a": [9]}


def test_a_step_that_cannot_be_submitted_ends_its_requests_after_the_results_before_it() -> None:
    executor = Executor()
    executor.fail_submit_of = {1}
    core = make_core(executor, max_num_seqs=1)
    core.add_request(request("a", 3))
    core.add_request(request("b", 2, max_tokens=2))
    assert [update.new_token_ids for update in step(core).updates] == [(0,)]
    (failed,) = step(core).updates
    assert (failed.request_id, failed.error) == ("a", "RuntimeError: no such kernel")
    assert executor.events == ["submit 0", "submit 1", "result 0"], "nothing is launched behind the failed step"
    assert run_to_end(core) == {"b": [0, 0]}


def test_a_step_that_fails_ends_its_requests_and_the_others_go_on() -> None:
    executor = Executor()
    executor.fail_result_of = {0}
    core = make_core(executor)
    core.add_request(request("a", 16))  # takes the whole budget of step 0
    core.add_request(request("b", 2, max_tokens=3))
    (failed,) = step(core).updates
    assert (failed.request_id, failed.error) == ("a", "RuntimeError: the kernel caught fire")
    assert executor.plans[1].scheduled[0].request_id == "a", "it was in flight in another step too"
    assert run_to_end(core) == {"b": [0, 0, 0]}


def test_what_is_in_flight_is_taken_in_at_the_end() -> None:
    executor = Executor()
    core = make_core(executor)
    core.add_request(request("a", 3))
    step(core)
    (done,) = core.drain()
    assert [update.new_token_ids for update in done.updates] == [(0,)]
    assert core.drain() == []
    step(core)
    core.shutdown()
    assert executor.events[-1] == "result 3"
    assert executor.is_shut_down


def let_results_take_5_ms(executor: Executor) -> Clock:
    clock = Clock(0.0)

    def pass_time() -> None:
        clock.now_s += 0.005

    executor.on_result = pass_time
    return clock


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_the_time_of_a_step_is_the_devices(max_in_flight: int) -> None:
    executor = Executor(max_in_flight=max_in_flight)
    core = make_core(executor, now=let_results_take_5_ms(executor))
    core.add_request(request("a", 3, max_tokens=4))
    durations = []
    while core.has_unfinished_requests:
        durations.append(step(core).report.duration_s)
    assert durations == pytest.approx([0.005] * 4)


def test_the_scheduler_learns_from_steps_that_ran_and_were_waited_for() -> None:
    executor = Executor(lambda name, count: 9)
    clock = let_results_take_5_ms(executor)
    core = make_core(executor, now=clock, target_itl_ms=10)
    executor.fail_result_of = {0}
    step_time = core.scheduler.pace.step_time
    core.add_request(request("fails", 2))
    step(core)
    assert step_time.base_s is None
    core.add_request(request("a", 2, stop_token_ids=frozenset([9])))
    step(core)
    assert step_time.base_s == pytest.approx(0.005)
    clock.now_s += 3600
    core.add_request(request("later", 2, max_tokens=1))  # drains the surplus step of a
    assert step_time.base_s == pytest.approx(0.005)


def test_reports_show_the_batch_as_it_was_planned() -> None:
    core = make_core(Executor(), max_num_batched_tokens=8)
    core.add_request(request("a", 3))
    core.add_request(request("b", 9))
    reports = [step(core).report for _ in range(3)]
    rows = [
        [(row.request_id, row.num_tokens, row.num_output_tokens, row.num_blocks) for row in r.rows] for r in reports
    ]
    assert rows == [
        [("a", 3, 0, 1), ("b", 5, 0, 2)],
        [("a", 1, 1, 1), ("b", 4, 0, 3)],
        [("a", 1, 2, 2), ("b", 1, 1, 3)],
    ]
    assert [report.num_tokens for report in reports] == [8, 5, 2]
    assert [report.num_used_slots for report in reports] == [8, 13, 15]
    assert [[row.is_decode for row in report.rows] for report in reports] == [[False, False], [True, False], [True] * 2]


class Interrupt(BaseException):
    """As Ctrl-C and `sys.exit` are, no error of the step."""


class InterruptedExecutor(Executor):
    """Raises once, at a place of the given step: before or after it was submitted, before or after its result."""

    def __init__(self, place: str, step_id: int, *, max_in_flight: int) -> None:
        super().__init__(lambda name, count: count, max_in_flight=max_in_flight)
        self._place, self._step_id = place, step_id
        self.has_raised = False

    def submit(self, output: SchedulerOutput) -> FakeStep:
        self._maybe("before submit", output)
        step = super().submit(output)
        if self._place == "after submit" and output.step_id == self._step_id:
            self._in_flight.pop()  # a real executor does not mind that this result is never asked for
        self._maybe("after submit", output)
        return step

    def _answer(self, step: FakeStep, output: SchedulerOutput) -> ModelRunnerOutput:
        if self._place == "before result" and output.step_id == self._step_id and not self.has_raised:
            super()._answer(step, output)
        self._maybe("before result", output)
        return super()._answer(step, output)

    def _maybe(self, place: str, output: SchedulerOutput) -> None:
        if place == self._place and output.step_id == self._step_id and not self.has_raised:
            self.has_raised = True
            raise Interrupt


@pytest.mark.parametrize("step_id", range(4))
@pytest.mark.parametrize("place", ["before submit", "after submit", "before result"])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_an_interrupted_step_fails_and_the_engine_goes_on(max_in_flight: int, place: str, step_id: int) -> None:
    executor = InterruptedExecutor(place, step_id, max_in_flight=max_in_flight)
    core = make_core(executor)
    core.add_request(request("a", 3, max_tokens=9))
    core.add_request(request("b", 2, max_tokens=9))
    updates, launched = [], []
    while core.has_unfinished_requests:
        try:
            done = step(core)
        except Interrupt:
            core.check_invariants()
            continue
        updates += done.updates
        launched += [output.step_id for output in done.launched]
    assert executor.has_raised
    errors = {update.request_id: update.error for update in updates if update.error}
    assert errors == dict.fromkeys("ab", "InterruptedError: the step was interrupted by Interrupt")
    assert launched == sorted(set(launched)), "a plan is told of once"
    core.add_request(request("c", 2, max_tokens=3))
    assert run_to_end(core) == {"c": [2, 3, 4]}
    assert core.scheduler.kv_cache.num_used_blocks == 0


@pytest.mark.parametrize("place", ["scheduler.schedule", "_take_snapshot", "scheduler.update", "_report"])
def test_an_interrupt_between_the_parts_of_a_step_loses_no_step(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(Executor(lambda name, count: count))
    core.add_request(request("a", 3, max_tokens=9))
    step(core)

    def interrupted(*args: object, **more: object) -> None:
        raise Interrupt

    *within, name = place.split(".")
    with monkeypatch.context() as patch:
        patch.setattr(core.scheduler if within else core, name, interrupted)
        with pytest.raises(Interrupt):
            core.step()
    core.check_invariants()
    run_to_end(core)
    core.add_request(request("c", 2, max_tokens=3))
    assert run_to_end(core) == {"c": [2, 3, 4]}
    assert core.scheduler.kv_cache.num_used_blocks == 0
