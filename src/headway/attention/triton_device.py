"""What a device offers to Triton's kernels: multiprocessors, shared memory for prefetching, and launches that begin
early.

Kernels are tuned on a device with 227 KiB of shared memory; on others (163 KiB, 99 KiB) they use fewer stages instead
of failing at their first launch.

A dependent launch (compute capability 9.0) begins when all programs of the previous kernel have begun, instead of when
they have ended. `begin` lets the next kernel start; `await_previous` returns once everything launched before has ended.
In between, a program may only load weights: it must touch nothing that a kernel of the step writes. Every program must
call `await_previous` before it ends, or the kernel after the next could begin too early. With many rows kernels are
long, and waiting programs only take room from working ones.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_RESERVE_BYTES = 4096  # for reductions and layout changes within a kernel
# The limits assumed under the interpreter, which has no device.
_UNLIMITED = 1 << 30
_PRETENDED_PROCESSORS = 4
_PRETENDS_DEPENDENT_LAUNCHES = False
MAX_DEPENDENT_ROWS = 64
"""Steps with more rows gain nothing (H200, 0.6B model: 256 requests are 1.5% slower, prompts 2.5%)."""


@triton.jit
def begin(DEPENDENT: tl.constexpr) -> None:
    """The kernel behind this one may begin."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def await_previous(DEPENDENT: tl.constexpr) -> None:
    """Until the kernel before this one has ended."""
    if DEPENDENT:
        gdc_wait()


def dependent_launch(rows: torch.Tensor) -> dict[str, Any]:
    """The launch options of a kernel that supports dependent launches, for this many rows."""
    is_dependent = len(rows) <= MAX_DEPENDENT_ROWS and _has_dependent_launches(rows.device)
    return {"DEPENDENT": True, "launch_pdl": True} if is_dependent else {"DEPENDENT": False}


@functools.cache
def _has_dependent_launches(device: torch.device) -> bool:
    if device.type == "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return torch.cuda.get_device_capability(device) >= (9, 0)
    return _PRETENDS_DEPENDENT_LAUNCHES


def stages_that_fit(wanted: int, stage_bytes: int, device: torch.device, *, fixed_bytes: int = 0) -> int:
    """How many of `wanted` stages of `stage_bytes` fit in shared memory beside `fixed_bytes`; at least one."""
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
