"""Copies of whole KV blocks: within the device, and between the device and host memory."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from headway.attention import LayerKVCache
from headway.core.scheduler_output import BlockMoves

_NUM_MEASUREMENTS = 5


class HostBlocks:
    """Room for blocks in host memory: for each tensor of each layer one with as many blocks as there are slots."""

    def __init__(self, kv_caches: Sequence[LayerKVCache], num_slots: int) -> None:
        pinned = kv_caches[0].v.device.type == "cuda"
        self._slots = [
            torch.zeros((num_slots, *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=pinned)
            for cache in kv_caches
            for tensor in cache.tensors
        ]
        self._blocks = [tensor for cache in kv_caches for tensor in cache.tensors]

    @staticmethod
    def bytes_per_slot(kv_caches: Sequence[LayerKVCache]) -> int:
        """Host memory that one block takes."""
        return sum(tensor[0].numel() * tensor.element_size() for cache in kv_caches for tensor in cache.tensors)

    def measure_restore(self) -> float:
        """Seconds that copying a block in takes, at best. Writes into the first block, which is empty still."""
        device = self._blocks[0].device
        times = []
        for _ in range(_NUM_MEASUREMENTS):
            started_s = time.perf_counter()
            self.move_in([(0, 0)])
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - started_s)
        for tensor in self._blocks:
            tensor[0].zero_()
        return min(times)

    def move_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (block, slot) to the host, behind what is queued on the device."""
        for host, device in zip(self._slots, self._blocks, strict=True):
            for block, slot in pairs:
                host[slot].copy_(device[block], non_blocking=True)

    def move_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (slot, block) to the device, behind what is queued there."""
        for host, device in zip(self._slots, self._blocks, strict=True):
            for slot, block in pairs:
                device[block].copy_(host[slot], non_blocking=True)


def apply_moves(kv_caches: Sequence[LayerKVCache], host: HostBlocks | None, moves: BlockMoves) -> None:
    """Everything that has to be copied before a step, in its order."""
    if moves.moved_out:
        assert host is not None
        host.move_out(moves.moved_out)
    if moves.copied:
        _copy(kv_caches, moves.copied)
    if moves.moved_in:
        assert host is not None
        host.move_in(moves.moved_in)


def _copy(kv_caches: Sequence[LayerKVCache], pairs: Sequence[tuple[int, int]]) -> None:
    indices = torch.tensor(pairs, dtype=torch.int64)
    device = kv_caches[0].v.device
    if device.type == "cuda":
        indices = indices.pin_memory().to(device, non_blocking=True)
    sources, targets = indices.unbind(1)
    for cache in kv_caches:
        for tensor in cache.tensors:
            _copy_blocks(tensor, sources, targets)


def _copy_blocks(tensor: Tensor, sources: Tensor, targets: Tensor) -> None:
    """All sources are read before any target is written."""
    tensor[targets] = tensor[sources]
