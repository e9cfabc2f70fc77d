"""Many step snapshots → one small frame for the page, a few times a second; and how long tokens took lately.

A frame has one column per step, and for each request that was in the batch a string with one letter per column:

    c  computed a chunk of its prompt          i  was running, but had no share in the step
    h  the same, after it had entered with     p  was preempted
       a part of it found in the cache         .  was not in the batch
    d  decoded one token                       a  decoded several: guesses were right
                                               r  decoded one, its guesses were wrong

Requests travel as numbers, given out in the order in which they are first seen: the page makes colours of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec

from headway.server.metrics.server_metrics import RecentTimes
from headway.wire import messages
from headway.wire.messages import BlockMap, SnapshotRow, StepSnapshot

MAX_COLUMNS = 40
"""Steps in a frame; of more only the last are drawn."""
MAX_CELLS = 1920
"""Of the block map. Larger caches show several blocks as one cell."""
CHUNK, HIT, DECODE, ACCEPTED, REJECTED, IDLE, PREEMPTED, ABSENT = "c", "h", "d", "a", "r", "i", "p", "."
FREE, CACHED, SHARED = -1, -2, -3
"""Owners of blocks that no request holds, the second of them kept by the prefix cache, and of those that several do."""
_HOLDERS = {messages.CACHED: CACHED, messages.SHARED: SHARED}


class FrameRow(msgspec.Struct, array_like=True):
    """One request, as it was after the frame's last step."""

    number: int
    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    num_blocks: int
    is_running: bool
    cells: str
    num_cached_tokens: int = 0
    """How many of its tokens were in the cache when it entered the batch."""


class FrameBlocks(msgspec.Struct):
    """The block map, run-length coded: owner, number of cells, owner, number of cells, ..."""

    runs: list[int]
    num_cells: int
    blocks_per_cell: int


class Column(msgspec.Struct, array_like=True):
    """One step."""

    num_decode_tokens: int
    num_chunk_tokens: int
    step_ms: float


class ReplicaLoad(msgspec.Struct):
    """How one of several replicas does."""

    ok: bool
    reason: str
    """Why it is not well."""
    num_running: int
    num_waiting: int
    generation_tokens: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    role: str | None = None
    """Prefill or decode, where these are apart."""


class Frame(msgspec.Struct):
    """One event of the live stream."""

    at_s: float
    columns: list[Column] = []
    num_skipped_columns: int = 0
    rows: list[FrameRow] = []
    waiting: list[tuple[int, int]] = []
    """Number and tokens of the first few in the queue."""
    blocks: FrameBlocks | None = None
    """None: as before."""
    numbers: dict[str, Any] = {}
    advice: dict[str, str] | None = None
    replica: int = 0
    """Which one all of this is about."""
    replicas: list[ReplicaLoad] = []
    """How all of them do, where there are several."""


@dataclass
class _Seen:
    """A request in the batch."""

    number: int
    row: SnapshotRow
    cells: list[str]
    num_cached_tokens: int = 0
    is_running: bool = True
    last_step: int = 0


class FrameBuilder:
    """Gathers snapshots until a frame is taken."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._next_number = 0
        self._seen: dict[str, _Seen] = {}
        self._columns: list[Column] = []
        self._waiting: list[tuple[int, int]] = []
        self._blocks: FrameBlocks | None = None
        self._owners: frozenset[str] = frozenset()  # of blocks in the last map
        self.last_blocks: FrameBlocks | None = None
        """The last map that a frame has told."""

    @property
    def has_news(self) -> bool:
        """Whether a step or a map was added since the last frame."""
        return bool(self._columns) or self._blocks is not None

    @property
    def running(self) -> set[str]:
        """Ids of the requests that are in the batch, as far as snapshots tell."""
        return {request_id for request_id, seen in self._seen.items() if seen.is_running}

    def add(self, snapshot: StepSnapshot) -> None:
        """Take in one step."""
        for row in snapshot.rows:
            self._take_row(row, snapshot.step_id)
        for request_id in snapshot.preempted:
            if (seen := self._seen.get(request_id)) is not None and seen.last_step != snapshot.step_id:
                seen.cells.append(PREEMPTED)
                seen.is_running = False
        self._drop_vanished(snapshot.num_running)
        self._close_column(snapshot)
        for request_id in snapshot.finished:
            if (seen := self._seen.get(request_id)) is not None:
                seen.is_running = False
        self._waiting = [(self._number(row.request_id), row.num_tokens) for row in snapshot.waiting]
        if snapshot.blocks is not None:
            self.add_blocks(snapshot.blocks)

    def add_blocks(self, block_map: BlockMap) -> None:
        """Take in a map of the blocks."""
        self._blocks = self._draw_blocks(block_map)
        self._owners = frozenset(block_map.owners)

    def became_idle(self) -> None:
        """Nothing runs or waits any more, also nothing that left without a snapshot telling so."""
        for seen in self._seen.values():
            seen.is_running = False
        self._waiting = []

    def take(self, at_s: float) -> Frame:
        """What was gathered; the next frame starts with an empty strip. Requests that left are told once."""
        drawn = self._columns[-MAX_COLUMNS:]
        frame = Frame(
            at_s=at_s,
            columns=drawn,
            num_skipped_columns=len(self._columns) - len(drawn),
            rows=[_frame_row(seen) for seen in self._seen.values()],
            waiting=self._waiting,
            blocks=self._blocks,
        )
        self._columns = []
        self.last_blocks, self._blocks = self._blocks or self.last_blocks, None
        self._seen = {request_id: seen for request_id, seen in self._seen.items() if seen.is_running}
        for seen in self._seen.values():
            seen.cells.clear()
        known = self._seen.keys() | self._owners
        waiting = {number for number, _ in self._waiting}
        self._numbers = {i: n for i, n in self._numbers.items() if i in known or n in waiting}
        return frame

    # ---- one step -----------------------------------------------------------------------------------------------

    def _number(self, request_id: str) -> int:
        number = self._numbers.get(request_id)
        if number is None:
            number = self._numbers[request_id] = self._next_number
            self._next_number += 1
        return number

    def _take_row(self, row: SnapshotRow, step_id: int) -> None:
        seen = self._seen.get(row.request_id)
        if seen is None:
            missed = [ABSENT] * len(self._columns)
            seen = self._seen[row.request_id] = _Seen(self._number(row.request_id), row, missed)
        if row.num_computed_tokens == row.num_cached_tokens:  # it has just entered
            seen.num_cached_tokens = row.num_cached_tokens
        seen.row = row
        seen.is_running = True
        seen.last_step = step_id
        seen.cells.append(_cell(row))

    def _drop_vanished(self, num_running: int) -> None:
        """Aborted requests leave without a snapshot that tells so: more are remembered than the step had."""
        running = [seen for seen in self._seen.values() if seen.is_running]
        if len(running) > num_running:
            running.sort(key=lambda seen: seen.last_step)
            for seen in running[: len(running) - num_running]:
                seen.is_running = False

    def _close_column(self, snapshot: StepSnapshot) -> None:
        num_decodes = sum(row.num_tokens for row in snapshot.rows if row.is_decode)
        num_chunked = sum(row.num_tokens for row in snapshot.rows if not row.is_decode)
        self._columns.append(Column(num_decodes, num_chunked, round(snapshot.step_s * 1000, 2)))
        for seen in self._seen.values():
            if len(seen.cells) < len(self._columns):
                seen.cells.append(IDLE if seen.is_running else ABSENT)

    def _draw_blocks(self, block_map: BlockMap) -> FrameBlocks:
        owners = [self._number(request_id) for request_id in block_map.owners]
        runs = [(_owner(run.owner, owners), run.num_blocks) for run in block_map.runs]
        num_blocks = sum(length for _, length in runs)
        blocks_per_cell = max(1, -(-num_blocks // MAX_CELLS))
        if blocks_per_cell > 1:
            runs = _coarsen(runs, blocks_per_cell)
        num_cells = sum(length for _, length in runs)
        return FrameBlocks([part for run in _merge(runs) for part in run], num_cells, blocks_per_cell)


def _cell(row: SnapshotRow) -> str:
    if row.num_cached_tokens:
        return HIT
    if not row.is_decode:
        return CHUNK
    return DECODE if not row.num_drafts else ACCEPTED if row.num_accepted else REJECTED


def _owner(index: int | None, owners: list[int]) -> int:
    if index is None:
        return FREE
    return _HOLDERS[index] if index < 0 else owners[index]


def _frame_row(seen: _Seen) -> FrameRow:
    row = seen.row
    return FrameRow(
        number=seen.number,
        request_id=row.request_id,
        num_prompt_tokens=row.num_prompt_tokens,
        num_computed_tokens=row.num_computed_tokens + row.num_tokens,
        num_output_tokens=row.num_output_tokens,
        num_blocks=row.num_blocks,
        is_running=seen.is_running,
        cells="".join(seen.cells[-MAX_COLUMNS:]),
        num_cached_tokens=seen.num_cached_tokens,
    )


def _coarsen(runs: list[tuple[int, int]], blocks_per_cell: int) -> list[tuple[int, int]]:
    """One cell for that many blocks, in the name of the owner of most of them. Used blocks count before cached ones,
    these before free ones."""
    cells = []
    inside: Counter[int] = Counter()
    room = blocks_per_cell
    for owner, length in runs:
        while length:
            part = min(room, length)
            inside[owner] += part
            room -= part
            length -= part
            if room == 0:
                cells.append((_foremost(inside), 1))
                inside.clear()
                room = blocks_per_cell
    if inside:
        cells.append((_foremost(inside), 1))
    return cells


def _foremost(inside: Counter[int]) -> int:
    return max(inside, key=lambda owner: (owner not in (FREE, CACHED), owner != FREE, inside[owner]))


def _merge(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for owner, length in runs:
        if merged and merged[-1][0] == owner:
            merged[-1] = (owner, merged[-1][1] + length)
        else:
            merged.append((owner, length))
    return merged


class TokenTimes:
    """Reads latencies from snapshots, on a clock made of step durations: requests that run have no time between steps.

    A request counts as arrived with the first snapshot that shows it. Snapshots show only the head of a queue, so with
    a long one the times to the first token come out too short.
    """

    def __init__(self, *, gaps: RecentTimes, first_tokens: RecentTimes | None) -> None:
        """What to fill; None: not wanted."""
        self._gaps = gaps
        self._first_tokens = first_tokens
        self._busy_s = 0.0
        self._arrived_s: dict[str, float] = {}
        self._last_token_s: dict[str, float] = {}
        self._preempted: set[str] = set()

    def add(self, snapshot: StepSnapshot) -> None:
        """Take in one step."""
        began_s = self._busy_s
        self._busy_s += snapshot.step_s
        shown = {row.request_id for row in snapshot.waiting} | {row.request_id for row in snapshot.rows}
        self._arrived_s = {i: s for i, s in self._arrived_s.items() if i in shown}
        for request_id in shown - self._last_token_s.keys():
            self._arrived_s.setdefault(request_id, began_s)
        self._preempted.update(snapshot.preempted)
        for row in snapshot.rows:
            self._preempted.discard(row.request_id)
            if samples_token(row):
                self._take_token(row)
        for request_id in snapshot.finished:
            self._last_token_s.pop(request_id, None)

    def forget_others(self, running: set[str]) -> None:
        """Drop requests that are gone without having finished. Those that were preempted will come back."""
        keep = running | self._preempted
        self._last_token_s = {i: s for i, s in self._last_token_s.items() if i in keep}

    def became_idle(self) -> None:
        """Nothing runs or waits any more, so nothing that was preempted will come back."""
        self._preempted.clear()

    def _take_token(self, row: SnapshotRow) -> None:
        last_s = self._last_token_s.get(row.request_id)
        arrived_s = self._arrived_s.pop(row.request_id, None)
        if last_s is not None:
            self._gaps.add(self._busy_s - last_s)
        elif self._first_tokens is not None and row.num_output_tokens == 0 and arrived_s is not None:
            self._first_tokens.add(self._busy_s - arrived_s)
        self._last_token_s[row.request_id] = self._busy_s


def samples_token(row: SnapshotRow) -> bool:
    """Whether the step computed all tokens that the request had, and so gave it another."""
    return row.num_computed_tokens + row.num_tokens >= row.num_prompt_tokens + row.num_output_tokens
