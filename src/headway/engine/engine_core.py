"""The loop everything turns around: plan steps, launch them, take in their results. Read this file first.

Planning does not need the result of the step before (see `headway.core.request`), so where the executor allows it the
next step is planned and launched while the one before still runs, and the device never waits for the host:

    host      plan 0   plan 1   result 0, plan 2   result 1, plan 3   ...
    device             step 0 ─────────── step 1 ──────────── step 2 ─────────── ...

Planning commits the scheduler to a step. Whatever is raised from then on, the step stays in `_in_flight` until its
result or its failure has been taken in: an error fails its requests, and what is no error (`KeyboardInterrupt`,
`SystemExit`), or the end of the executor (`EngineDeadError`), goes on to the caller, with the failure left for the next
call.
"""

from __future__ import annotations

import contextlib
import logging
import time
import typing
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

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
from headway.engine.block_pump import create_pump
from headway.engine.step_report import BatchSnapshot, StepReport
from headway.errors import EngineDeadError
from headway.executor import Executor, PendingStep, UnsampledStep
from headway.structured.guides import GuidedStep, GuideEnd, Guides
from headway.tracing import span

logger = logging.getLogger(__name__)

_LONGEST_SLEEP_S = 0.005


@dataclass(frozen=True, slots=True)
class CoreStep:
    """What one call of `EngineCore.step()` brought."""

    launched: list[SchedulerOutput]
    """Plans handed to the executor since the last call; their results come with later calls, or came with this one."""
    updates: list[RequestUpdate]
    """The result of the oldest step that was in flight."""
    report: StepReport
    """Of that same step."""


class _InFlight(NamedTuple):
    output: SchedulerOutput
    snapshot: BatchSnapshot
    pending: PendingStep
    submitted_s: float


class EngineCore:
    """A scheduler and an executor. Knows tokens only; `LLMEngine` makes text of them."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        now: Callable[[], float],
        sleep: Callable[[float], None] = time.sleep,
        guides: Guides | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        if scheduler.speculation is not None and executor.max_in_flight > 1 and executor.verifies_ahead:
            scheduler.speculation.go_ahead()
        if scheduler.speculation is not None:
            scheduler.speculation.guides = guides
        self._guides = guides
        self._ended: list[RequestUpdate] = []  # requests that their guides have ended, to be told with the next result
        self._now = now
        self._sleep = sleep
        self._in_flight: deque[_InFlight] = deque()
        self._launched: list[SchedulerOutput] = []  # what no `CoreStep` has told of
        self._last_result_s = float("-inf")
        self._goes_on = False  # whether requests waited for more when it came
        self._schedule_s = 0.0  # spent on planning since the last report
        self._pump = create_pump(scheduler, executor, now=now)

    def add_request(self, request: Request) -> None:
        """Queue a request, or refuse it with the reason."""
        if not self.scheduler.has_unfinished_requests:
            self.drain()  # no request waited for these results, so the time until now is not theirs
        self.scheduler.add_request(request, now_s=self._now())
        params = request.sampling_params
        if params is not None and params.is_guided:
            assert self._guides is not None, "nothing here guides requests"
            self._guides.add(request.request_id, params, request.output_token_ids)

    def finish_request(self, request_id: str, status: RequestStatus) -> None:
        """End a live request from outside."""
        self.scheduler.finish_request(request_id, status)
        if self._guides is not None:
            self._guides.drop(request_id)

    def stop_request(self, request_id: str) -> bool:
        """A stop string was found; see `Scheduler.stop_request`."""
        if self._guides is not None:
            self._guides.drop(request_id)
        return self.scheduler.stop_request(request_id)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether there is anything to step for. Steps may be in flight although no request waits for them any more."""
        return self.scheduler.has_unfinished_requests

    @property
    def only_waits_for_blocks(self) -> bool:
        """Whether a step would do nothing but wait for a transfer to end. Who sleeps instead is woken by
        `Executor.transfers`, and should come back after a second all the same."""
        num_fetching = self.scheduler.num_fetching
        if self._pump is None or not num_fetching or self._pump.has_news:
            return False
        return num_fetching == len(self.scheduler.requests) and not self._in_flight

    def step(self) -> CoreStep:
        """schedule → submit, while there is room in the pipeline; then the oldest result → update."""
        if len(self._in_flight) != len(self.scheduler.in_flight):
            self._find_lost()
        if self._pump is not None:
            self._pump.take_ended()
        self._sample_awaiting()
        self._fill_pipeline()
        if self._in_flight:
            return self._take_result()
        updates = self.scheduler.release_held()
        if self.has_unfinished_requests and not updates:
            self._wait_for_batch()
        return self._idle_step(updates)

    def drain(self) -> list[CoreStep]:
        """Take in the results of all steps in flight, and launch no other."""
        self._find_lost()
        steps = []
        while self._in_flight:
            steps.append(self._take_result())
        return steps

    def check_invariants(self) -> None:
        """Raise `AssertionError` if requests, queue and blocks disagree."""
        check_invariants(self.scheduler)

    def shutdown(self) -> None:
        """Wait for what is in flight, then free the executor. The engine cannot be used afterwards."""
        with contextlib.suppress(EngineDeadError):  # then nothing is in flight any more
            self.drain()
        if self._pump is not None:
            self._pump.close()
            self._pump = None
        self.executor.shutdown()

    # ---- the parts of step() --------------------------------------------------------------------------------------

    def _fill_pipeline(self) -> None:
        """Plan and launch until the pipeline is full, or nothing can be planned before a result has come."""
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
            self._launch(output)

    def _has_room(self) -> bool:
        """Behind a step that could not be submitted nothing is launched: its requests are going to end. Nor is it
        behind one whose tokens are not sampled: the next would read them."""
        if self._in_flight and isinstance(self._in_flight[-1].pending, _FailedStep | _AwaitsMasks):
            return False
        return len(self._in_flight) < self.executor.max_in_flight

    def _launch(self, output: SchedulerOutput) -> None:
        """Hand a plan to the executor; if that fails, a failed step stands in for it."""
        snapshot, submitted_s = self._take_snapshot(output), self._now()
        if self.scheduler.speculation is not None and self._goes_on and not self._in_flight:
            submitted_s = self._last_result_s  # it may be for guesses that nothing was launched before
        try:
            with span("submit"):
                pending = self._submit(output)
        except BaseException as error:
            self._in_flight.append(_InFlight(output, snapshot, _FailedStep(error), submitted_s))
            if _is_more_than_a_step(error):
                raise
            return
        self._in_flight.append(_InFlight(output, snapshot, pending, submitted_s))

    def _submit(self, output: SchedulerOutput) -> PendingStep:
        """A step with guided requests samples when their masks are there. What they depend on, the tokens of the step
        before, is known at once if nothing is in flight; otherwise forward runs meanwhile."""
        guided = self._guided(output)
        if not guided:
            return self.executor.submit(output)
        assert self._guides is not None
        if self._in_flight:
            return _AwaitsMasks(self.executor.forward(output))
        masks = self._guides.begin(guided)  # in threads, beside the step
        try:
            step = self.executor.forward(output)
        finally:
            found = masks.result()
        pending = step.sample(found.masks)
        self._end_guided(found)
        return pending

    def _guided(self, output: SchedulerOutput) -> list[tuple[str, Sequence[int]]]:
        """The requests of a step that choose by masks, and their guesses."""
        if self._guides is None or not self._guides.live:
            return []
        live = self._guides.live
        return [(one.request_id, one.drafts) for one in output.scheduled if one.samples and one.request_id in live]

    def _begin_masks(self) -> None:
        """The step before has been taken in: the masks of the next one can be made, while outputs are."""
        if self._in_flight and isinstance(self._in_flight[0].pending, _AwaitsMasks):
            assert self._guides is not None
            self._in_flight[0].pending.masks = self._guides.begin(self._guided(self._in_flight[0].output))

    def _sample_awaiting(self) -> None:
        """Let the oldest step sample, if it waits for its masks."""
        if not self._in_flight or not isinstance(self._in_flight[0].pending, _AwaitsMasks):
            return
        step, pending = self._in_flight[0], self._in_flight[0].pending
        if pending.masks is None:
            self._begin_masks()  # an interruption has come before
        assert pending.masks is not None
        try:
            with span("masks"):
                found = pending.masks.result()
            with span("sample"):
                sampled = pending.step.sample(found.masks)
            self._end_guided(found)
        except BaseException as error:
            self._in_flight[0] = step._replace(pending=_FailedStep(error))
            if _is_more_than_a_step(error):
                raise
            return
        self._in_flight[0] = step._replace(pending=sampled)

    def _end_guided(self, step: GuidedStep) -> None:
        """End requests that their guides end; what a step in flight chooses for them is dropped."""
        assert self._guides is not None
        self._ended += [self._end(end) for end in self._guides.take_ends(step)]

    def _end(self, end: GuideEnd) -> RequestUpdate:
        request_id, status = end.request_id, RequestStatus.FINISHED_STOPPED
        if end.error is not None:
            self.scheduler.finish_request(request_id, RequestStatus.FINISHED_ERROR)
            return RequestUpdate(request_id, (), (), RequestStatus.FINISHED_ERROR, error=end.error)
        if self.scheduler.stop_request(request_id):
            return RequestUpdate(request_id, (), (), status)
        return RequestUpdate(request_id, (), (), None, held_status=status)

    def _find_lost(self) -> None:
        """Ctrl-C may have come between a plan and its launch, or between an update and the end of its step."""
        known = {step.output.step_id: step for step in self._in_flight}
        self._in_flight = deque(
            known.get(launched.output.step_id) or self._lost(launched.output) for launched in self.scheduler.in_flight
        )

    def _lost(self, output: SchedulerOutput) -> _InFlight:
        """Only the newest step can be."""
        return _InFlight(output, self._take_snapshot(output), _FailedStep(KeyboardInterrupt()), self._now())

    def _take_result(self) -> CoreStep:
        """Wait for the oldest step and take in what came of it."""
        self._sample_awaiting()
        step = self._in_flight[0]
        is_awaited = self.has_unfinished_requests
        failure: Exception | None = None
        try:
            with span("wait"):
                result = step.pending.result()
        except BaseException as error:
            if _is_more_than_a_step(error):
                self._in_flight[0] = step._replace(pending=_FailedStep(error))
                raise
            failure = typing.cast(Exception, error)
            result = _failed(step.output, failure)
        previous_s, self._last_result_s = self._last_result_s, self._now()
        duration_s = self._last_result_s - max(previous_s, step.submitted_s)
        # A failed step has no time of its own, and one that no request waited for may have ended long ago.
        observed_s = duration_s if failure is None and is_awaited else None
        with span("update"):
            updates = self.scheduler.update(step.output, result, duration_s=observed_s)
        self._in_flight.popleft()
        self._goes_on = self.has_unfinished_requests
        if self._guides is not None and self._guides.live:
            self._guides.note(updates)
            self._begin_masks()
        if self._ended:
            updates, self._ended = self._ended + updates, []
        launched, self._launched = self._launched, []
        return CoreStep(launched, updates, self._report(step.snapshot, updates, duration_s, failure))

    def _wait_for_batch(self) -> None:
        """Nothing can be planned before a batch has been waited for, or blocks; but not long, since others may come."""
        opens_at_s = self.scheduler.opens_at_s()
        if self.scheduler.num_fetching and self._pump is not None:
            waits_s = _LONGEST_SLEEP_S if opens_at_s is None else max(opens_at_s - self._now(), 0.0)
            self._pump.wait(min(waits_s, _LONGEST_SLEEP_S))
            return
        if opens_at_s is None:
            raise RuntimeError("requests are waiting, nothing is in flight, and yet nothing can be planned")
        self._sleep(min(max(opens_at_s - self._now(), 0.0), _LONGEST_SLEEP_S))

    def _idle_step(self, updates: list[RequestUpdate]) -> CoreStep:
        snapshot = self._take_snapshot(self.scheduler.nothing())
        return CoreStep([], updates, self._report(snapshot, updates, 0.0))

    def _take_snapshot(self, output: SchedulerOutput) -> BatchSnapshot:
        """The state after planning, before anything else happens to the scheduler. An empty plan has no requests."""
        scheduler = self.scheduler
        requests = scheduler.in_flight[-1].requests if output.scheduled else ()
        return BatchSnapshot(
            output=output,
            requests=requests,
            num_tokens=tuple([request.num_tokens for request in requests]),
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_used_blocks=scheduler.kv_cache.num_used_blocks,
            num_used_slots=scheduler.num_used_slots,
        )

    def _report(
        self,
        snapshot: BatchSnapshot,
        updates: list[RequestUpdate],
        duration_s: float,
        failure: Exception | None = None,
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
            error=None if failure is None else _words(failure),
        )


class _AwaitsMasks:
    """A step that runs up to its logits; what its requests may choose is not known before the step ahead of it."""

    def __init__(self, step: UnsampledStep) -> None:
        self.step = step
        self.masks: Future[GuidedStep] | None = None

    def result(self) -> ModelRunnerOutput:
        raise RuntimeError("the step has not been sampled")


class _FailedStep:
    """Takes the place of a step that could not be submitted or waited for, until it is its turn to fail."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def result(self) -> ModelRunnerOutput:
        if isinstance(self._error, Exception):
            raise self._error
        raise InterruptedError(f"the step was interrupted by {type(self._error).__name__}")


def _is_more_than_a_step(error: BaseException) -> bool:
    """Whether it ends more than the requests of a step: an interruption, or the executor is no more."""
    return not isinstance(error, Exception) or isinstance(error, EngineDeadError)


def _failed(output: SchedulerOutput, error: Exception) -> ModelRunnerOutput:
    """If a step fails, the requests in it fail with the reason; others are not touched."""
    logger.error("step %d failed; its %d requests are ended", output.step_id, len(output.scheduled), exc_info=error)
    failed = SampledTokens((), error=_words(error))
    return ModelRunnerOutput({share.request_id: failed for share in output.scheduled}, prompt_logprobs={})


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
