"""The loop everything turns around: plan a step, run it, take in its result. Read this file first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headway.core import (
    ModelRunnerOutput,
    PromptLogprobs,
    Request,
    RequestStatus,
    RequestUpdate,
    SampledTokens,
    Scheduler,
    SchedulerOutput,
    check_invariants,
)
from headway.engine.step_report import StepReport, take_snapshot
from headway.executor import Executor

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineStep:
    """What came out of one step."""

    updates: list[RequestUpdate]
    prompt_logprobs: Mapping[str, PromptLogprobs]
    report: StepReport


class EngineCore:
    """A scheduler and an executor, in turn. Knows tokens only; text is the business of `LLMEngine`."""

    def __init__(self, scheduler: Scheduler, executor: Executor, *, now: Callable[[], float]) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._now = now

    def add_request(self, request: Request) -> None:
        """Queue a request, or refuse it with the reason."""
        self.scheduler.add_request(request)

    def finish_request(self, request_id: str, status: RequestStatus) -> None:
        """End a live request from outside."""
        self.scheduler.finish_request(request_id, status)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether there is anything to step for."""
        return self.scheduler.has_unfinished_requests

    def step(self) -> EngineStep:
        """schedule → execute → update."""
        started_s = self._now()
        output = self.scheduler.schedule()
        snapshot = take_snapshot(self.scheduler, output)
        result = self._execute(output)
        updates = self.scheduler.update(output, result)
        report = StepReport(
            step_id=output.step_id,
            duration_s=self._now() - started_s,
            rows=snapshot.rows,
            num_running=snapshot.num_running,
            num_waiting=snapshot.num_waiting,
            num_blocks=self.scheduler.kv_cache.num_blocks,
            num_used_blocks=snapshot.num_used_blocks,
            num_used_slots=snapshot.num_used_slots,
            block_size=self.scheduler.kv_cache.block_size,
            preempted=output.preempted_request_ids,
            finished=tuple(update.request_id for update in updates if update.finish_status is not None),
        )
        return EngineStep(updates=updates, prompt_logprobs=result.prompt_logprobs, report=report)

    def check_invariants(self) -> None:
        """Raise `AssertionError` if requests, queue and blocks disagree."""
        check_invariants(self.scheduler)

    def shutdown(self) -> None:
        """Free the executor. The engine cannot be used afterwards."""
        self.executor.shutdown()

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run a step. If it fails, the requests in it fail with the reason; those that wait are not touched."""
        try:
            return self.executor.execute(output)
        except Exception as error:
            logger.exception("step %d failed; its %d requests are ended", output.step_id, len(output.scheduled))
            failed = SampledTokens((), error=f"{type(error).__name__}: {error}")
            return ModelRunnerOutput({s.request_id: failed for s in output.scheduled}, prompt_logprobs={})
