"""What an attention backend is: the paged KV cache it reads, the step it is given, the two calls it answers.

One layer's cache is a pair of tensors cut into fixed-size blocks. Inside a block the keys are transposed, so that the
scores of one query against a block's tokens are read contiguously over tokens; the values are not, so that the weighted
sum is read contiguously over the head:

    k [num_blocks, num_kv_heads, head_dim, block_size]
    v [num_blocks, num_kv_heads, block_size, head_dim]

A token lives in slot = block_id * block_size + offset. The i-th token of request r is in block
block_table[r, i // block_size] at offset i % block_size. `Ops.rope_write_kv` fills the cache; backends only read it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

_PAGE_BYTES = 4096


@dataclass(frozen=True)
class LayerKVCache:
    """Keys and values of one layer, for all requests (layout above)."""

    k: Tensor
    v: Tensor

    @staticmethod
    def zeros(
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> LayerKVCache:
        """An empty cache of `num_blocks` blocks."""
        zeros = _untouched_zeros if torch.device(device).type == "cpu" else torch.zeros
        return LayerKVCache(
            k=zeros((num_blocks, num_kv_heads, head_dim, block_size), dtype=dtype, device=device),
            v=zeros((num_blocks, num_kv_heads, block_size, head_dim), dtype=dtype, device=device),
        )

    @property
    def num_blocks(self) -> int:
        return self.k.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def head_dim(self) -> int:
        return self.k.shape[2]

    @property
    def block_size(self) -> int:
        return self.k.shape[3]


def _untouched_zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros on the CPU that take memory only where they are written: the operating system's own zero pages."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + _PAGE_BYTES, dtype=np.uint8)  # torch.zeros would write every page
    start = -memory.ctypes.data % _PAGE_BYTES
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape).to(device)


@dataclass(frozen=True)
class AttentionBatch:
    """One step, flat and without padding. All tensors are on the model's device.

    The tokens of request r are rows query_start[r] .. query_start[r + 1] - 1 of the step; the last of them is at
    position seq_lens[r] - 1. Only the first ceil(seq_lens[r] / block_size) entries of block_table[r] mean anything.
    """

    num_tokens: int
    num_requests: int
    max_query_len: int
    max_seq_len: int
    query_start: Tensor
    """int32 [num_requests + 1]"""
    seq_lens: Tensor
    """int32 [num_requests]: tokens in the cache, this step's included."""
    block_table: Tensor
    """int32 [num_requests, >= blocks of the longest request]"""
    slot_mapping: Tensor
    """int64 [num_tokens]: where each of the step's tokens goes."""


class AttentionBackend(Protocol):
    """Causal attention over the paged cache. Implementations are constructed as `Backend(kv_caches, num_heads)`.

    `plan` is called once per step, before any `run` of that step; `batch` is the batch last planned. `run` for a layer
    is called after the step's keys and values of that layer have been written. The scale is 1 / sqrt(head_dim).
    """

    name: str
    kv_caches: Sequence[LayerKVCache]
    batch: AttentionBatch

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare for one step; may copy lengths to the host."""
        ...

    def run(self, layer: int, q: Tensor) -> Tensor:
        """q [num_tokens, num_heads, head_dim] -> [num_tokens, num_heads * head_dim], same dtype."""
        ...
