"""The running batch on the device: permanent rows, so that a step sends only what changed.

A request gets a row when it enters and keeps it until it leaves. Its tokens and its block table live in that row, in
device memory; sampled tokens are written there by the sampler and are read from there by the next step, so the host
need not know them. A step sends one small array: which requests take part, how many tokens each has, the tiles of work
for attention, and the blocks that were added.

    counts    requests that take part · tiles
    columns   rows · query_start · seq_lens · sample_index · sample_rows · sample_positions · offsets of both
    lists     parts of contexts · (request, first token) for each tile · (row, place, block) for each new block
              · (row, place after its tokens, token) for each drafted token

The device knows first how many tokens a row has: a step that verifies drafts adds as many as were right, and the next
step may be staged before the host knows that number. The host then sends upper bounds, and `settle_kernel` replaces
them with the true lengths.

All but the last lists have fixed places, because CUDA graphs read them there. A graph is made for a number of tokens;
where a step has fewer, a request without a row is added at its end, and the padding is its tokens.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from headway.attention import DividesWork
from headway.attention.base import NO_REQUEST, NUM_PART_COLUMNS
from headway.core.proposers import MAX_MATCH, MIN_MATCH
from headway.runner.rows import StepRows
from headway.runner.sampler import Int32Array, Seat
from headway.settings import MAX_DRAFT_TOKENS

_COLUMNS = (
    "counts",
    "rows",
    "query_start",
    "seq_lens",
    "sample_index",
    "sample_rows",
    "sample_positions",
    "line_offsets",
    "sample_offsets",
)
_ALIGNMENT = 64  # columns start at multiples of 256 bytes
_TILE = 1024
_LOOKUP_TILE = 1024
_ENTRIES_TILE = 256
_MAX_READ_NUMBERS = 16384
_NO_PARTS: Int32Array = np.zeros((0, NUM_PART_COLUMNS), dtype=np.int32)
_NO_TILES: Int32Array = _NO_PARTS
# Host copies of a step's array. Two steps may be in flight, and a third is being written.
_NUM_STAGES = 3
# For each of these steps, the draft model may run one step per drafted token.
_DRAFT_STAGES = 2 * (MAX_DRAFT_TOKENS + 1)


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """A step whose inputs are on their way to the device."""

    rows: StepRows
    num_padded_tokens: int
    """The number of tokens the step runs with, padding included."""
    num_parts: int
    num_tiles: int


class DeviceRows:
    """Rows of tokens and block tables on `device`, and the columns of the step that was staged last."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_lines: int,
        max_model_len: int,
        block_size: int,
        max_num_tokens: int,
        device: torch.device,
        division: DividesWork | None,
        looks_up: bool = True,
        shared: DeviceRows | None = None,
    ) -> None:
        """`max_num_lines` is the most requests a step can have; a request whose drafts are divided counts once for each
        of its tokens. With `looks_up`, drafts that are not given are found by n-gram lookup; otherwise they are already
        in the rows. With `shared`, these rows are shared with the draft model, whose steps use columns of their own."""
        self.device = device
        self.block_size = block_size
        self.max_model_len = max_model_len
        table_width = -(-max_model_len // block_size)
        if shared is None:
            self.token_rows = torch.zeros(max_num_seqs, max_model_len, dtype=torch.int32, device=device)
            self.block_table = torch.zeros(max_num_seqs, table_width, dtype=torch.int32, device=device)
            self.lengths = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
            """How many tokens each row has."""
        else:
            self.token_rows, self.block_table, self.lengths = shared.token_rows, shared.block_table, shared.lengths
        self._looks_up = looks_up
        self.token_ids = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)
        self.positions = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)
        self.slots = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)

        # One more entry for the request that holds the padding, and one for the end of its tokens.
        self._column_size = -(-(max_num_lines + 2) // _ALIGNMENT) * _ALIGNMENT
        self._division = division
        self._parts_start = self._column_size * len(_COLUMNS)
        max_parts = 0 if division is None else division.max_parts(max_num_lines)
        self._tiles_start = self._parts_start + NUM_PART_COLUMNS * max_parts
        max_tiles = 0
        if division is not None:
            max_tiles = max(division.max_tiles(number, max_num_lines) for number in range(1, max_num_tokens + 1))
        self._blocks_start = self._tiles_start + NUM_PART_COLUMNS * max_tiles
        self._drafts_start = self._blocks_start + 3 * (max_num_tokens // block_size + 2 * max_num_lines)
        capacity = self._drafts_start + 3 * max_num_lines
        self._staged = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._stages = [_HostBuffer(capacity, device) for _ in range(_NUM_STAGES if shared is None else _DRAFT_STAGES)]
        self._next_stage = 0
        self._start = {name: place * self._column_size for place, name in enumerate(_COLUMNS)}
        self.columns = {name: self._staged[start : start + self._column_size] for name, start in self._start.items()}

    def seat(self, seats: Sequence[Seat], blocks: Int32Array) -> None:
        """Send the tokens of requests that enter, and the blocks they begin with: (row, place in its table, block)."""
        requests, rows = [seat.request for seat in seats], [seat.row for seat in seats]
        lengths = [len(request.prompt_token_ids) + len(request.output_token_ids) for request in requests]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        tokens = [part for r in requests for part in (r.prompt_token_ids, r.output_token_ids) if part]
        sent = _send(torch.from_numpy(np.concatenate([starts, rows, *tokens]).astype(np.int32)), self.device)
        tokens_sent, rows_sent = sent[len(starts) + len(rows) :], sent[len(starts) :]
        seat_kernel[(len(requests), -(-max(lengths) // _TILE))](
            self.token_rows, self.token_rows.stride(0), self.lengths, tokens_sent, sent, rows_sent, BLOCK=_TILE
        )
        if len(blocks):
            self._append_blocks(_send(torch.from_numpy(blocks), self.device), len(blocks))

    def stage(self, step: StepRows, blocks: Int32Array, *, num_padded_tokens: int) -> DeviceStep:
        """Send a step in one copy. It will run with `num_padded_tokens` tokens, padding included."""
        parts, tiles = _NO_PARTS, _NO_TILES
        num_single = step.num_single
        if self._division is not None:
            if num_single:
                alone = num_single == step.num_requests and step.line_offsets is None
                parts = self._division.context_parts(step.seq_lens[:num_single], step.rows[:num_single], alone=alone)
            if num_single < step.num_requests:
                tiles = self._division.query_tiles(
                    step.num_new, step.seq_lens, num_single, num_tokens=num_padded_tokens
                )
        buffer = self._stages[self._next_stage]
        self._next_stage = (self._next_stage + 1) % len(self._stages)
        end = self._write(buffer.array, step, parts, tiles, num_padded_tokens=num_padded_tokens)
        if len(blocks):
            end = _put(buffer.array, self._blocks_start, blocks.ravel())
        if step.drafts is not None:
            drafts = np.stack([step.drafts.rows, step.drafts.places, step.drafts.token_ids], axis=1)
            end = _put(buffer.array, self._drafts_start, drafts.ravel())
        self._copy(buffer.tensor, end)
        if len(blocks):
            self._append_blocks(self._staged[self._blocks_start :], len(blocks))
        if step.drafts is not None:
            self._put_drafts(len(drafts))
        if step.line_offsets is not None:
            self._settle(step, len(parts))
        return DeviceStep(step, num_padded_tokens, num_parts=len(parts), num_tiles=len(tiles))

    def _copy(self, staged: Tensor, size: int) -> None:
        """Copy from the host. A small array is read by a kernel, because starting a copy engine would take longer."""
        if size > _MAX_READ_NUMBERS:
            self._staged[:size].copy_(staged[:size], non_blocking=True)
        else:
            copy_kernel[(-(-size // _TILE),)](self._staged, staged, size, BLOCK=_TILE)

    def _put_drafts(self, num_drafts: int) -> None:
        """Write drafted tokens after the tokens of their rows, or draft them there."""
        draft_kernel[(num_drafts,)](
            self.token_rows, self.token_rows.stride(0), self.lengths, self._staged[self._drafts_start :], num_drafts,
            LOOKS_UP=self._looks_up, MOST_MATCHED=MAX_MATCH, LEAST_MATCHED=MIN_MATCH, MOST_DRAFTS=MAX_DRAFT_TOKENS,
            TILE=_LOOKUP_TILE,
            num_warps=4,
        )  # fmt: skip

    def _settle(self, step: StepRows, num_parts: int) -> None:
        """Put the true lengths into the staged step."""
        columns, num_lines, num_samples = self.columns, step.num_requests, len(step.sample_index)
        settle_kernel[(-(-max(num_lines, num_samples, num_parts) // _ENTRIES_TILE),)](
            self.lengths, columns["rows"], columns["seq_lens"], columns["line_offsets"], num_lines,
            columns["sample_rows"], columns["sample_positions"], columns["sample_offsets"], num_samples,
            self._staged[self._parts_start :], num_parts, PART_COLUMNS=NUM_PART_COLUMNS, BLOCK=_ENTRIES_TILE,
        )  # fmt: skip

    def stage_nothing(self) -> None:
        """Stage a step without requests: all of its tokens are padding."""
        self._staged.zero_()
        self._staged[self._parts_start : self._tiles_start] = NO_REQUEST
        self.token_ids.zero_()
        self.positions.zero_()
        self.slots.fill_(-1)

    def parts(self, num_parts: int) -> Tensor:
        """The parts of the step that was staged last, [num_parts, NUM_PART_COLUMNS]. Unused ones are NO_REQUEST."""
        return self._staged[self._parts_start : self._parts_start + NUM_PART_COLUMNS * num_parts].view(
            -1, NUM_PART_COLUMNS
        )

    def tiles(self, num_tiles: int) -> Tensor:
        """The tiles of the step that was staged last, [num_tiles, NUM_PART_COLUMNS]."""
        return self._staged[self._tiles_start : self._tiles_start + NUM_PART_COLUMNS * num_tiles].view(
            -1, NUM_PART_COLUMNS
        )

    def gather(self, num_requests: int, max_query_len: int) -> None:
        """Read ids, positions and slots of the staged step from the rows. Both arguments are upper limits."""
        block = next(size for size in (16, 256, _TILE) if size >= min(max_query_len, _TILE))
        columns = self.columns
        gather_kernel[(num_requests, -(-max_query_len // block))](
            self.token_ids, self.positions, self.slots, columns["counts"],
            self.token_rows, self.token_rows.stride(0), self.block_table, self.block_table.stride(0),
            columns["rows"], columns["query_start"], columns["seq_lens"], BLOCK_SIZE=self.block_size, BLOCK=block,
        )  # fmt: skip

    def _write(
        self, array: Int32Array, step: StepRows, parts: Int32Array, tiles: Int32Array, *, num_padded_tokens: int
    ) -> int:
        """Write counts, columns, parts and tiles into the step's array. Returns where they end."""
        start, num_requests = self._start, step.num_requests
        is_padded = num_padded_tokens > step.num_tokens
        _put(array, start["counts"], (num_requests + is_padded, len(tiles)))
        _put(array, start["rows"], step.rows)
        _put(array, start["query_start"], step.query_start)
        _put(array, start["seq_lens"], step.seq_lens)
        if is_padded:
            array[start["rows"] + num_requests] = 0
            array[start["query_start"] + num_requests + 1] = num_padded_tokens
            # In a step of single tokens every line of padding is looked at as if it were a request.
            array[start["seq_lens"] + num_requests : start["seq_lens"] + self._column_size] = 0
        end = _put(array, start["sample_index"], step.sample_index)
        array[end : start["sample_index"] + self._column_size] = 0  # a graph reads more of them than there are
        _put(array, start["sample_rows"], step.sample_rows)
        _put(array, start["sample_positions"], step.sample_positions)
        if step.line_offsets is not None and step.sample_offsets is not None:
            _put(array, start["line_offsets"], step.line_offsets)
            _put(array, start["sample_offsets"], step.sample_offsets)
        end = _put(array, self._parts_start, parts.ravel())
        array[end : self._tiles_start] = NO_REQUEST  # a graph has programs for more
        return _put(array, self._tiles_start, tiles.ravel())

    def _append_blocks(self, entries: Tensor, num_entries: int) -> None:
        """Add blocks to block tables. Entries (row, place in the table, block) are on the device."""
        put_kernel[(-(-num_entries // _ENTRIES_TILE),)](
            self.block_table, self.block_table.stride(0), entries, num_entries, BLOCK=_ENTRIES_TILE
        )


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, without waiting for it. The host tensor may be dropped at once."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _put(array: Int32Array, start: int, values: Sequence[int] | NDArray[np.integer]) -> int:
    """Write values from a place on; returns where they end."""
    end = start + len(values)
    array[start:end] = values
    return end


class _HostBuffer:
    """Memory that the device can copy from while the host goes on; the same memory as a tensor and as an array."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.tensor = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.array: Int32Array = self.tensor.numpy()


# -------------------------------------------------------------------------------------------------------------- kernels


@triton.jit(do_not_specialize=["row_stride"])
def seat_kernel(token_rows, row_stride, lengths, tokens, starts, rows, BLOCK: tl.constexpr):
    """Program (request, tile): tokens[starts[i] .. starts[i + 1] - 1] become the beginning of row rows[i]."""
    request = tl.program_id(0)
    start = tl.load(starts + request)
    length = tl.load(starts + request + 1) - start
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < length
    row_id = tl.load(rows + request)
    row = token_rows + row_id.to(tl.int64) * row_stride
    tl.store(row + offset, tl.load(tokens + start + offset, mask=mask), mask=mask)
    tl.store(lengths + row_id, length, mask=tl.program_id(1) == 0)


@triton.jit(do_not_specialize=["size"])
def copy_kernel(target, source, size, BLOCK: tl.constexpr):
    """target[:size] = source[:size]; the source may be page-locked memory of the host."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + place, tl.load(source + place, mask=place < size), mask=place < size)


@triton.jit(do_not_specialize=["num_entries", "table_stride"])
def put_kernel(table, table_stride, entries, num_entries, BLOCK: tl.constexpr):
    """table[row, place] = value for each of the entries (row, place, value)."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < num_entries
    row = tl.load(entries + 3 * entry, mask=mask).to(tl.int64)
    place = tl.load(entries + 3 * entry + 1, mask=mask)
    value = tl.load(entries + 3 * entry + 2, mask=mask)
    tl.store(table + row * table_stride + place, value, mask=mask)


@triton.jit(do_not_specialize=["row_stride", "num_drafts"], do_not_specialize_on_alignment=["drafts"])
def draft_kernel(
    token_rows, row_stride, lengths, drafts, num_drafts, LOOKS_UP: tl.constexpr,
    MOST_MATCHED: tl.constexpr, LEAST_MATCHED: tl.constexpr, MOST_DRAFTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (drafted token): where it is given, it is written; where it is -1 and the first of its row, those of the
    row are looked up, as `NgramProposer` does: what followed the longest end of the row's tokens where it has been
    before, for the last time. Without such a place the row's last token is repeated. Without LOOKS_UP they stand there
    already."""
    draft = tl.program_id(0)
    row_id = tl.load(drafts + 3 * draft)
    place = tl.load(drafts + 3 * draft + 1)
    token = tl.load(drafts + 3 * draft + 2)
    row = token_rows + row_id.to(tl.int64) * row_stride
    length = tl.load(lengths + row_id)
    if token >= 0:
        tl.store(row + length + place, token)
        return
    if place > 0 or not LOOKS_UP:
        return
    lanes = tl.arange(0, TILE)
    best = tl.zeros([TILE], tl.int64)
    for first in range(0, length - 1, TILE):
        ends = first + lanes  # a place where the end of the row may have been
        matched = tl.zeros([TILE], tl.int32)
        goes_on = ends < length - 1
        for back in range(MOST_MATCHED):
            own = tl.load(row + length - 1 - back, mask=back < length, other=-1)
            there = tl.load(row + ends - back, mask=goes_on & (ends >= back), other=-2)
            goes_on = goes_on & (there == own)
            matched += goes_on.to(tl.int32)
        score = tl.where(matched >= LEAST_MATCHED, matched.to(tl.int64) * 4294967296 + ends + 1, 0)
        best = tl.maximum(best, score)
    found = tl.max(best, 0)
    start = tl.where(found > 0, (found & 4294967295).to(tl.int32), length - 1)
    places = tl.arange(0, MOST_DRAFTS)
    entries = drafts + 3 * (draft + places)
    ours = (draft + places < num_drafts) & (tl.load(entries, mask=draft + places < num_drafts, other=-1) == row_id)
    tokens = tl.load(row + start + places % (length - start), mask=ours, other=0)
    tl.store(row + length + places, tokens, mask=ours)


@triton.jit(do_not_specialize=["num_lines", "num_samples", "num_parts"], do_not_specialize_on_alignment=["parts"])
def settle_kernel(
    lengths, rows, seq_lens, line_offsets, num_lines, sample_rows, sample_positions, sample_offsets, num_samples,
    parts, num_parts, PART_COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Lengths, places and parts of contexts that the host knows a limit of only; an offset of -1 marks the others."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = parts + entry * PART_COLUMNS
    in_parts = entry < num_parts
    line = tl.load(part, mask=in_parts, other=0)
    offset = tl.load(line_offsets + line, mask=in_parts, other=-1)
    seq_len = tl.load(lengths + tl.load(rows + line, mask=in_parts, other=0), mask=in_parts, other=0) + offset
    changes = in_parts & (offset >= 0)
    end = tl.load(part + 3, mask=changes, other=0)
    tl.store(part + 3, tl.minimum(end, seq_len), mask=changes)
    tl.store(part + 4, seq_len, mask=changes)

    in_lines = entry < num_lines
    offset = tl.load(line_offsets + entry, mask=in_lines, other=-1)
    length = tl.load(lengths + tl.load(rows + entry, mask=in_lines, other=0), mask=in_lines, other=0)
    tl.store(seq_lens + entry, length + offset, mask=in_lines & (offset >= 0))

    in_samples = entry < num_samples
    offset = tl.load(sample_offsets + entry, mask=in_samples, other=-1)
    length = tl.load(lengths + tl.load(sample_rows + entry, mask=in_samples, other=0), mask=in_samples, other=0)
    tl.store(sample_positions + entry, length + offset, mask=in_samples & (offset >= 0))


@triton.jit(do_not_specialize=["row_stride", "table_stride"], do_not_specialize_on_alignment=["num_requests"])
def gather_kernel(
    token_ids, positions, slots, num_requests, token_rows, row_stride, block_table, table_stride,
    rows, query_start, seq_lens, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (request, tile): ids, positions and slots of the request's new tokens. A length of 0 marks padding.

    `num_requests` is read from device memory: a captured step has programs for more.
    """
    request = tl.program_id(0)
    if request >= tl.load(num_requests):
        return
    start = tl.load(query_start + request)
    num_new = tl.load(query_start + request + 1) - start
    seq_len = tl.load(seq_lens + request)
    row = tl.load(rows + request).to(tl.int64)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < num_new
    real = offset < tl.minimum(num_new, seq_len)
    position = seq_len - num_new + offset
    token = tl.load(token_rows + row * row_stride + position, mask=real, other=0)
    block = tl.load(block_table + row * table_stride + position // BLOCK_SIZE, mask=real, other=0).to(tl.int64)
    slot = block * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(token_ids + start + offset, token, mask=mask)
    tl.store(positions + start + offset, tl.where(real, position, 0), mask=mask)
    tl.store(slots + start + offset, tl.where(real, slot, -1), mask=mask)
