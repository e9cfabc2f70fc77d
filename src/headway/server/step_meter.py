"""The engine's numbers, kept up to date step by step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import msgspec

from headway.core import Scheduler, SchedulerOutput
from headway.engine.step_report import BatchSnapshot, StepReport
from headway.server.messages import EngineStats, StepKind
from headway.tracing import Recorder

_NOTHING = nullcontext()


class StepMeter:
    """Counts what steps do. It adds to numbers in a step's time, not in a request's."""

    def __init__(self, scheduler: Scheduler, *, counted: EngineStats | None = None) -> None:
        """`counted`: numbers of an engine before this one, whose counters go on."""
        self._scheduler = scheduler
        self._stats = msgspec.structs.replace(counted or EngineStats(), step_s=0.0, schedule_s=0.0, num_step_tokens=0)
        self._partly_computed: dict[str, int] = {}  # tokens in the cache of requests amid their prompt
        self.planning = PlanningTime()

    def take(self, report: StepReport, *, num_new_tokens: int) -> None:
        """A step's result has come."""
        stats, plan = self._stats, report.snapshot.output
        stats.num_steps += 1
        stats.generation_tokens += num_new_tokens
        stats.step_s = report.duration_s
        stats.schedule_s = self.planning.take_s()
        stats.kind = kind_of(plan)
        stats.num_step_tokens = plan.num_scheduled_tokens
        if plan.preempted_request_ids:
            self._count_preempted(plan)
        if plan.new_requests:
            self._count_prompts(report.snapshot)
        if stats.kind != "decode":
            self._note_chunks(plan)
        for request_id in plan.finished_request_ids:
            self._partly_computed.pop(request_id, None)

    def stats(self) -> EngineStats:
        """The counters, and the present state of queue, batch and blocks. To be sent before the next step is taken."""
        stats, scheduler = self._stats, self._scheduler
        kv_cache = scheduler.kv_cache
        stats.num_running = len(scheduler.running)
        stats.num_waiting = len(scheduler.waiting)
        stats.num_free_blocks = kv_cache.pool.num_free_blocks
        stats.num_cached_blocks = kv_cache.num_idle_blocks
        stats.num_used_blocks = kv_cache.num_used_blocks
        stats.num_used_slots = scheduler.num_used_slots
        return stats

    def _count_preempted(self, plan: SchedulerOutput) -> None:
        """They lose what they had in the cache: amid the prompt what was computed of it, later all but the last token.
        One that has ended since then computes nothing again."""
        self._stats.num_preemptions += len(plan.preempted_request_ids)
        for request_id in plan.preempted_request_ids:
            num_computed = self._partly_computed.pop(request_id, 0)
            request = self._scheduler.requests.get(request_id)
            if request is not None:
                is_past_prompt = request.num_tokens > request.num_prompt_tokens
                self._stats.num_recomputed_tokens += request.num_tokens - 1 if is_past_prompt else num_computed

    def _count_prompts(self, snapshot: BatchSnapshot) -> None:
        """Of requests that enter the batch for the first time."""
        entered = {new.request_id for new in snapshot.output.new_requests}
        for request in snapshot.requests:
            if request.request_id in entered and request.num_preemptions == 0:
                self._stats.prompt_tokens += request.num_prompt_tokens

    def _note_chunks(self, plan: SchedulerOutput) -> None:
        for share in plan.scheduled:
            if share.samples:
                self._partly_computed.pop(share.request_id, None)
            else:
                self._partly_computed[share.request_id] = share.num_computed_tokens + share.num_tokens


def kind_of(plan: SchedulerOutput) -> StepKind:
    """A request with a single token counts as one that generates; the last token of a prompt costs the same."""
    if plan.num_scheduled_tokens == len(plan.scheduled):
        return "decode"
    return "mixed" if any(share.num_tokens == 1 for share in plan.scheduled) else "prefill"


class PlanningTime(Recorder):
    """Adds up the spans named "schedule" and ignores all others."""

    def __init__(self) -> None:
        super().__init__()
        self._total_s = 0.0
        self._start_s = 0.0

    def span(self, name: str, args: Mapping[str, object]) -> AbstractContextManager[None]:
        """Spans of this name do not nest, so that one object serves them all."""
        return self if name == "schedule" else _NOTHING

    def take_s(self) -> float:
        """Seconds since this was last asked."""
        total_s, self._total_s = self._total_s, 0.0
        return total_s

    def __enter__(self) -> None:
        self._start_s = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._total_s += time.perf_counter() - self._start_s
