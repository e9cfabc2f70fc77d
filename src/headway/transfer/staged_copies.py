"""Copies KV blocks to slots and back. Slots are in host memory, where steps do not wait for copies, or on the device.

The link to the host is some hundred times slower than the device's own memory, and a block that leaves is overwritten
by the very next step. Blocks therefore pass through a stage, a piece of device memory, and the slow half of the way is
outside the steps' stream:

    out     blocks ─ gathered by the step's stream ─► stage ─ copied beside the steps ─► slots in host memory
    in      slots  ─ copied beside the steps ─► stage ─ scattered by the step's stream ─► blocks

A step planned while another runs gets its blocks meanwhile. Several stages are used in turn, so that one is filled
while another is emptied. Each direction has a stream. They only synchronise on slots: the last copy that used a slot
comes before the next one. Copies within the device are made at once by the steps' stream.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_NUM_STAGES = 3
_STAGE_BYTES = 64 * 2**20
_WORDS_AT_A_TIME = 4096


class _Stage:
    """Device memory for some blocks, with the event after which it may be reused."""

    def __init__(self, num_blocks: int, bytes_per_block: int, device: torch.device) -> None:
        self.memory = torch.empty(num_blocks, bytes_per_block, dtype=torch.uint8, device=device)
        self.is_free = torch.cuda.Event()


class StagedCopies:
    """`blocks`: the cache's tensors as bytes [num_blocks, bytes each]; `slots`: [num_slots, bytes of all], pinned or on
    the device."""

    def __init__(self, blocks: Sequence[Tensor], slots: Tensor) -> None:
        self._device = blocks[0].device
        self._slots = slots
        self._layout = BlockLayout.of(blocks)
        self._way_out, self._way_in = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        bytes_per_block = slots.shape[1]
        self._blocks_per_stage = max(1, _STAGE_BYTES // bytes_per_block)
        stages = [_Stage(self._blocks_per_stage, bytes_per_block, self._device) for _ in range(_NUM_STAGES)]
        self._stages = itertools.cycle(stages)
        self._last_copies: dict[int, torch.cuda.Event] = {}  # by slot

    def copy_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to slots, as (block, slot). Work queued afterwards may overwrite the blocks."""
        steps = torch.cuda.current_stream(self._device)
        if self._slots.is_cuda:
            with self._copying(steps, [slot for _, slot in pairs]):
                self._move([(slot, block) for block, slot in pairs], self._slots, to_pieces=True)
            return
        for stage, slots, blocks in self._batches([slot for _, slot in pairs], [block for block, _ in pairs]):
            steps.wait_event(stage.is_free)
            move_blocks(stage.memory, None, blocks, self._layout, to_pieces=True)
            self._way_out.wait_stream(steps)
            with self._copying(self._way_out, slots):
                for place, slot in enumerate(slots):
                    self._slots[slot].copy_(stage.memory[place], non_blocking=True)
            stage.is_free.record(self._way_out)

    def copy_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy slots to blocks, as (slot, block). Work queued afterwards sees the copied blocks."""
        steps = torch.cuda.current_stream(self._device)
        if self._slots.is_cuda:
            with self._copying(steps, [slot for slot, _ in pairs]):
                self._move(pairs, self._slots, to_pieces=False)
            return
        for stage, slots, blocks in self._batches([slot for slot, _ in pairs], [block for _, block in pairs]):
            self._way_in.wait_event(stage.is_free)
            with self._copying(self._way_in, slots):
                for place, slot in enumerate(slots):
                    stage.memory[place].copy_(self._slots[slot], non_blocking=True)
            steps.wait_stream(self._way_in)
            move_blocks(stage.memory, None, blocks, self._layout, to_pieces=False)
            stage.is_free.record(steps)

    def copy_to(
        self, pieces: Tensor, blocks: Sequence[tuple[int, int]], slots: Sequence[tuple[int, int]]
    ) -> torch.cuda.Event:
        """Copy blocks (block, row) and slots (slot, row) to rows of `pieces`, while steps run. Work queued afterwards
        may overwrite the blocks. Returns the event after which the copies are complete."""
        steps = torch.cuda.current_stream(self._device)
        if pieces.is_cuda and blocks:
            self._move([(row, block) for block, row in blocks], pieces, to_pieces=True)
            self._way_out.wait_stream(steps)
            blocks = ()
        for stage, rows, sources in self._batches([row for _, row in blocks], [block for block, _ in blocks]):
            steps.wait_event(stage.is_free)
            move_blocks(stage.memory, None, sources, self._layout, to_pieces=True)
            self._way_out.wait_stream(steps)
            with torch.cuda.stream(self._way_out):
                for place, row in enumerate(rows):
                    pieces[row].copy_(stage.memory[place], non_blocking=True)
            stage.is_free.record(self._way_out)
        if slots:
            with self._copying(self._way_out, [slot for slot, _ in slots]):
                for slot, row in slots:
                    pieces[row].copy_(self._slots[slot], non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(self._way_out)
        return copied

    def _move(self, pairs: Sequence[tuple[int, int]], pieces: Tensor, *, to_pieces: bool) -> None:
        """Copies (row of `pieces`, block) within the device."""
        rows, blocks = self._on_device(pairs).unbind(1)
        move_blocks(pieces, rows.contiguous(), blocks.contiguous(), self._layout, to_pieces=to_pieces)

    def _on_device(self, numbers: Sequence[int] | Sequence[tuple[int, int]]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64).pin_memory().to(self._device, non_blocking=True)

    def wait(self) -> None:
        """Until all copies are made."""
        for stream in (torch.cuda.current_stream(self._device), self._way_out, self._way_in):
            stream.synchronize()

    def settle(self, slots: Iterable[int]) -> None:
        """Wait for the copies from and to these slots."""
        for event in {self._last_copies[slot] for slot in slots if slot in self._last_copies}:
            event.synchronize()

    @contextlib.contextmanager
    def _copying(self, stream: torch.cuda.Stream, slots: list[int]) -> Iterator[None]:
        """A context for copies from or to these slots in this stream, after earlier ones in any stream."""
        for event in {self._last_copies[slot] for slot in slots if slot in self._last_copies}:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            yield
        copied = torch.cuda.Event()
        copied.record(stream)
        self._last_copies.update(dict.fromkeys(slots, copied))

    def _batches(self, slots: list[int], blocks: list[int]) -> Iterator[tuple[_Stage, list[int], Tensor]]:
        """Yield batches of as many blocks as a stage holds: the stage, the slots, and the blocks as a device tensor."""
        on_device = self._on_device(blocks)
        for start in range(0, len(slots), self._blocks_per_stage):
            end = start + self._blocks_per_stage
            yield next(self._stages), slots[start:end], on_device[start:end]


@dataclass(frozen=True)
class BlockLayout:
    """The location of a block's parts in each tensor, in words of 4 bytes. All fields are int64 on the device."""

    addresses: Tensor
    """The address of each tensor."""
    num_words: Tensor
    """The words of a block in each tensor."""
    offsets: Tensor
    """The offset of each tensor's words within the contiguous block."""
    most_words: int

    @staticmethod
    def of(blocks: Sequence[Tensor]) -> BlockLayout:
        """`blocks`: uint8 [num_blocks, bytes] each. They must stay where they are."""
        device = blocks[0].device
        sizes = [tensor.shape[1] for tensor in blocks]
        assert all(size % 4 == 0 for size in sizes), "a block of the KV cache is not made of whole words"
        num_words = torch.tensor([size // 4 for size in sizes], dtype=torch.int64)
        addresses = torch.tensor([tensor.data_ptr() for tensor in blocks], dtype=torch.int64)
        return BlockLayout(
            addresses=addresses.to(device),
            num_words=num_words.to(device),
            offsets=(num_words.cumsum(0) - num_words).to(device),
            most_words=max(sizes) // 4,
        )

    def grid(self, num_blocks: int) -> tuple[int, int, int]:
        return num_blocks, len(self.addresses), triton.cdiv(self.most_words, _WORDS_AT_A_TIME)


@triton.jit
def _move_kernel(
    pieces, rows, blocks, addresses, num_words, offsets, piece_words, TO_PIECES: tl.constexpr, WORDS: tl.constexpr
):
    """Words of one tensor's part of one block. Program (which block, tensor, which words)."""
    place, tensor = tl.program_id(0), tl.program_id(1)
    count = tl.load(num_words + tensor)
    words = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    present = words < count
    tensor_start = tl.load(addresses + tensor).to(tl.pointer_type(tl.int32))
    in_cache = tensor_start + tl.load(blocks + place) * count + words
    row = place.to(tl.int64)
    if rows is not None:
        row = tl.load(rows + place)
    in_piece = pieces + row * piece_words + tl.load(offsets + tensor) + words
    if TO_PIECES:
        tl.store(in_piece, tl.load(in_cache, mask=present), mask=present)
    else:
        tl.store(in_cache, tl.load(in_piece, mask=present), mask=present)


def move_blocks(pieces: Tensor, rows: Tensor | None, blocks: Tensor, layout: BlockLayout, *, to_pieces: bool) -> None:
    """pieces[rows[i]] = block blocks[i], for all of `blocks`, or the other way; without `rows`, pieces[i]. `pieces`:
    uint8 [any, bytes of a block]; `rows` and `blocks`: int64."""
    words = pieces.view(torch.int32)
    _move_kernel[layout.grid(len(blocks))](
        words,
        rows,
        blocks,
        layout.addresses,
        layout.num_words,
        layout.offsets,
        words.stride(0),
        TO_PIECES=to_pieces,
        WORDS=_WORDS_AT_A_TIME,
    )
