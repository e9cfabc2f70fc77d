"""The loop everything turns around: plan steps, launch them, take in their results. Read this file first.

Planning does not need the result of the step before (see `headway.core.request`), so where the executor allows it the
next step is planned and launched while the one before still runs, and the device never waits for the host:

    host      plan 0   plan 1   result 0, plan 2   result 1, plan 3   ...
    device             step 0 ─────────── step 1 ──────────── step 2 ─────────── ...

Planning commits the scheduler to a step. Whatever is raised from then on, the step stays in `Scheduler.in_flight` until
its result or its failure has been taken in: an error fails its requests, and what is no error (`KeyboardInterrupt`,
`SystemExit`), or the end of the executor (`EngineDeadError`), goes on to the caller, with the failure left for the next
call.
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
    FarIndex,
    HostTier,
    ModelRunnerOutput,
    Request,
    RequestStatus,
    RequestUpdate,
    SampledTokens,
    Scheduler,
    SchedulerOutput,
    check_invariants,
)
from headway.core.kv.moves import BlockMoves
from headway.core.scheduler_output import BatchSnapshot
from headway.core.steps import LaunchedStep
from headway.engine.step_report import StepReport
from headway.errors import EngineDeadError
from headway.executor import Executor, FailedStep
from headway.tracing import span
from headway.transfer.block_store import BlockTransfers

logger = logging.getLogger(__name__)

_LONGEST_SLEEP_S = 0.005
STORE_REST_S = 8.0
"""How long the end of an engine may take for storing what it has kept."""
LOAD_AHEAD_S = 2.0
"""How long the start of an engine may take for bringing blocks from disk to host memory."""
_LOADED_AT_A_TIME = 64
_LONGEST_SETTLING_S = 10.0  # so long transfers for another scheduler may take to end


@dataclass(frozen=True, slots=True)
class CoreStep:
    """What one call of `EngineCore.step()` brought."""

    launched: list[SchedulerOutput]
    """Plans handed to the executor since the last call; their results come with later calls, or came with this one."""
    updates: list[RequestUpdate]
    """The result of the oldest step that was in flight."""
    report: StepReport
    """Of that same step."""


class EngineCore:
    """A scheduler and an executor. Knows tokens only; `LLMEngine` makes text of them."""

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
        self._launched: list[SchedulerOutput] = []  # what no `CoreStep` has told of
        self._last_result_s = float("-inf")
        self._goes_on = False  # whether requests waited for more when it came
        self._schedule_s = 0.0  # spent on planning since the last report
        self._transfers = executor.transfers
        if self._transfers is not None:
            self._take_over(self._transfers)

    def add_request(self, request: Request) -> None:
        """Queue a request, or refuse it with the reason."""
        if not self.scheduler.has_unfinished_requests:
            self.drain()  # no request waited for these results, so the time until now is not theirs
        self.scheduler.add_request(request, now_s=self._now())

    def finish_request(self, request_id: str, status: RequestStatus) -> None:
        """End a live request from outside."""
        self.scheduler.finish_request(request_id, status)

    def stop_request(self, request_id: str) -> bool:
        """End a live request because a stop string has been found in its output. Returns whether it is over; otherwise
        an update is going to say so."""
        self.finish_request(request_id, RequestStatus.FINISHED_STOPPED)
        return request_id not in self.scheduler.requests

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether there is anything to step for. Steps may be in flight although no request waits for them any more."""
        return self.scheduler.has_unfinished_requests

    @property
    def only_waits_for_blocks(self) -> bool:
        """Whether a step would do nothing but wait for a transfer to end. Who sleeps instead is woken by
        `Executor.transfers`, and should come back after a second all the same."""
        scheduler, transfers = self.scheduler, self._transfers
        if transfers is None or not scheduler.num_fetching or transfers.has_news:
            return False
        return scheduler.num_fetching == len(scheduler.requests) and not scheduler.in_flight

    def step(self) -> CoreStep:
        """schedule → submit, while there is room in the pipeline; then the oldest result → update."""
        if self._transfers is not None:
            self._take_transfers()
        self._fill_pipeline()
        if self.scheduler.in_flight:
            return self._take_result()
        updates = self.scheduler.take_ends()
        if self.has_unfinished_requests and not updates:
            self._wait()
        return self._idle_step(updates)

    def drain(self) -> list[CoreStep]:
        """Take in the results of all steps in flight, and launch no other."""
        steps = []
        while self.scheduler.in_flight:
            steps.append(self._take_result())
        return steps

    def check_invariants(self) -> None:
        """Raise `AssertionError` if requests, queue and blocks disagree."""
        check_invariants(self.scheduler)

    def shutdown(self) -> None:
        """Wait for what is in flight, then free the executor. The engine cannot be used afterwards. Kept blocks go to
        disk first, as far as `STORE_REST_S` suffice."""
        with contextlib.suppress(EngineDeadError):  # then nothing is in flight any more
            self.drain()
        try:
            if self._transfers is not None and self._transfers.disk is not None:
                self._store_rest(self._transfers)
                self._transfers.disk.note_order(self.scheduler.kv_cache.order_of_use)
        except EngineDeadError as error:
            logger.warning("kept blocks are not stored: %s", error)
        except Exception:
            logger.exception("blocks are lost that were to be stored")
        self._transfers = None
        self.executor.shutdown()

    # ---- the parts of step() --------------------------------------------------------------------------------------

    def _fill_pipeline(self) -> None:
        """Plan and launch until the pipeline is full, or nothing can be planned before a result has come."""
        while self._has_room():
            started_s = self._now()
            with span("schedule"):
                output = self.scheduler.schedule(now_s=started_s)
            self._schedule_s += self._now() - started_s
            if output.moves.has_transfers:
                self._begin_transfers(output.moves)
            if output.is_empty:
                break
            self._launched.append(output)
            self._launch(self.scheduler.in_flight[-1])

    def _begin_transfers(self, moves: BlockMoves, *, is_use: bool = True) -> None:
        """Whatever goes wrong, each of them ends. `is_use`: a request wants what is fetched."""
        try:
            if self._transfers is not None:
                self._transfers.begin(moves, is_use=is_use)
                return
        except EngineDeadError as error:  # which the next step says too
            logger.warning("blocks can be neither fetched nor stored: %s", error)
        except Exception:
            logger.exception("blocks can be neither fetched nor stored")
        for digest, _, _ in moves.fetched:
            self.scheduler.fetch_done(digest, False)
        for digest, _ in moves.stored:
            self.scheduler.store_done(digest, False)

    def _take_transfers(self) -> None:
        """Blocks that have come may let requests enter."""
        assert self._transfers is not None
        for ended in self._transfers.take():
            if ended.is_fetch:
                self.scheduler.fetch_done(ended.digest, ended.ok, seconds=ended.seconds)
            else:
                self.scheduler.store_done(ended.digest, ended.ok)
        self._bring_ahead()
        disk, tier = self._transfers.disk, self.scheduler.kv_cache.host_tier
        if disk is not None and tier is not None and tier.far is not None:
            added, lost = disk.take_changes()
            for digest in added:
                tier.far.add(digest)
            for digest in lost:
                tier.far.discard(digest)

    def _bring_ahead(self) -> None:
        """Blocks that have come are copied while the others of their requests are on the way."""
        kv_cache = self.scheduler.kv_cache
        moves = kv_cache.bring_ahead()
        if moves.has_copies:
            try:
                self._move(moves)
            except Exception as error:
                if _is_more_than_a_step(error):
                    raise
                logger.warning("blocks are not copied before their requests begin: %s", error)
        if moves.has_transfers:
            self._begin_transfers(moves)

    def _move(self, moves: BlockMoves) -> None:
        """Make copies without a step."""
        has_failed = True
        try:
            self.executor.move(moves)
            has_failed = False
        finally:
            self.scheduler.kv_cache.landed(moves, has_failed=has_failed)

    def _store_rest(self, transfers: BlockTransfers) -> None:
        """Bring all kept blocks to disk, as many at a time as host memory holds."""
        until_s, kv_cache = self._now() + STORE_REST_S, self.scheduler.kv_cache
        tier = kv_cache.host_tier
        assert tier is not None
        num_failed = tier.stats.num_failed_stores
        while (left_s := until_s - self._now()) > 0:
            self._take_transfers()
            if tier.stats.num_failed_stores > num_failed:
                break
            moves = kv_cache.store_rest()
            if moves.has_copies:
                self._move(moves)
            if moves.has_transfers:
                self._begin_transfers(moves)
            if not moves.has_copies:
                if not transfers.num_under_way:
                    return
                transfers.wait(left_s)
        logger.warning("not all kept blocks could be stored")

    def _take_over(self, transfers: BlockTransfers) -> None:
        """From another scheduler, perhaps, whose blocks are forgotten. What is on disk is known."""
        if not transfers.settle(_LONGEST_SETTLING_S):
            raise RuntimeError("transfers of blocks do not end")
        tier, disk = self.scheduler.kv_cache.host_tier, transfers.disk
        if tier is not None and disk is not None:
            tier.far = FarIndex(disk.max_blocks)
            for digest in disk.digests():
                tier.far.add(digest)
            self._load_ahead(transfers, tier)

    def _load_ahead(self, transfers: BlockTransfers, tier: HostTier) -> None:
        """What was used last is going to be asked for first, and is there sooner from host memory than from disk."""
        until_s, loaded = self._now() + LOAD_AHEAD_S, list[bytes]()
        while (left_s := until_s - self._now()) > 0:
            if transfers.num_under_way:
                if not transfers.wait(left_s):
                    break  # the rest of them comes later, or never
                self._take_transfers()
            elif wanted := tier.fetch_latest(_LOADED_AT_A_TIME):
                loaded += wanted
                self._begin_transfers(self.scheduler.kv_cache.take_transfers(), is_use=False)
            else:
                break
        tier.note_latest(loaded)

    def _has_room(self) -> bool:
        """After a step that could not be submitted nothing is launched: its requests are going to end."""
        in_flight = self.scheduler.in_flight
        if not in_flight:
            return True
        last = in_flight[-1].pending
        is_lost = last is None or isinstance(last, FailedStep)
        return not is_lost and len(in_flight) < self.executor.max_in_flight

    def _launch(self, step: LaunchedStep) -> None:
        """Hand a planned step to the executor; if that fails, a failed step stands in for it."""
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
        step.submitted_s = self._now()

    def _take_result(self) -> CoreStep:
        """Wait for the oldest step and take in what came of it."""
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
        # A failed step has no time of its own, and one that no request waited for may have ended long ago.
        observed_s = duration_s if failure is None and is_awaited else None
        with span("update"):
            updates = self.scheduler.update(step.output, result, duration_s=observed_s)
        self._goes_on = self.has_unfinished_requests
        launched, self._launched = self._launched, []
        assert step.snapshot is not None
        return CoreStep(launched, updates, self._report(step.snapshot, updates, duration_s, failure))

    def _wait(self) -> None:
        """Nothing can be planned before blocks have come, or before a time; but not long, since requests may come."""
        ready_at_s = self.scheduler.ready_at_s()
        waits_s = math.inf if ready_at_s is None else max(ready_at_s - self._now(), 0.0)
        if self.scheduler.num_fetching and self._transfers is not None:
            self._transfers.wait(min(waits_s, _LONGEST_SLEEP_S))
            return
        if ready_at_s is None:
            raise RuntimeError("requests are waiting, nothing is in flight, and yet nothing can be planned")
        self._sleep(min(waits_s, _LONGEST_SLEEP_S))

    def _idle_step(self, updates: list[RequestUpdate]) -> CoreStep:
        snapshot = self._take_snapshot(self.scheduler.nothing(), ())
        return CoreStep([], updates, self._report(snapshot, updates, 0.0))

    def _take_snapshot(self, output: SchedulerOutput, requests: tuple[Request, ...]) -> BatchSnapshot:
        """The state after planning, before anything else happens to the scheduler."""
        scheduler = self.scheduler
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
