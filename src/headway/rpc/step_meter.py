"""The engine's numbers, kept up to date step by step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import msgspec

from headway.core import PrefixCacheStats, Scheduler, SchedulerOutput
from headway.core.host_tier import HostTierStats
from headway.engine.beam_requests import BeamRequest, BeamRequests
from headway.engine.step_report import StepReport
from headway.rpc.messages import EngineStats, StepKind
from headway.rpc.recomputed import RecomputedTokens
from headway.tracing import Recorder

_NOTHING = nullcontext()


class StepMeter:
    """Counts what steps do. It adds to numbers in a step's time, not in a request's.

    To the scheduler each beam of a search is a new request at each position, which finds nearly all of its tokens in
    the prefix cache. Here a search is a request that runs until it ends, and whose prompt is looked up once.
    """

    def __init__(self, scheduler: Scheduler, beams: BeamRequests, *, counted: EngineStats | None = None) -> None:
        """`counted`: numbers of an engine before this one, whose counters go on."""
        self._scheduler = scheduler
        self._beams = beams
        self._before = counted or EngineStats()
        self._stats = msgspec.structs.replace(self._before, step_s=0.0, schedule_s=0.0, num_step_tokens=0)
        self._recomputed = RecomputedTokens()
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
        stats.num_preemptions += len(plan.preempted_request_ids)
        if plan.new_requests:
            self._count_prompts(report)
        self._recomputed.take(plan, self._scheduler.requests, is_decode=stats.kind == "decode")
        stats.num_recomputed_tokens = self._before.num_recomputed_tokens + self._recomputed.num_tokens

    def stats(self) -> EngineStats:
        """The counters, and the present state of queue, batch and blocks. To be sent before the next step is taken."""
        stats, scheduler = self._stats, self._scheduler
        kv_cache = scheduler.kv_cache
        num_seated = self._num_seated_beams()
        stats.num_running = len(scheduler.running) + num_seated
        stats.num_waiting = len(scheduler.waiting) - num_seated
        stats.num_free_blocks = kv_cache.pool.num_free_blocks
        stats.num_cached_blocks = kv_cache.num_idle_blocks
        stats.num_used_blocks = kv_cache.num_used_blocks
        stats.num_used_slots = scheduler.num_used_slots
        stats.num_table_entries = kv_cache.num_table_entries
        if kv_cache.prefix_cache is not None:
            self._count_cache(kv_cache.prefix_cache.stats)
        if kv_cache.host_tier is not None:
            stats.num_host_blocks = len(kv_cache.host_tier)
            self._count_moves(kv_cache.host_tier.stats)
        return stats

    def _count_cache(self, found: PrefixCacheStats) -> None:
        stats, before, beams = self._stats, self._before, self._beams.lookups
        stats.num_queried_tokens = before.num_queried_tokens + found.num_queried_tokens - beams.num_queried_tokens
        stats.num_hit_tokens = before.num_hit_tokens + found.num_hit_tokens - beams.num_hit_tokens
        stats.num_inserted_blocks = before.num_inserted_blocks + found.num_inserted_blocks
        stats.num_evicted_blocks = before.num_evicted_blocks + found.num_evicted_blocks

    def _count_moves(self, moved: HostTierStats) -> None:
        self._stats.num_moved_out_blocks = self._before.num_moved_out_blocks + moved.num_moved_out
        self._stats.num_moved_in_blocks = self._before.num_moved_in_blocks + moved.num_moved_in

    def _num_seated_beams(self) -> int:
        """Beams that go on are in the queue between two steps, and in the batch while there is room for them."""
        if not self._beams:
            return 0
        num_free_seats = self._scheduler.config.max_num_seqs - len(self._scheduler.running)
        return min(self._beams.num_between_steps, max(0, num_free_seats))

    def _count_prompts(self, report: StepReport) -> None:
        """Of requests that enter the batch for the first time."""
        plan = report.snapshot.output
        just_left = frozenset(plan.preempted_request_ids)
        going_on = frozenset(
            request.request_id
            for request in report.snapshot.requests
            if isinstance(request, BeamRequest) and request.is_fork
        )
        for new in plan.new_requests:
            if new.request_id in going_on:
                continue
            if new.request_id not in just_left and not self._recomputed.has_left(new.request_id):
                self._stats.prompt_tokens += len(new.prompt_token_ids)
                self._stats.num_saved_tokens += new.num_computed_tokens


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
