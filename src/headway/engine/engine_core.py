"""The central loop of the engine: plan steps, launch them, process their results. Read this file first.

Planning does not need the result of the previous step (see `headway.core.request`). Where the executor allows it, the
next step is therefore planned and launched while the previous one runs, and the device never waits for the host:

    host      plan 0   plan 1   result 0, plan 2   result 1, plan 3   ...
    device             step 0 ─────────── step 1 ──────────── step 2 ─────────── ...

Planning commits the scheduler to a step. Whatever is raised afterwards, the step stays in `Scheduler.in_flight` until
its result or failure has been processed. An error fails the step's requests. `KeyboardInterrupt`, `SystemExit` and the
end of the executor (`EngineDeadError`) are raised to the caller, and the next call processes the failure.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
import typing
from collections.abc import Callable
from dataclasses import dataclass

from headway.core import (
    ModelRunnerOutput,
    Request,
    RequestStatus,
    RequestUpdate,
    SampledTokens,
    Scheduler,
    SchedulerOutput,
    check_invariants,
)
from headway.core.forecast.forecaster import Forecast
from headway.core.kv.manager import CacheReset
from headway.core.landing import LaunchedStep
from headway.core.scheduler_output import BatchSnapshot
from headway.engine.block_pump import create_pump
from headway.engine.step_report import StepReport
from headway.errors import EngineDeadError
from headway.executor import Executor, FailedStep
from headway.tracing import span

logger = logging.getLogger(__name__)

_LONGEST_SLEEP_S = 0.005


@dataclass(frozen=True, slots=True)
class CoreStep:
    """The result of one call of `EngineCore.step()`."""

    launched: list[SchedulerOutput]
    """Plans submitted to the executor since the last call. Their results come with this call or with later ones."""
    updates: list[RequestUpdate]
    """The updates from the oldest step that was in flight."""
    report: StepReport
    """The report of that same step."""


class EngineCore:
    """Runs a scheduler and an executor. It handles tokens only; `LLMEngine` turns them into text."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        now: Callable[[], float],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        if scheduler.speculation is not None and executor.max_in_flight > 1 and executor.verifies_ahead:
            scheduler.speculation.go_ahead()
        self._now = now
        self._sleep = sleep
        self._launched: list[SchedulerOutput] = []  # plans that no `CoreStep` has reported
        self._last_result_s = float("-inf")
        self._goes_on = False  # whether requests waited for more when it came
        self._was_ready = False  # whether one of them could have had a step
        self._schedule_s = 0.0  # spent on planning since the last report
        self._pump = create_pump(scheduler, executor, now=now)

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises if the scheduler refuses it."""
        if not self.scheduler.has_unfinished_requests:
            self.drain()  # no request waited for these results, so the time until now is not theirs
        self.scheduler.add_request(request, now_s=self._now())

    def forecast(self, request: Request) -> Forecast | None:
        """Return what to expect of a request that is about to be added; `None` if that is not known."""
        if not self.scheduler.has_unfinished_requests:
            self.drain()  # what these steps would have taken is not waited for
        return self.scheduler.forecaster.forecast(request, now_s=self._now())

    def finish_request(self, request_id: str, status: RequestStatus) -> None:
        """End a live request with this status."""
        self.scheduler.finish_request(request_id, status)

    def stop_request(self, request_id: str) -> bool:
        """End a live request because its output contains a stop string. Returns whether it has ended; otherwise a later
        update reports the end."""
        self.finish_request(request_id, RequestStatus.FINISHED_STOPPED)
        return request_id not in self.scheduler.requests

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether any request is unfinished. Steps may be in flight even if none is."""
        return self.scheduler.has_unfinished_requests

    @property
    def only_waits_for_blocks(self) -> bool:
        """Whether a step would only wait for a transfer of blocks to end. The caller may sleep instead:
        `Executor.transfers` wakes it, but it should call `step` again after a second in any case."""
        num_fetching = len(self.scheduler.live.fetching.requests)
        if self._pump is None or not num_fetching or self._pump.has_news:
            return False
        return num_fetching == len(self.scheduler.requests) and not self.scheduler.in_flight

    def step(self) -> CoreStep:
        """Schedule and submit steps while the pipeline has room, then wait for the oldest result and process it."""
        if self._pump is not None:
            self._pump.take_ended()
        self._fill_pipeline()
        if self.scheduler.in_flight:
            return self._take_result()
        updates = self.scheduler.take_ends()
        if self.has_unfinished_requests and not updates:
            self._wait()
        return self._idle_step(updates)

    def drain(self) -> list[CoreStep]:
        """Process the results of all steps in flight without launching new ones."""
        steps = []
        while self.scheduler.in_flight:
            steps.append(self._take_result())
        return steps

    def reset_prefix_cache(self, *, with_disk: bool = False) -> CacheReset:
        """Forget all cached blocks that no request uses or waits for. `with_disk`: those on disk are deleted too."""
        outcome = self.scheduler.kv_cache.forget_idle()
        if with_disk and self._pump is not None:
            self._pump.clear_disk()
        return outcome

    def check_invariants(self) -> None:
        """Raise `AssertionError` if requests, queue and blocks disagree."""
        check_invariants(self.scheduler)

    def shutdown(self) -> None:
        """Wait for the steps in flight, then free the executor. The engine cannot be used afterwards."""
        with contextlib.suppress(EngineDeadError):  # then nothing is in flight any more
            self.drain()
        if self._pump is not None:
            self._pump.close()
            self._pump = None
        self.executor.shutdown()

    # ---- the parts of step() --------------------------------------------------------------------------------------

    def _fill_pipeline(self) -> None:
        """Plan and launch steps until the pipeline is full or nothing can be planned before the next result."""
        while self._has_room():
            started_s = self._now()
            with span("schedule"):
                output = self.scheduler.schedule(now_s=started_s)
            self._schedule_s += self._now() - started_s
            if self._pump is not None and output.moves.has_transfers:
                self._pump.begin(output.moves)
            if output.is_empty:
                break
            self._launched.append(output)
            self._launch(self.scheduler.in_flight[-1])

    def _has_room(self) -> bool:
        """Whether another step may be launched. None is after a step that could not be submitted, as its requests will
        end."""
        in_flight = self.scheduler.in_flight
        if not in_flight:
            return True
        last = in_flight[-1].pending
        is_lost = last is None or isinstance(last, FailedStep)
        return not is_lost and len(in_flight) < self.executor.max_in_flight

    def _launch(self, step: LaunchedStep) -> None:
        """Submit a planned step to the executor. If that fails, the step's pending result becomes a `FailedStep`."""
        self._note_launch(step)
        if self.scheduler.speculation is not None and self._goes_on and len(self.scheduler.in_flight) == 1:
            step.submitted_s = self._last_result_s  # it may be for guesses that nothing was launched before
        try:
            with span("submit"):
                step.pending = self.executor.submit(step.output)
        except BaseException as error:
            step.pending = FailedStep(error)
            if _is_more_than_a_step(error):
                raise

    def _note_launch(self, step: LaunchedStep) -> None:
        step.snapshot = self._take_snapshot(step.output, step.requests)
        step.submitted_s = step.launched_s = self._now()
        if self._was_ready and len(self.scheduler.in_flight) == 1:
            step.host_wait_s = step.launched_s - self._last_result_s

    def _take_result(self) -> CoreStep:
        """Wait for the oldest step and process its result or failure."""
        step = self.scheduler.in_flight[0]
        if step.pending is None:  # Ctrl-C has come between its plan and its launch
            self._note_launch(step)
            step.pending = FailedStep(KeyboardInterrupt())
        is_awaited = self.has_unfinished_requests
        failure: Exception | None = None
        try:
            with span("wait"):
                result = step.pending.result()
        except BaseException as error:
            if _is_more_than_a_step(error):
                step.pending = FailedStep(error)
                raise
            failure = typing.cast(Exception, error)
            result = _failed(step.output, failure)
        previous_s, self._last_result_s = self._last_result_s, self._now()
        duration_s = self._last_result_s - max(previous_s, step.submitted_s)
        # A failed step has no duration, and a step that no request waited for may have ended long ago.
        observed_s = duration_s if failure is None and is_awaited else None
        with span("update"):
            updates = self.scheduler.update(step.output, result, duration_s=observed_s)
        self._goes_on = self.has_unfinished_requests
        self._was_ready = len(self.scheduler.requests) > len(self.scheduler.live.fetching.requests)
        launched, self._launched = self._launched, []
        return CoreStep(launched, updates, self._report_of(step, result, updates, duration_s, failure))

    def _report_of(
        self,
        step: LaunchedStep,
        result: ModelRunnerOutput,
        updates: list[RequestUpdate],
        duration_s: float,
        failure: Exception | None,
    ) -> StepReport:
        """The report of a step whose result has just come."""
        assert step.snapshot is not None
        return self._report(
            step.snapshot,
            updates,
            duration_s,
            busy_s=min(duration_s, self._last_result_s - step.launched_s),
            host_wait_s=step.host_wait_s,
            num_padding_tokens=result.num_padding_tokens,
            error=None if failure is None else _words(failure),
        )

    def _wait(self) -> None:
        """Wait because nothing can be planned before blocks arrive or a certain time is reached. The wait is short,
        since new requests may arrive."""
        self._was_ready = False
        ready_at_s = self.scheduler.ready_at_s()
        waits_s = math.inf if ready_at_s is None else max(ready_at_s - self._now(), 0.0)
        if self.scheduler.live.fetching.requests and self._pump is not None:
            self._pump.wait(min(waits_s, _LONGEST_SLEEP_S))
            return
        if ready_at_s is None:
            raise RuntimeError("requests are waiting, nothing is in flight, and yet nothing can be planned")
        self._sleep(min(waits_s, _LONGEST_SLEEP_S))

    def _idle_step(self, updates: list[RequestUpdate]) -> CoreStep:
        snapshot = self._take_snapshot(self.scheduler.nothing(), ())
        return CoreStep([], updates, self._report(snapshot, updates, 0.0))

    def _take_snapshot(self, output: SchedulerOutput, requests: tuple[Request, ...]) -> BatchSnapshot:
        """Record the state right after planning, before the scheduler changes again."""
        scheduler = self.scheduler
        return BatchSnapshot(
            output=output,
            requests=requests,
            num_tokens=tuple([request.num_tokens for request in requests]),
            num_running=len(scheduler.live.running),
            num_waiting=scheduler.num_waiting,
            num_used_blocks=scheduler.kv_cache.num_used_blocks,
            num_used_slots=scheduler.num_used_slots,
        )

    def _report(
        self,
        snapshot: BatchSnapshot,
        updates: list[RequestUpdate],
        duration_s: float,
        *,
        busy_s: float = 0.0,
        host_wait_s: float = 0.0,
        num_padding_tokens: int = 0,
        error: str | None = None,
    ) -> StepReport:
        kv_cache = self.scheduler.kv_cache
        schedule_s, self._schedule_s = self._schedule_s, 0.0
        return StepReport(
            snapshot=snapshot,
            updates=updates,
            duration_s=duration_s,
            schedule_s=schedule_s,
            num_blocks=kv_cache.num_blocks,
            block_size=kv_cache.block_size,
            busy_s=busy_s,
            host_wait_s=host_wait_s,
            num_padding_tokens=num_padding_tokens,
            error=error,
        )


def _is_more_than_a_step(error: BaseException) -> bool:
    """Whether the error affects more than the requests of one step: an interruption, or the end of the executor."""
    return not isinstance(error, Exception) or isinstance(error, EngineDeadError)


def _failed(output: SchedulerOutput, error: Exception) -> ModelRunnerOutput:
    """The output of a failed step: each of its requests fails with the reason. Other requests are not affected."""
    logger.error("step %d failed; its %d requests are ended", output.step_id, len(output.scheduled), exc_info=error)
    failed = SampledTokens((), error=_words(error))
    return ModelRunnerOutput({share.request_id: failed for share in output.scheduled}, prompt_logprobs={})


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
