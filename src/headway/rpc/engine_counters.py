"""The engine's numbers (`EngineStats`), kept up to date step by step."""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence

import msgspec

from headway.core import NewRequest, PrefixCacheStats, Scheduler, SchedulerOutput
from headway.core.host_tier import HostTierStats
from headway.core.speculation import SpeculationStats
from headway.engine.beam_search import BeamRequest, BeamRequests
from headway.engine.step_report import StepReport
from headway.rpc.messages import EngineStats, StepKind


class EngineCounters:
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

    def take(self, report: StepReport, *, num_new_tokens: int) -> None:
        """A step's result has come."""
        stats, plan = self._stats, report.snapshot.output
        stats.num_steps += 1
        stats.generation_tokens += num_new_tokens
        stats.step_s = report.duration_s
        stats.schedule_s = report.schedule_s
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
        if scheduler.speculation is not None:
            self._count_drafts(scheduler.speculation.stats, scheduler.speculation.accepted_at)
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

    def _count_drafts(self, drafted: SpeculationStats, accepted_at: Sequence[int]) -> None:
        stats, before = self._stats, self._before
        stats.num_drafts = before.num_drafts + drafted.num_drafts
        stats.num_draft_tokens = before.num_draft_tokens + drafted.num_draft_tokens
        stats.num_accepted_tokens = before.num_accepted_tokens + drafted.num_accepted_tokens
        places = itertools.zip_longest(before.num_accepted_at, accepted_at, fillvalue=0)
        stats.num_accepted_at = [earlier + now for earlier, now in places]

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
    num_decodes = sum(share.num_tokens == 1 + len(share.drafts) for share in plan.scheduled)
    if num_decodes == len(plan.scheduled):
        return "decode"
    return "mixed" if num_decodes else "prefill"


class RecomputedTokens:
    """Counts tokens that are computed a second time, because their request was preempted in between. It follows
    requests amid their prompts, and those that were preempted until they are where they were.

        computed before it was preempted     ■ ■ ■ ■ ■ ■ ■ ■ ■ ■
        found in the cache when it is back   ■ ■ ■ ■
        computed again                               ▣ ▣ ▣ ▣ ▣ ▣     only these count, and only when they are computed
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._amid_prompt: dict[str, int] = {}  # how many tokens are computed
        self._left: dict[str, int] = {}  # of requests that were preempted: how many had been
        self._catching_up: dict[str, int] = {}  # the same, of those that are back

    def has_left(self, request_id: str) -> bool:
        """Whether a request that enters the batch has been in it before."""
        return request_id in self._left

    def take(self, plan: SchedulerOutput, live: Container[str], *, is_decode: bool) -> None:
        """Take in the plan of a step, in the order of the steps. `live`: ids of the requests that have not ended;
        `is_decode`: the step has no chunks of prompts."""
        for request_id in plan.preempted_request_ids:
            before = self._amid_prompt.pop(request_id, 0)
            self._left[request_id] = max(before, self._catching_up.pop(request_id, 0))
        if self._left:
            for new in plan.new_requests:
                self._note_return(new)
            if plan.preempted_request_ids:
                self._left = {request_id: num for request_id, num in self._left.items() if request_id in live}
        if self._catching_up:
            self._count(plan)
        if not is_decode:
            self._note_chunks(plan)
        for request_id in plan.finished_request_ids:
            self._amid_prompt.pop(request_id, None)
            self._catching_up.pop(request_id, None)

    def _note_return(self, new: NewRequest) -> None:
        """A request that has generated something had all of its tokens computed but the last."""
        before = self._left.pop(new.request_id, None)
        if before is not None:
            has_output = bool(new.output_token_ids)
            num_known = len(new.prompt_token_ids) + len(new.output_token_ids)
            self._catching_up[new.request_id] = max(before, num_known - 1 if has_output else 0)

    def _count(self, plan: SchedulerOutput) -> None:
        for share in plan.scheduled:
            before = self._catching_up.get(share.request_id)
            if before is not None:
                end = share.num_computed_tokens + share.num_tokens
                self.num_tokens += max(0, min(end, before) - share.num_computed_tokens)
                if end >= before:
                    del self._catching_up[share.request_id]

    def _note_chunks(self, plan: SchedulerOutput) -> None:
        for share in plan.scheduled:
            if share.samples:
                self._amid_prompt.pop(share.request_id, None)
            else:
                self._amid_prompt[share.request_id] = share.num_computed_tokens + share.num_tokens
