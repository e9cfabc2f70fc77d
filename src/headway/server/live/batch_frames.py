"""Combines step snapshots into small frames for the page, a few per second, and measures recent token latencies.

A frame has one column per step, and for each request that was in the batch a string with one letter per column:

    c  computed a prefill chunk                i  was running, but idle in this step
    h  computed a prefill chunk, after part    p  was preempted
       of its prompt was found in the cache    .  was not in the batch
    d  decoded one token                       a  decoded several tokens: drafts were accepted
                                               r  decoded one token: its drafts were rejected

Frames identify requests by numbers, in the order in which they are first seen. The page chooses colours by them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec

from headway.server.metrics.recent import RecentTimes
from headway.wire import messages
from headway.wire.messages import BlockMap, SnapshotRow, StepSnapshot

MAX_COLUMNS = 40
"""Most steps in a frame. If there are more, only the last ones are drawn."""
MAX_CELLS = 1920
"""Most cells of the block map. Larger caches show several blocks as one cell."""
CHUNK, HIT, DECODE, ACCEPTED, REJECTED, IDLE, PREEMPTED, ABSENT = "c", "h", "d", "a", "r", "i", "p", "."
FREE, CACHED, SHARED = -1, -2, -3
"""Special owners in the block map: free blocks, blocks that only the prefix cache keeps, and blocks that several
requests share."""
_HOLDERS = {messages.CACHED: CACHED, messages.SHARED: SHARED}


class FrameRow(msgspec.Struct, array_like=True):
    """The state of one request after the frame's last step."""

    number: int
    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    num_blocks: int
    is_running: bool
    cells: str
    num_cached_tokens: int = 0
    """How many of the request's tokens were in the prefix cache when it entered the batch."""


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
    """Health and load of one of several replicas."""

    ok: bool
    reason: str
    """Why the replica is not healthy."""
    num_running: int
    num_waiting: int
    generation_tokens: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    role: str | None = None
    """Prefill or decode, if these have separate replicas."""


class Frame(msgspec.Struct):
    """One event of the live stream."""

    at_s: float
    columns: list[Column] = []
    num_skipped_columns: int = 0
    rows: list[FrameRow] = []
    waiting: list[tuple[int, int]] = []
    """Number and token count of the first few queued requests."""
    blocks: FrameBlocks | None = None
    """The block map; None if it has not changed."""
    numbers: dict[str, Any] = {}
    advice: dict[str, str] | None = None
    replica: int = 0
    """The replica that this frame describes."""
    replicas: list[ReplicaLoad] = []
    """The state of all replicas, if there are several."""


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
    """Collects snapshots until the next frame is taken."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._next_number = 0
        self._seen: dict[str, _Seen] = {}
        self._columns: list[Column] = []
        self._waiting: list[tuple[int, int]] = []
        self._blocks: FrameBlocks | None = None
        self._owners: frozenset[str] = frozenset()  # the requests that own blocks in the last map
        self.last_blocks: FrameBlocks | None = None
        """The last block map that was part of a frame."""

    @property
    def has_news(self) -> bool:
        """Whether a step or a block map was added since the last frame."""
        return bool(self._columns) or self._blocks is not None

    @property
    def running(self) -> set[str]:
        """Ids of the requests that are in the batch according to the snapshots."""
        return {request_id for request_id, seen in self._seen.items() if seen.is_running}

    def add(self, snapshot: StepSnapshot) -> None:
        """Add one step."""
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
        """Add a block map."""
        self._blocks = self._draw_blocks(block_map)
        self._owners = frozenset(block_map.owners)

    def became_idle(self) -> None:
        """Mark all requests as gone, including those that no snapshot reported as finished."""
        for seen in self._seen.values():
            seen.is_running = False
        self._waiting = []

    def take(self, at_s: float) -> Frame:
        """Return a frame of what was collected, and start an empty one. Requests that left are in one last frame."""
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
        """Drop aborted requests, which no snapshot reports. They are noticed when more requests are remembered as
        running than the step had."""
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
    """Merge each group of `blocks_per_cell` blocks into a cell owned by the owner of most of them. Used blocks take
    precedence over cached blocks, and these over free blocks."""
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
    """Measures latencies from snapshots. Its clock is the sum of step durations; time between steps does not count.

    A request counts as arrived with the first snapshot that shows it. Snapshots show only the head of the queue, so
    measured times to first token are too short if the queue is long.
    """

    def __init__(self, *, gaps: RecentTimes, first_tokens: RecentTimes | None) -> None:
        """The measured times are added to `gaps` and, unless it is None, to `first_tokens`."""
        self._gaps = gaps
        self._first_tokens = first_tokens
        self._busy_s = 0.0
        self._arrived_s: dict[str, float] = {}
        self._last_token_s: dict[str, float] = {}
        self._preempted: set[str] = set()

    def add(self, snapshot: StepSnapshot) -> None:
        """Add one step."""
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
        """Forget requests that left without finishing. Preempted requests are kept, because they will come back."""
        keep = running | self._preempted
        self._last_token_s = {i: s for i, s in self._last_token_s.items() if i in keep}

    def became_idle(self) -> None:
        """Forget preempted requests: nothing runs or waits any more, so they will not come back."""
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
    """Whether the step computed all of the request's tokens, and therefore sampled another one."""
    return row.num_computed_tokens + row.num_tokens >= row.num_prompt_tokens + row.num_output_tokens
