"""The running batch on the device: permanent rows, so that a step sends only what changed.

A request gets a row when it enters and keeps it until it leaves. Its tokens and its block table live in that row, in
device memory; sampled tokens are written there by the sampler and are read from there by the next step, so the host
need not know them. What a step sends is one small array: who takes part and how far each is, the tiles of work for
attention, and the blocks that were added.

    counts    requests that take part · tiles
    columns   rows · query_start · seq_lens · sample_index · sample_rows · sample_positions
    lists     parts of contexts · (request, first token) for each tile · (row, place, block) for each new block

All but the last have fixed places, because CUDA graphs read them there. A graph is made for a number of tokens; where a
step has fewer, a request without a row is added at its end, and the padding is its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.attention import DividesWork
from headway.attention.context_parts import NO_REQUEST, NUM_COLUMNS
from headway.core.scheduler_output import NewRequest, SchedulerOutput
from headway.runner.row_kernels import append_blocks_kernel, gather_kernel, seat_kernel

_COLUMNS = ("counts", "rows", "query_start", "seq_lens", "sample_index", "sample_rows", "sample_positions")
_ALIGNMENT = 64  # columns start at multiples of 256 bytes
_TILE = 1024
_ENTRIES_TILE = 256
_NO_PARTS: NDArray[np.int32] = np.zeros((0, NUM_COLUMNS), dtype=np.int32)
_NO_TILES: NDArray[np.int32] = np.zeros((0, 2), dtype=np.int32)
# Host copies of a step's array. Two steps may be in flight, and a third is being written.
_NUM_STAGES = 3


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A step whose inputs are on their way to the device. Requests with a single new token come first."""

    request_ids: list[str]
    num_requests: int
    num_single: int
    num_tokens: int
    num_parts: int
    num_tiles: int
    max_query_len: int
    max_seq_len: int
    query_start: NDArray[np.int64]
    """Where each request's tokens begin, on the host."""
    seq_lens: NDArray[np.int64]
    sampled: list[int]
    """Places in `request_ids` of those that sample, in the order of the sample columns."""
    sample_rows: NDArray[np.int64]

    @property
    def is_decode(self) -> bool:
        """Whether every request has a single new token."""
        return self.num_single == self.num_requests

    @property
    def all_sample_in_order(self) -> bool:
        """Whether line i of the step's hidden states is what the i-th sampled request needs."""
        return len(self.sampled) == self.num_requests == self.num_tokens


class GpuRows:
    """Rows of tokens and block tables on `device`, and the columns of the step that was staged last."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        max_num_tokens: int,
        device: torch.device,
        division: DividesWork | None,
    ) -> None:
        self.row_of: dict[str, int] = {}
        self.device = device
        self.block_size = block_size
        self.max_model_len = max_model_len
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        table_width = -(-max_model_len // block_size)
        self.token_rows = torch.zeros(max_num_seqs, max_model_len, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(max_num_seqs, table_width, dtype=torch.int32, device=device)
        self.token_ids = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)
        self.positions = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)
        self.slots = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)

        # One more for the request that has the padding, and one more for the end of its tokens.
        self._column_size = -(-(max_num_seqs + 2) // _ALIGNMENT) * _ALIGNMENT
        self._division = division
        self._parts_start = self._column_size * len(_COLUMNS)
        max_parts = 0 if division is None else division.max_parts(max_num_seqs)
        self._tiles_start = self._parts_start + NUM_COLUMNS * max_parts
        # A tile has at least one token, one may be partly empty for each request; blocks are added with tokens.
        self._blocks_start = self._tiles_start + 2 * (max_num_tokens + max_num_seqs)
        capacity = self._blocks_start + 3 * (max_num_tokens // block_size + 2 * max_num_seqs)
        self._staged = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._stages = [_HostBuffer(capacity, device) for _ in range(_NUM_STAGES)]
        self._next_stage = 0
        self._start = {name: place * self._column_size for place, name in enumerate(_COLUMNS)}
        self.columns = {name: self._staged[start : start + self._column_size] for name, start in self._start.items()}

    # ---- who is in the batch --------------------------------------------------------------------------------------

    def add(self, requests: Sequence[NewRequest]) -> list[int]:
        """Seat requests: send all their tokens, and the blocks they begin with. Returns their rows. If anything is
        wrong with one of them, all rows stay free."""
        if len(requests) > len(self._free_rows):
            raise ValueError(f"{len(requests)} requests for {len(self._free_rows)} free rows")
        rows = self._free_rows[: -len(requests) - 1 : -1]
        lengths = [len(request.prompt_token_ids) + len(request.output_token_ids) for request in requests]
        if max(lengths) > self.max_model_len or max(len(r.block_ids) for r in requests) > self.block_table.shape[1]:
            raise ValueError(f"a request of {max(lengths)} tokens does not fit into a row of {self.max_model_len}")
        starts = np.concatenate([[0], np.cumsum(lengths)])
        tokens = [part for r in requests for part in (r.prompt_token_ids, r.output_token_ids) if part]
        sent = send(torch.from_numpy(np.concatenate([starts, rows, *tokens]).astype(np.int32)), self.device)
        seat_kernel[(len(requests), -(-max(lengths) // _TILE))](
            self.token_rows,
            self.token_rows.stride(0),
            sent[len(starts) + len(rows) :],
            sent,
            sent[len(starts) :],
            BLOCK=_TILE,
        )
        entries = [
            (row, place, block)
            for row, request in zip(rows, requests, strict=True)
            for place, block in enumerate(request.block_ids)
        ]
        if entries:
            sent = send(torch.tensor(entries, dtype=torch.int32), self.device)
            self._append_blocks(sent, len(entries))
        del self._free_rows[-len(requests) :]
        self.row_of.update((request.request_id, row) for request, row in zip(requests, rows, strict=True))
        self._num_blocks[rows] = [len(request.block_ids) for request in requests]
        return rows

    def remove(self, request_id: str) -> int | None:
        """Free a request's row and return it; `None` if it has none."""
        row = self.row_of.pop(request_id, None)
        if row is not None:
            self._free_rows.append(row)
        return row

    # ---- a step ---------------------------------------------------------------------------------------------------

    def stage(self, output: SchedulerOutput, *, padded: Callable[[int, bool], int]) -> StagedStep:
        """Send a step. `padded(num_tokens, is_decode)`: the number of tokens that the step is going to run with."""
        row_of = self.row_of
        table = np.array(
            [(row_of[s.request_id], s.num_tokens, s.num_computed_tokens, s.samples) for s in output.scheduled],
            dtype=np.int64,
        )
        order = np.argsort(table[:, 1] > 1, kind="stable")  # single tokens first
        rows, num_new, num_computed, samples = table[order].T
        num_single = int((num_new == 1).sum())
        query_start = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(num_new, out=query_start[1:])
        seq_lens = num_computed + num_new
        sampled = np.flatnonzero(samples)
        parts, tiles = _NO_PARTS, _NO_TILES
        if self._division is not None:
            if num_single:
                parts = self._division.context_parts(seq_lens[:num_single], rows[:num_single])
            if num_single < len(rows):
                tiles = self._division.query_tiles(num_new, num_single)
        step = StagedStep(
            request_ids=[output.scheduled[place].request_id for place in order.tolist()],
            num_requests=len(rows),
            num_single=num_single,
            num_tokens=int(query_start[-1]),
            num_parts=len(parts),
            num_tiles=len(tiles),
            max_query_len=int(num_new.max()),
            max_seq_len=int(seq_lens.max()),
            query_start=query_start,
            seq_lens=seq_lens,
            sampled=sampled.tolist(),
            sample_rows=rows[sampled],
        )
        buffer = self._stages[self._next_stage]
        self._next_stage = (self._next_stage + 1) % _NUM_STAGES
        num_padded_tokens = padded(step.num_tokens, step.is_decode)
        end = self._write(buffer.array, step, rows, parts, tiles, num_padded_tokens=num_padded_tokens)
        blocks = self._new_blocks(output)
        if len(blocks):
            end = _put(buffer.array, self._blocks_start, blocks.ravel())
        self._staged[:end].copy_(buffer.tensor[:end], non_blocking=True)
        if len(blocks):
            self._append_blocks(self._staged[self._blocks_start :], len(blocks))
        return step

    def stage_nothing(self) -> None:
        """A step without requests: whatever size it runs with, all of it is padding."""
        self._staged.zero_()
        self._staged[self._parts_start : self._tiles_start] = NO_REQUEST
        self.token_ids.zero_()
        self.positions.zero_()
        self.slots.fill_(-1)

    def parts(self, num_parts: int) -> Tensor:
        """[num_parts, NUM_COLUMNS], of the step that was staged last; behind its own there is NO_REQUEST."""
        return self._staged[self._parts_start : self._parts_start + NUM_COLUMNS * num_parts].view(-1, NUM_COLUMNS)

    def tiles(self, num_tiles: int) -> Tensor:
        """[num_tiles, 2], of the step that was staged last."""
        return self._staged[self._tiles_start : self._tiles_start + 2 * num_tiles].view(-1, 2)

    def gather(self, num_requests: int, max_query_len: int) -> None:
        """Read ids, positions and slots of the staged step from the rows. Both numbers are limits."""
        block = next(size for size in (16, 256, _TILE) if size >= min(max_query_len, _TILE))
        gather_kernel[(num_requests, -(-max_query_len // block))](
            self.token_ids,
            self.positions,
            self.slots,
            self.columns["counts"],
            self.token_rows,
            self.token_rows.stride(0),
            self.block_table,
            self.block_table.stride(0),
            self.columns["rows"],
            self.columns["query_start"],
            self.columns["seq_lens"],
            BLOCK_SIZE=self.block_size,
            BLOCK=block,
        )

    def _write(
        self,
        array: NDArray[np.int32],
        step: StagedStep,
        rows: NDArray[np.int64],
        parts: NDArray[np.int32],
        tiles: NDArray[np.int32],
        *,
        num_padded_tokens: int,
    ) -> int:
        """Counts, columns, parts and tiles; returns where they end."""
        start, num_requests = self._start, step.num_requests
        is_padded = num_padded_tokens > step.num_tokens
        _put(array, start["counts"], (num_requests + is_padded, step.num_tiles))
        _put(array, start["rows"], rows)
        _put(array, start["query_start"], step.query_start)
        _put(array, start["seq_lens"], step.seq_lens)
        if is_padded:
            array[start["rows"] + num_requests] = 0
            array[start["query_start"] + num_requests + 1] = num_padded_tokens
            # In a step of single tokens every line of padding is looked at as if it were a request.
            array[start["seq_lens"] + num_requests : start["seq_lens"] + self._column_size] = 0
        end = _put(array, start["sample_index"], step.query_start[1:][step.sampled] - 1)
        array[end : start["sample_index"] + self._column_size] = 0  # a graph reads more of them than there are
        _put(array, start["sample_rows"], step.sample_rows)
        _put(array, start["sample_positions"], step.seq_lens[step.sampled])
        end = _put(array, self._parts_start, parts.ravel())
        array[end : self._tiles_start] = NO_REQUEST  # a graph has programs for more
        return _put(array, self._tiles_start, tiles.ravel())

    def _append_blocks(self, entries: Tensor, num_entries: int) -> None:
        """Entries (row, place in the table, block), on the device."""
        append_blocks_kernel[(-(-num_entries // _ENTRIES_TILE),)](
            self.block_table, self.block_table.stride(0), entries, num_entries, BLOCK=_ENTRIES_TILE
        )

    def _new_blocks(self, output: SchedulerOutput) -> NDArray[np.int32]:
        """[n, 3]: (row, place in the table, block)."""
        entries: list[tuple[int, int, int]] = []
        for scheduled in output.scheduled:
            if scheduled.new_block_ids:
                row = self.row_of[scheduled.request_id]
                place = int(self._num_blocks[row])
                entries += [(row, place + i, block) for i, block in enumerate(scheduled.new_block_ids)]
                self._num_blocks[row] = place + len(scheduled.new_block_ids)
        return np.array(entries, dtype=np.int32).reshape(-1, 3)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, without waiting for it. The host tensor may be dropped at once."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _put(array: NDArray[np.int32], start: int, values: Sequence[int] | NDArray[np.integer]) -> int:
    """Write values from a place on; returns where they end."""
    end = start + len(values)
    array[start:end] = values
    return end


class _HostBuffer:
    """Memory that the device can copy from while the host goes on; the same memory as a tensor and as an array."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.tensor = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.array: NDArray[np.int32] = self.tensor.numpy()
