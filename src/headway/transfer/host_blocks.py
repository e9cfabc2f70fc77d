"""Copies whole KV blocks within the device, and between the device and slots, which are mostly in host memory.

In a slot a block is contiguous: the parts of all tensors of all layers, one after the other. For CUDA the slots are
pinned in place, because torch's own pinned memory comes in powers of two, up to twice the size needed. Where blocks
only arrive, from engines on other GPUs, the slots are on the device.

Each rank has a part of a block. Where blocks go to disk, the ranks share one memory: a slot has the parts of all ranks,
one after the other. Only whole blocks leave the engine, and only rank 0 transfers them.
"""

from __future__ import annotations

import itertools
import mmap
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from headway.core.kv.moves import BlockMoves
from headway.errors import OutOfMemoryError
from headway.kv.layer_cache import LayerKVCache

if TYPE_CHECKING:
    from headway.transfer.block_store import Slot
    from headway.transfer.staged_copies import StagedCopies

Pairs = Sequence[tuple[int, int]]

_NUM_MEASUREMENTS = 5
_NUM_MEASURED_BLOCKS = 8


@dataclass(frozen=True)
class SharedSlots:
    """The shared memory for the slots of all ranks, as one rank sees it."""

    descriptor: int
    """The descriptor of a file in memory. It may be closed once the slots are open."""
    part_bytes: tuple[int, ...]
    """The size of each rank's part of a block."""
    rank: int

    def open(self, num_slots: int) -> Tensor:
        """Map the slots as uint8 [num_slots, bytes of a whole block]. The first rank to open them sizes the file."""
        row_bytes = sum(self.part_bytes)
        os.ftruncate(self.descriptor, num_slots * row_bytes)
        memory = np.frombuffer(mmap.mmap(self.descriptor, num_slots * row_bytes), dtype=np.uint8)
        return torch.from_numpy(memory.reshape(num_slots, row_bytes))

    def own(self, slots: Tensor) -> Tensor:
        """This rank's part of every slot."""
        start = sum(self.part_bytes[: self.rank])
        return slots[:, start : start + self.part_bytes[self.rank]]


class HostBlocks:
    """Slots for blocks in host memory. On CUDA the copies overlap with steps; on the CPU they are made at once.
    `on_device`: the slots are in device memory. `shared`: the memory of all ranks, where this is one of several."""

    def __init__(
        self,
        kv_caches: Sequence[LayerKVCache],
        num_slots: int,
        *,
        on_device: bool = False,
        shared: SharedSlots | None = None,
    ) -> None:
        self._blocks = [_as_bytes(tensor) for cache in kv_caches for tensor in cache.tensors]
        own_bytes, device = sum(tensor.shape[1] for tensor in self._blocks), self._blocks[0].device
        self._staged: StagedCopies | None = None
        if on_device:
            self._whole = torch.zeros(num_slots, own_bytes, dtype=torch.uint8, device=device)
        elif shared is not None:
            self._whole = shared.open(num_slots)
        else:
            self._whole = _zero_bytes(num_slots, own_bytes)
        self._on_host = None if self._whole.is_cuda else self._whole.numpy()
        self._slots = self._whole if shared is None else shared.own(self._whole)
        assert self._slots.shape[1] == own_bytes, "a rank's part of a block has another size than was agreed"
        if device.type == "cuda":
            from headway.transfer.staged_copies import StagedCopies  # it takes Triton

            if not on_device:
                _pin(self._whole)
            self._staged = StagedCopies(self._blocks, self._slots)
            if not on_device:
                weakref.finalize(self, _unpin, self._whole, self._staged.wait).atexit = False

    def measure_restore(self) -> float:
        """Measure the shortest time in seconds to copy a block in. This writes into the first blocks, which must be
        empty."""
        num_blocks = min(_NUM_MEASURED_BLOCKS, len(self._slots), len(self._blocks[0]))
        pairs = [(place, place) for place in range(num_blocks)]
        times = []
        for _ in range(_NUM_MEASUREMENTS):
            started_s = time.perf_counter()
            self.move_in(pairs)
            if self._staged is not None:
                self._staged.wait()
            times.append(time.perf_counter() - started_s)
        for tensor in self._blocks:
            tensor[:num_blocks].zero_()
        return min(times) / num_blocks

    def move_out(self, pairs: Pairs) -> None:
        """Copy blocks to slots, as (block, slot), after the work queued on the device."""
        if self._staged is not None:
            self._staged.copy_out(pairs)
            return
        for block, slot in pairs:
            for tensor, part in zip(self._blocks, self._parts(slot), strict=True):
                part.copy_(tensor[block])

    def move_in(self, pairs: Pairs) -> None:
        """Copy slots to blocks, as (slot, block), before work queued on the device afterwards."""
        if self._staged is not None:
            self._staged.copy_in(pairs)
            return
        for slot, block in pairs:
            for tensor, part in zip(self._blocks, self._parts(slot), strict=True):
                tensor[block].copy_(part)

    @property
    def slot_bytes(self) -> int:
        """The size of a whole block, with the parts of all ranks."""
        return self._whole.shape[1]

    def bytes_of(self, slot: int) -> Slot:
        """The memory of a slot."""
        return self._whole[slot] if self._on_host is None else self._on_host[slot].data

    def settle(self, slots: Iterable[int]) -> None:
        """Wait until no copy in progress uses these slots."""
        if self._staged is not None:
            self._staged.settle(slots)

    def copy_out(self, blocks: Pairs, slots: Pairs, pieces: Tensor) -> Callable[[], None]:
        """Begin to copy blocks (block, row) and slots (slot, row), as they are now, to rows of `pieces`, after the work
        queued on the device. `pieces` is host memory, pinned if there is a device, or device memory. Returns a function
        that waits for the copies."""
        if self._staged is not None:
            return self._staged.copy_to(pieces, blocks, slots).synchronize
        rows, start = pieces.numpy(), 0
        for tensor in self._blocks:
            in_cache, end = tensor.numpy(), start + tensor.shape[1]
            for block, row in blocks:
                rows[row, start:end] = in_cache[block]
            start = end
        for slot, row in slots:
            pieces[row].copy_(self._slots[slot])
        return _nothing

    def _parts(self, slot: int) -> tuple[Tensor, ...]:
        return self._slots[slot].split([tensor.shape[1] for tensor in self._blocks])


def _nothing() -> None:
    """Wait for nothing: the copies are already made."""


def _as_bytes(tensor: Tensor) -> Tensor:
    """View a tensor's memory as uint8 [num_blocks, bytes]. Its blocks must be contiguous; the order of the other
    dimensions does not matter."""
    size, stride = tensor[0].numel() * tensor.element_size(), tensor.stride(0) * tensor.element_size()
    assert size == stride, "a block of the KV cache is not one piece"
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).view(torch.uint8).view(len(tensor), size)


def apply_moves(kv_caches: Sequence[LayerKVCache], host: HostBlocks | None, moves: BlockMoves) -> None:
    """Make all copies that a step needs beforehand, in order."""
    if moves.moved_out:
        assert host is not None
        host.move_out(moves.moved_out)
    if moves.copied:
        _copy(kv_caches, moves.copied)
    if moves.moved_in:
        assert host is not None
        host.move_in(moves.moved_in)


def _copy(kv_caches: Sequence[LayerKVCache], pairs: Pairs) -> None:
    indices = torch.tensor(pairs, dtype=torch.int64)
    device = kv_caches[0].v.device
    if device.type == "cuda":
        indices = indices.pin_memory().to(device, non_blocking=True)
    sources, targets = indices.unbind(1)
    for tensor in itertools.chain.from_iterable(cache.tensors for cache in kv_caches):
        tensor[targets] = tensor[sources]  # all sources are read before any target is written


def _zero_bytes(num_rows: int, num_bytes: int) -> Tensor:
    """Allocate uint8 [num_rows, num_bytes], which uses memory only where it is written or pinned. It is aligned to a
    page, because files are read faster into whole cache lines. Raises `OutOfMemoryError`."""
    try:
        memory = np.zeros(num_rows * num_bytes + mmap.PAGESIZE, dtype=np.uint8)
        start = -memory.ctypes.data % mmap.PAGESIZE
        return torch.from_numpy(memory[start : start + num_rows * num_bytes].reshape(num_rows, num_bytes))
    except MemoryError as error:
        raise OutOfMemoryError(f"{_too_much(num_rows * num_bytes)}: there is not so much.") from error


def _pin(memory: Tensor) -> None:
    """Pin this memory, so that the device can copy from and to it directly. Raises `OutOfMemoryError`."""
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(error) != 0:
        raise OutOfMemoryError(f"{_too_much(memory.numel())}: the system does not let so much be pinned ({error}).")


def _unpin(memory: Tensor, wait: Callable[[], None]) -> None:
    """Unpin this memory, after the copies in progress."""
    wait()
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _too_much(num_bytes: int) -> str:
    return f"Cannot have {num_bytes / 2**30:.1f} GiB of host memory for KV blocks (host_cache_memory)"
