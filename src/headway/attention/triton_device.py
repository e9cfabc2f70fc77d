"""What a device offers to Triton's kernels: multiprocessors, and shared memory to load ahead into.

Kernels are tuned on a device with 227 KiB of shared memory; on others (163 KiB, 99 KiB) they take fewer stages instead
of failing at their first launch.
"""

from __future__ import annotations

import functools

import torch

_RESERVE_BYTES = 4096  # for reductions and layout changes within a kernel
# What the interpreter, which has no device, is to believe in.
_UNLIMITED = 1 << 30
_PRETENDED_PROCESSORS = 4


def stages_that_fit(wanted: int, stage_bytes: int, device: torch.device, *, fixed_bytes: int = 0) -> int:
    """As many of `wanted` stages of `stage_bytes` as fit beside `fixed_bytes`; at least one."""
    room = _shared_memory_bytes(device) - fixed_bytes - _RESERVE_BYTES
    return max(1, min(wanted, room // stage_bytes))


@functools.cache
def num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _PRETENDED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _shared_memory_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return _UNLIMITED
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", _UNLIMITED))
