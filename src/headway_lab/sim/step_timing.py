"""Timing the steps of a running engine: the device's part, and the host's before and after it.

A user sees the period from one return of `engine.step()` to the next:

    period   ├ before ─────┤ wait for the device ├ after ┤
             plan, launch                         update, hand out tokens

A CPU computes while it launches, so there the whole of `submit` counts as the device's time. On a GPU, the device's own
clock measures a step. The host's clock would count time of one step to another, since the host may be late for a result
while it launches the next step.

The speed of a machine with other work changes. So the ratio of measured to expected time is computed from the steps of
a run, in windows of a few seconds, for a simulation of the same period.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.core.kv.moves import BlockMoves
from headway.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from headway.core.step_work import StepWork
from headway_lab.sim.cost_model import CostModel

if TYPE_CHECKING:
    from headway.engine.llm_engine import LLMEngine
    from headway.engine.step_report import EngineStep
    from headway.executor import Executor, PendingStep


Now = Callable[[], float]

WINDOW_S = 2.0


@dataclass(frozen=True, slots=True)
class StepSample:
    work: StepWork
    duration_s: float
    """The device's time for it."""
    before_s: float | None
    after_s: float | None
    """The host's, where the engine was busy with the step before until then."""
    at_s: float
    """When the step's tokens were out, by the meter's clock."""


class StepMeter:
    """Steps an engine and keeps what the steps took."""

    def __init__(self, engine: LLMEngine, executor: _TimedExecutor, now: Now) -> None:
        self._engine, self._executor, self._now = engine, executor, now
        self._returned_s: float | None = None
        self.samples: list[StepSample] = []

    def step(self) -> EngineStep:
        """Step the engine and keep what the step took."""
        executor = self._executor
        executor.waited_s = 0.0
        step = self._engine.step()
        now_s, report = self._now(), step.report
        if report.duration_s > 0.0 and not report.snapshot.output.is_empty:
            last_s, before_s, after_s = self._returned_s, None, None
            if last_s is not None:
                after_s = max(now_s - executor.result_at_s, 0.0)
                before_s = max(now_s - last_s - executor.waited_s - after_s, 0.0)
            work = StepWork.of(report.snapshot.output)
            device_s = executor.device_s if executor.device_s is not None else report.duration_s
            self.samples.append(StepSample(work, device_s, before_s, after_s, now_s))
        self._returned_s = now_s if self._engine.has_unfinished_requests() else None
        return step

    def pause(self) -> None:
        """Say that the time from now on belongs to no step."""
        self._returned_s = None


@contextlib.contextmanager
def metered(engine: LLMEngine, *, now: Now = time.perf_counter) -> Iterator[StepMeter]:
    """A meter for the engine, which must be idle. `now`: the engine's own clock."""
    plain = engine.core.executor
    timed = _TimedExecutor(plain, now, is_gpu=engine.plan.device.startswith("cuda"))
    engine.core.executor = timed
    try:
        yield StepMeter(engine, timed, now)
    finally:
        engine.core.executor = plain


class _TimedExecutor:
    """Records how long the host waits for the device and, on a GPU, how long the device had a step."""

    def __init__(self, executor: Executor, now: Now, *, is_gpu: bool) -> None:
        self._executor, self._is_gpu = executor, is_gpu
        self.now = now
        self.max_in_flight = executor.max_in_flight
        self.verifies_ahead = executor.verifies_ahead
        self.transfers = executor.transfers
        self.waited_s = 0.0
        self.result_at_s = 0.0
        self.device_s: float | None = None
        """Device seconds of the step whose result came last, if the device reports them."""

    def submit(self, output: SchedulerOutput) -> PendingStep:
        if self._is_gpu:
            begin = _mark()
            pending = self._executor.submit(output)
            return _TimedStep(pending, self, (begin, _mark()))
        started_s = self.now()
        pending = self._executor.submit(output)
        self.waited_s += self.now() - started_s
        return _TimedStep(pending, self, None)

    def move(self, moves: BlockMoves) -> None:
        self._executor.move(moves)

    def warm_up(self) -> int:
        return self._executor.warm_up()

    def shutdown(self) -> None:
        self._executor.shutdown()


class _TimedStep:
    __slots__ = ("_executor", "_marks", "_pending")

    def __init__(self, pending: PendingStep, executor: _TimedExecutor, marks: tuple[Any, Any] | None) -> None:
        self._pending, self._executor, self._marks = pending, executor, marks

    def result(self) -> ModelRunnerOutput:
        executor = self._executor
        started_s = executor.now()
        result = self._pending.result()
        now_s = executor.now()
        executor.waited_s += now_s - started_s
        executor.result_at_s = now_s
        if self._marks is not None:
            begin, end = self._marks
            end.synchronize()
            executor.device_s = begin.elapsed_time(end) / 1e3
        return result


def _mark() -> Any:
    """An event in the GPU's stream, with the time when the GPU reaches it."""
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(frozen=True)
class SpeedProfile:
    """The ratio of measured to expected time, in windows of `WINDOW_S` from the start of the run; the last window's
    ratio also holds afterwards."""

    factors: Sequence[float]
    overall: float
    """The ratio over all steps."""

    def at(self, now_s: float) -> float:
        """The factor this long after the start."""
        if not self.factors:
            return 1.0
        return self.factors[min(max(int(now_s / WINDOW_S), 0), len(self.factors) - 1)]

    @staticmethod
    def of(cost: CostModel, samples: Sequence[StepSample], *, started_s: float) -> SpeedProfile:
        """The profile of a run's steps. A window without steps has the ratio of the window before it."""
        sums: dict[int, tuple[float, float]] = {}
        for sample in samples:
            window = max(int((sample.at_s - started_s - 0.5 * sample.duration_s) / WINDOW_S), 0)
            measured_s, expected_s = sums.get(window, (0.0, 0.0))
            sums[window] = (measured_s + sample.duration_s, expected_s + cost.seconds(sample.work))
        overall = _ratio(sum(m for m, _ in sums.values()), sum(e for _, e in sums.values()))
        factors: list[float] = []
        for window in range(max(sums, default=-1) + 1):
            last = factors[-1] if factors else overall
            factors.append(_ratio(*sums[window]) if window in sums else last)
        return SpeedProfile(factors, overall)


def _ratio(measured_s: float, expected_s: float) -> float:
    return measured_s / expected_s if expected_s else 1.0
