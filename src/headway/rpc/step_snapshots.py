"""A step in full, for viewers of the engine: which requests computed what, which wait, and which own each block.

A beam is another request at each position, and shown as one that goes on: the n-th beam of a search has one name, the
search's prompt, and as output what the search has found.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable

import msgspec

from headway.core import KVCacheManager, Request, Scheduler
from headway.engine.beam_search import BeamRequest, BeamRequests
from headway.engine.step_report import StepReport, StepRow
from headway.rpc.engine_counters import kind_of
from headway.rpc.messages import (
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
"""A map costs a time that grows with the number of blocks, and viewers see no more than ten a second."""


class SnapshotMaker:
    """Remembers when it last drew the map of the blocks, and whether it still holds."""

    def __init__(self, scheduler: Scheduler, beams: BeamRequests, *, now: Callable[[], float] = time.monotonic) -> None:
        self._scheduler = scheduler
        self._beams = beams
        self._now = now
        self._map_due_s = float("-inf")
        self.is_map_stale = True
        """Whether blocks may have changed hands since the last map."""

    def note_blocks_changed(self) -> None:
        """Blocks have changed hands without a step."""
        self.is_map_stale = True

    def snapshot(self, report: StepReport) -> StepSnapshot:
        """Rows and counts are of the step; queue and blocks are as they are now, after it."""
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
        """The blocks alone, as they are now."""
        return BlockSnapshot(self._map())

    def _waiting(self) -> list[WaitingRow]:
        queue = self._scheduler.waiting
        num_shown = min(len(queue), NUM_WAITING_SHOWN, self._scheduler.config.skip_window + 1)
        requests = [queue.peek(place) for place in range(num_shown)]
        return [
            WaitingRow(_name(request), request.num_tokens)
            for request in requests
            if request is not None and not _goes_on(request)
        ]

    def _finished(self, report: StepReport) -> list[str]:
        """Without the beams that another one takes the place of."""
        if not report.finished:
            return []
        by_id = {request.request_id: request for request in report.snapshot.requests}
        finished = [by_id[request_id] for request_id in report.finished]
        return [
            _name(request)
            for request in finished
            if not (isinstance(request, BeamRequest) and self._beams.is_live(request))
        ]

    def _names(self, request_ids: Iterable[str]) -> list[str]:
        """What live requests are called; of others, their ids."""
        live = self._scheduler.requests
        return [_name(live[request_id]) if request_id in live else request_id for request_id in request_ids]

    def _map_if_due(self) -> BlockMap | None:
        self.is_map_stale = True
        return None if self._now() < self._map_due_s else self._map()

    def _map(self) -> BlockMap:
        self._map_due_s = self._now() + BLOCK_MAP_INTERVAL_S
        self.is_map_stale = False
        found = block_map(self._scheduler.kv_cache)
        return msgspec.structs.replace(found, owners=self._names(found.owners))


def _name(request: Request) -> str:
    return f"{request.search_id}#{request.place}" if isinstance(request, BeamRequest) else request.request_id


def _goes_on(request: Request) -> bool:
    """Whether it is a beam on its way from one step to the next."""
    return isinstance(request, BeamRequest) and request.is_fork


def _row(row: StepRow, request: Request) -> SnapshotRow:
    shown = SnapshotRow(
        _name(request),
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
    if isinstance(request, BeamRequest) and request.is_fork:
        shown.num_prompt_tokens -= request.num_found_tokens
        shown.num_output_tokens += request.num_found_tokens
        shown.is_decode = row.num_tokens == 1
        shown.num_cached_tokens = 0
    return shown


def block_map(kv_cache: KVCacheManager) -> BlockMap:
    """Whose each block is: one request's, several requests', the prefix cache's, or free."""
    owners = list(kv_cache.requests_with_blocks)
    owner_of: list[int | None] = [None] * kv_cache.num_blocks
    for block in kv_cache.prefix_cache or ():
        owner_of[block.block_id] = CACHED
    for index, request_id in enumerate(owners):
        for block_id in kv_cache.block_table(request_id):
            owner_of[block_id] = index if owner_of[block_id] in (None, CACHED) else SHARED
    return BlockMap(owners, [BlockRun(owner, len(list(run))) for owner, run in itertools.groupby(owner_of)])
