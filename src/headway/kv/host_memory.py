"""Host memory that a device copies from and to directly: it must be pinned, so that the system does not move it.

Torch's own pinned memory comes in powers of two, up to twice what was asked for. This is pinned in place.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from headway.errors import OutOfMemoryError


def zero_bytes(num_rows: int, num_bytes: int) -> Tensor:
    """uint8 [num_rows, num_bytes], which takes memory only where it is written or pinned."""
    try:
        return torch.from_numpy(np.zeros((num_rows, num_bytes), dtype=np.uint8))
    except MemoryError as error:
        raise OutOfMemoryError(f"{_too_much(num_rows * num_bytes)}: there is not so much.") from error


def pin(memory: Tensor) -> None:
    """Let the device copy from and to this memory by itself."""
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(error) != 0:
        raise OutOfMemoryError(f"{_too_much(memory.numel())}: the system does not let so much be pinned ({error}).")


def unpin(memory: Tensor, wait: Callable[[], None]) -> None:
    """Give it back to the system, after the copies that are under way."""
    wait()
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _too_much(num_bytes: int) -> str:
    return f"Cannot have {num_bytes / 2**30:.1f} GiB of host memory for KV blocks (host_cache_memory)"
