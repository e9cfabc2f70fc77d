"""What an engine reports besides outputs: statistics after every step and, for viewers, full snapshots of steps.

    EngineCounters   the engine's numbers (`EngineStats`), kept up to date step by step
    SnapshotMaker    which requests computed what, which wait, and which own each block

A beam is a new request at each position, but it is displayed as one continuing request: the n-th beam of a search has a
fixed name, the search's prompt, and the tokens found by the search as its output.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Container, Iterable

import msgspec

from headway.core import KVCacheManager, NewRequest, Request, Scheduler, SchedulerOutput
from headway.core.utilisation import UtilisationStats
from headway.engine.beam_requests import BeamRequests
from headway.engine.step_report import StepReport, StepRow
from headway.wire.engine_stats import EngineStats, StepKind, TransferStats
from headway.wire.messages import (
    CACHED,
    SHARED,
    BlockMap,
    BlockRun,
    BlockSnapshot,
    SnapshotRow,
    StepSnapshot,
    WaitingRow,
)

NUM_WAITING_SHOWN = 8
BLOCK_MAP_INTERVAL_S = 0.1
"""The shortest time between two block maps. The cost of a map grows with the number of blocks, and viewers see no more
than ten a second."""

# ---- numbers --------------------------------------------------------------------------------------------------------


class EngineCounters:
    """Counts what steps do. It works once per step and not once per request.

    To the scheduler each beam of a search is a new request at each position, which finds nearly all of its tokens in
    the prefix cache. Here a search counts as one request that runs until it ends, and its prompt is looked up once.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        beams: BeamRequests,
        *,
        counted: EngineStats | None = None,
        transfers: TransferStats | None = None,
        utilisation: UtilisationStats | None = None,
    ) -> None:
        """`counted`: statistics of the engine that this one replaces; its counters continue here. `transfers` and
        `utilisation`: the records that the block server and the engine's meter count in, if there are any."""
        self._scheduler = scheduler
        self._beams = beams
        self._recomputed = RecomputedTokens()
        self._stats = _stats_of_owners(scheduler, transfers, utilisation)
        if counted is not None:
            self._stats.go_on_from(counted)

    def take(self, report: StepReport, *, num_new_tokens: int) -> None:
        """Count a step whose result has arrived."""
        step, batch, plan = self._stats.step, self._stats.batch, report.snapshot.output
        step.duration_s = report.duration_s
        step.schedule_s = report.schedule_s
        step.kind = kind_of(plan)
        step.num_tokens = plan.num_scheduled_tokens
        batch.num_steps += 1
        batch.generation_tokens += num_new_tokens
        batch.num_preemptions += len(plan.preempted_request_ids)
        if plan.new_requests:
            self._count_prompts(report)
        batch.num_recomputed_tokens += self._recomputed.take(
            plan, self._scheduler.requests, is_decode=step.kind == "decode"
        )

    def stats(self) -> EngineStats:
        """The counters, and the present state of queue, batch and blocks. The record must be sent before the next
        `take`."""
        stats, scheduler, num_seated = self._stats, self._scheduler, self._num_seated_beams()
        batch, blocks, kv_cache = stats.batch, stats.blocks, scheduler.kv_cache
        batch.num_running = len(scheduler.live.running) + num_seated
        batch.num_waiting = scheduler.num_waiting - num_seated
        blocks.num_free_blocks = kv_cache.device.pool.num_free_blocks
        blocks.num_cached_blocks = kv_cache.device.num_idle
        blocks.num_used_blocks = kv_cache.num_used_blocks
        blocks.num_used_slots = scheduler.num_used_slots
        blocks.num_table_entries = kv_cache.num_table_entries
        stats.step.prompt_token_s = scheduler.pace.step_time.per_token_s or 0.0
        tiers, beams = kv_cache.tiers, self._beams.take_lookups()
        if kv_cache.prefix_cache is not None:
            stats.prefix_cache.num_queried_tokens -= beams.num_queried_tokens
            stats.prefix_cache.num_hit_tokens -= beams.num_hit_tokens
        if tiers is not None:
            batch.num_fetching = len(scheduler.live.fetching.requests)
            stats.tiers.num_host_blocks = len(tiers.host)
            stats.tiers.num_disk_blocks = 0 if tiers.host.disk is None else len(tiers.host.disk)
        return stats

    def _num_seated_beams(self) -> int:
        """The number of queued beams that count as running. Between two steps continuing beams are in the queue, but
        the next step admits as many as there are free seats."""
        if not self._beams:
            return 0
        num_free_seats = self._scheduler.config.max_num_seqs - len(self._scheduler.live.running)
        return min(self._beams.num_between_steps, max(0, num_free_seats))

    def _count_prompts(self, report: StepReport) -> None:
        """Count the prompts of requests that enter the batch for the first time."""
        plan = report.snapshot.output
        just_left = frozenset(plan.preempted_request_ids)
        going_on = frozenset(request.request_id for request in report.snapshot.requests if request.is_fork)
        for new in plan.new_requests:
            if new.request_id in going_on:
                continue
            if new.request_id not in just_left and not self._recomputed.has_left(new.request_id):
                self._stats.batch.prompt_tokens += len(new.prompt_token_ids)
                self._stats.batch.num_saved_tokens += new.num_computed_tokens


def _stats_of_owners(
    scheduler: Scheduler, transfers: TransferStats | None, utilisation: UtilisationStats | None
) -> EngineStats:
    """Statistics made of the very records that the scheduler's parts count in, so that nothing need be copied."""
    stats, kv_cache = EngineStats(), scheduler.kv_cache
    stats.token_time = scheduler.token_time.stats
    if kv_cache.prefix_cache is not None:
        stats.prefix_cache = kv_cache.prefix_cache.stats
    if kv_cache.tiers is not None:
        stats.tiers = kv_cache.tiers.host.stats
    if scheduler.speculation is not None:
        stats.drafts = scheduler.speculation.stats
    if transfers is not None:
        stats.transfers = transfers
    if utilisation is not None:
        stats.utilisation = utilisation
    return stats


def kind_of(plan: SchedulerOutput) -> StepKind:
    """The kind of a step. A request with a single token counts as a decode, since a prompt's last token costs the
    same."""
    num_decodes = sum(share.num_tokens == 1 + len(share.drafts) for share in plan.scheduled)
    if num_decodes == len(plan.scheduled):
        return "decode"
    return "mixed" if num_decodes else "prefill"


class RecomputedTokens:
    """Counts tokens that are computed again because their request was preempted. It follows requests in the middle of
    their prompts, and preempted ones until they have caught up.

        computed before it was preempted     ■ ■ ■ ■ ■ ■ ■ ■ ■ ■
        found in the cache when it is back   ■ ■ ■ ■
        computed again                               ▣ ▣ ▣ ▣ ▣ ▣     only these count, and only when they are computed
    """

    def __init__(self) -> None:
        self._amid_prompt: dict[str, int] = {}  # how many tokens are computed
        self._left: dict[str, int] = {}  # of requests that were preempted: how many had been
        self._catching_up: dict[str, int] = {}  # the same, of those that are back

    def has_left(self, request_id: str) -> bool:
        """Whether a request that enters the batch has been in it before."""
        return request_id in self._left

    def take(self, plan: SchedulerOutput, live: Container[str], *, is_decode: bool) -> int:
        """Return how many tokens a step computes again. Must be called in the order of the steps. `live`: ids of the
        requests that have not ended; `is_decode`: the step has no prefill chunks."""
        for request_id in plan.preempted_request_ids:
            before = self._amid_prompt.pop(request_id, 0)
            self._left[request_id] = max(before, self._catching_up.pop(request_id, 0))
        if self._left:
            for new in plan.new_requests:
                self._note_return(new)
            if plan.preempted_request_ids:
                self._left = {request_id: num for request_id, num in self._left.items() if request_id in live}
        num_tokens = self._count(plan) if self._catching_up else 0
        if not is_decode:
            self._note_chunks(plan)
        for request_id in plan.finished_request_ids:
            self._amid_prompt.pop(request_id, None)
            self._catching_up.pop(request_id, None)
        return num_tokens

    def _note_return(self, new: NewRequest) -> None:
        """Follow a preempted request that is back. If it has output, all of its tokens but the last had been
        computed."""
        before = self._left.pop(new.request_id, None)
        if before is not None:
            has_output = bool(new.output_token_ids)
            num_known = len(new.prompt_token_ids) + len(new.output_token_ids)
            self._catching_up[new.request_id] = max(before, num_known - 1 if has_output else 0)

    def _count(self, plan: SchedulerOutput) -> int:
        num_tokens = 0
        for share in plan.scheduled:
            before = self._catching_up.get(share.request_id)
            if before is not None:
                end = share.num_computed_tokens + share.num_tokens
                num_tokens += max(0, min(end, before) - share.num_computed_tokens)
                if end >= before:
                    del self._catching_up[share.request_id]
        return num_tokens

    def _note_chunks(self, plan: SchedulerOutput) -> None:
        for share in plan.scheduled:
            if share.samples:
                self._amid_prompt.pop(share.request_id, None)
            else:
                self._amid_prompt[share.request_id] = share.num_computed_tokens + share.num_tokens


# ---- a step in full ------------------------------------------------------------------------------------------------


class SnapshotMaker:
    """Makes snapshots of steps. It remembers when it last made a block map, and whether that is still valid."""

    def __init__(self, scheduler: Scheduler, beams: BeamRequests, *, now: Callable[[], float] = time.monotonic) -> None:
        self._scheduler = scheduler
        self._beams = beams
        self._now = now
        self._map_due_s = float("-inf")
        self.is_map_stale = True
        """Whether blocks may have changed owners since the last map."""

    def note_blocks_changed(self) -> None:
        """Note that blocks have changed owners without a step."""
        self.is_map_stale = True

    def snapshot(self, report: StepReport) -> StepSnapshot:
        """A snapshot of a step. Rows and counts are the step's; queue and blocks are as they are now, after it."""
        return StepSnapshot(
            step_id=report.step_id,
            step_s=report.duration_s,
            kind=kind_of(report.snapshot.output),
            num_running=report.num_running,
            num_waiting=report.num_waiting,
            num_blocks=report.num_blocks,
            num_used_blocks=report.num_used_blocks,
            num_used_slots=report.num_used_slots,
            rows=[_row(row, request) for row, request in zip(report.rows, report.snapshot.requests)],
            waiting=self._waiting(),
            preempted=self._names(report.preempted),
            finished=self._finished(report),
            blocks=self._map_if_due(),
        )

    def blocks(self) -> BlockSnapshot:
        """A snapshot of the blocks only, as they are now."""
        return BlockSnapshot(self._map())

    def _waiting(self) -> list[WaitingRow]:
        queue = self._scheduler.live.waiting
        num_shown = min(len(queue), NUM_WAITING_SHOWN, self._scheduler.config.skip_window + 1)
        requests = [queue.peek(place) for place in range(num_shown)]
        return [
            WaitingRow(request.shown_as, request.num_tokens)
            for request in requests
            if request is not None and not request.is_fork
        ]

    def _finished(self, report: StepReport) -> list[str]:
        """Names of the requests that ended, without beams that continue as other requests."""
        if not report.finished:
            return []
        names = {request.request_id: request.shown_as for request in report.snapshot.requests}
        finished, going_on = [names[request_id] for request_id in report.finished], self._beams.shown()
        return [name for name in finished if name not in going_on]

    def _names(self, request_ids: Iterable[str]) -> list[str]:
        """The displayed names of live requests, and the ids of others."""
        live = self._scheduler.requests
        return [live[request_id].shown_as if request_id in live else request_id for request_id in request_ids]

    def _map_if_due(self) -> BlockMap | None:
        self.is_map_stale = True
        return None if self._now() < self._map_due_s else self._map()

    def _map(self) -> BlockMap:
        self._map_due_s = self._now() + BLOCK_MAP_INTERVAL_S
        self.is_map_stale = False
        found = block_map(self._scheduler.kv_cache)
        return msgspec.structs.replace(found, owners=self._names(found.owners))


def _row(row: StepRow, request: Request) -> SnapshotRow:
    shown = SnapshotRow(
        request.shown_as,
        row.num_prompt_tokens,
        row.num_computed_tokens,
        row.num_output_tokens,
        row.num_tokens,
        row.num_blocks,
        row.is_decode,
        row.num_cached_tokens,
        row.num_drafts,
        row.num_accepted,
    )
    if request.is_fork:
        shown.num_prompt_tokens -= request.num_inherited_tokens
        shown.num_output_tokens += request.num_inherited_tokens
        shown.is_decode = row.num_tokens == 1
        shown.num_cached_tokens = 0
    return shown


def block_map(kv_cache: KVCacheManager) -> BlockMap:
    """The owner of each block: a request, several requests, the prefix cache, or none."""
    owners = list(kv_cache.holdings)
    owner_of: list[int | None] = [None] * kv_cache.num_blocks
    for block in kv_cache.prefix_cache or ():
        owner_of[block.block_id] = CACHED
    for index, request_id in enumerate(owners):
        for block_id in kv_cache.block_table(request_id):
            owner_of[block_id] = index if owner_of[block_id] in (None, CACHED) else SHARED
    return BlockMap(owners, [BlockRun(owner, len(list(run))) for owner, run in itertools.groupby(owner_of)])
