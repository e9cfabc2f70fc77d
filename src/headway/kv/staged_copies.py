"""Copies of KV blocks to host memory and back that the steps do not wait for.

The link to the host is some hundred times slower than the device's own memory, and a block that leaves is written again
by the very next step. So blocks go over a stage, a piece of device memory, and the slow half of the way is not in the
steps' stream:

    out     blocks ─ gathered by the step's stream ─► stage ─ copied beside the steps ─► slots in host memory
    in      slots  ─ copied beside the steps ─► stage ─ scattered by the step's stream ─► blocks

A step that is planned while another runs gets its blocks meanwhile. There are several stages, used in turns, so that
one is filled while another is emptied. Each way has a stream; they meet only over slots, where the last copy that had
to do with a slot comes before the next one.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from headway.kv.block_kernels import BlockLayout, gather_blocks, scatter_blocks

_NUM_STAGES = 3
_STAGE_BYTES = 64 * 2**20


class _Stage:
    """Device memory for some blocks, and the event after which it may be used again."""

    def __init__(self, num_blocks: int, bytes_per_block: int, device: torch.device) -> None:
        self.memory = torch.empty(num_blocks, bytes_per_block, dtype=torch.uint8, device=device)
        self.is_free = torch.cuda.Event()


class StagedCopies:
    """`blocks`: the cache's tensors as bytes [num_blocks, bytes each]; `slots`: pinned [num_slots, bytes of all]."""

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
        """Copy blocks (block, slot); the blocks may be written by what is queued from now on."""
        steps = torch.cuda.current_stream(self._device)
        for stage, slots, blocks in self._batches([slot for _, slot in pairs], [block for block, _ in pairs]):
            steps.wait_event(stage.is_free)
            gather_blocks(stage.memory, blocks, self._layout)
            self._way_out.wait_stream(steps)
            with self._copying(self._way_out, slots):
                for place, slot in enumerate(slots):
                    self._slots[slot].copy_(stage.memory[place], non_blocking=True)
            stage.is_free.record(self._way_out)

    def copy_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (slot, block); they are there for what is queued from now on."""
        steps = torch.cuda.current_stream(self._device)
        for stage, slots, blocks in self._batches([slot for slot, _ in pairs], [block for _, block in pairs]):
            self._way_in.wait_event(stage.is_free)
            with self._copying(self._way_in, slots):
                for place, slot in enumerate(slots):
                    stage.memory[place].copy_(self._slots[slot], non_blocking=True)
            steps.wait_stream(self._way_in)
            scatter_blocks(stage.memory, blocks, self._layout)
            stage.is_free.record(steps)

    def wait(self) -> None:
        """Until all copies are made."""
        for stream in (torch.cuda.current_stream(self._device), self._way_out, self._way_in):
            stream.synchronize()

    @contextlib.contextmanager
    def _copying(self, stream: torch.cuda.Stream, slots: list[int]) -> Iterator[None]:
        """Copies from or to these slots, in this stream, after the last ones in any."""
        for event in {self._last_copies[slot] for slot in slots if slot in self._last_copies}:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            yield
        copied = torch.cuda.Event()
        copied.record(stream)
        self._last_copies.update(dict.fromkeys(slots, copied))

    def _batches(self, slots: list[int], blocks: list[int]) -> Iterator[tuple[_Stage, list[int], Tensor]]:
        """As many at a time as a stage holds: the stage, the slots, and the blocks on the device."""
        on_device = torch.tensor(blocks, dtype=torch.int64).pin_memory().to(self._device, non_blocking=True)
        for start in range(0, len(slots), self._blocks_per_stage):
            end = start + self._blocks_per_stage
            yield next(self._stages), slots[start:end], on_device[start:end]
