"""What an attention backend is: the paged KV cache it reads, the step it is given, the two calls it answers.

One layer's cache is a pair of tensors cut into fixed-size blocks:

    k [num_blocks, num_kv_heads, head_dim, block_size]
    v [num_blocks, num_kv_heads, block_size, head_dim]

That is how they are indexed, everywhere. The keys are stored in one of two ways. On the CPU as written: the scores of
one query against a block's tokens are read contiguously over tokens. On CUDA token by token (`token_major`), like the
values, as a transposed view: a token's key is contiguous, which a matrix unit reads and a thread block writes in whole
lines. Code that goes by indices or strides need not know.

A quantised cache (`kv_format`) holds codes in k and v, where v may have two dimensions in one element, and beside them

    scales [num_blocks, num_kv_heads, block_size, 2]    of the key and of the value, float16

A token lives in slot = block_id * block_size + offset. The i-th token of request r is in block
block_table[r, i // block_size] at offset i % block_size. `Ops.rope_write_kv` fills the cache; backends only read it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.attention.kv_format import SCALE_DTYPE, KVFormat

if TYPE_CHECKING:
    from headway.layers.heads import HeadNorms, Heads

_PAGE_BYTES = 4096


@dataclass(frozen=True)
class LayerKVCache:
    """Keys and values of one layer, for all requests (layout above)."""

    k: Tensor
    v: Tensor
    scales: Tensor | None = None
    """The scale of a token's key and that of its value lie side by side, so that one load brings both."""

    @staticmethod
    def zeros(
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        *,
        dtype: torch.dtype | KVFormat,
        device: torch.device | str = "cpu",
        token_major: bool | None = None,
    ) -> LayerKVCache:
        """An empty cache of `num_blocks` blocks. `token_major`: see above; `None` is what the device reads best."""
        format = dtype if isinstance(dtype, KVFormat) else KVFormat.of(dtype)
        zeros = _untouched_zeros if torch.device(device).type == "cpu" else torch.zeros
        if token_major is None:
            token_major = torch.device(device).type == "cuda"
        tokens = (num_blocks, num_kv_heads, block_size)
        transposed = (num_blocks, num_kv_heads, head_dim, block_size)
        k = zeros((*tokens, head_dim) if token_major else transposed, dtype=format.keys.dtype, device=device)
        return LayerKVCache(
            k=k.transpose(2, 3) if token_major else k,
            v=zeros((*tokens, format.values.width(head_dim)), dtype=format.values.dtype, device=device),
            scales=zeros((*tokens, 2), dtype=SCALE_DTYPE, device=device) if format.is_scaled else None,
        )

    @functools.cached_property
    def format(self) -> KVFormat:
        """In which numbers keys and values are stored."""
        return KVFormat.of_tensors(self.k, self.v)

    @property
    def tensors(self) -> list[Tensor]:
        """All that belongs to a block: its number is the first index of each."""
        return [self.k, self.v] if self.scales is None else [self.k, self.v, self.scales]

    @property
    def k_scale(self) -> Tensor | None:
        """[num_blocks, num_kv_heads, block_size]"""
        return None if self.scales is None else self.scales[..., 0]

    @property
    def v_scale(self) -> Tensor | None:
        """[num_blocks, num_kv_heads, block_size]"""
        return None if self.scales is None else self.scales[..., 1]

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

    def write(self, blocks: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """Store keys and values [tokens, num_kv_heads, head_dim], token i in slot offsets[i] of block blocks[i]."""
        k_stored, k_scale = self.format.keys.encode(k)
        v_stored, v_scale = self.format.values.encode(v)
        self.k[blocks, :, :, offsets] = k_stored
        self.v[blocks, :, offsets] = v_stored
        if self.scales is not None and k_scale is not None and v_scale is not None:
            self.scales[blocks, :, offsets] = torch.stack((k_scale, v_scale), -1)

    def read_tokens(self, blocks: Tensor, offsets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of these slots as numbers, each [tokens, num_kv_heads, head_dim]."""
        scales = (None, None) if self.scales is None else self.scales[blocks, :, offsets].unbind(-1)
        return (
            self.format.keys.decode(self.k[blocks, :, :, offsets], scales[0], dtype),
            self.format.values.decode(self.v[blocks, :, offsets], scales[1], dtype),
        )

    def read_blocks(self, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of whole blocks as numbers, each [*blocks.shape, num_kv_heads, block_size, head_dim]."""
        scales = (None, None) if self.scales is None else self.scales[blocks].unbind(-1)
        return (
            self.format.keys.decode(self.k[blocks].transpose(-1, -2), scales[0], dtype),
            self.format.values.decode(self.v[blocks], scales[1], dtype),
        )


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
    """int64 or int32 [num_tokens]: where each of the step's tokens goes; negative: nowhere, a token of padding."""
    rows: Tensor | None = None
    """int32 [num_requests]: the line of `block_table` that belongs to each request. `None`: the i-th to the i-th."""
    num_single: int = 0
    """So many requests at the front of the step have one new token each."""
    parts: Tensor | None = None
    """int32 [num_parts, 8]: their contexts in parts (context_parts.py), for backends that divide work on the host."""
    tiles: Tensor | None = None
    """int32 [num_tiles, 2]: the same for the other requests: a request and the first of its new tokens in the tile."""
    num_tiles: Tensor | None = None
    """int32 [1]: the true number of tiles, where there is room for more (in a CUDA graph)."""

    def own_block_table(self) -> Tensor:
        """int32 [num_requests, blocks]: the table with one line per request, in the order of the step."""
        if self.rows is None:
            return self.block_table
        return self.block_table[self.rows[: self.num_requests].long()]


class AttentionBackend(Protocol):
    """Causal attention over the paged cache. Implementations are constructed as `Backend(kv_caches, num_heads)`.

    `plan` is called once per step, before any `run` of that step; `batch` is the batch last planned. `run` for a layer
    is called after the step's keys and values of that layer have been written. The scale is 1 / sqrt(head_dim).
    """

    name: str
    kv_caches: Sequence[LayerKVCache]
    batch: AttentionBatch

    @property
    def takes_qkv(self) -> bool:
        """Whether the planned step is run by `run_qkv`; most backends never ask for it."""
        ...

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare for one step; may copy lengths to the host."""
        ...

    def run(self, layer: int, q: Tensor) -> Tensor:
        """q [num_tokens, num_heads, head_dim] -> [num_tokens, num_heads * head_dim], same dtype."""
        ...

    def run_qkv(self, layer: int, qkv: Tensor, heads: Heads, norms: HeadNorms | None) -> Tensor:
        """What `Ops.rope_write_kv` and `run` do, in one. qkv as there -> [num_tokens, num_heads * head_dim]."""
        ...


@runtime_checkable
class DividesWork(Protocol):
    """A backend whose kernels read on the device how a step's work is divided, which is found out on the host."""

    def context_parts(self, seq_lens: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """`AttentionBatch.parts` of requests with one new token."""
        ...

    def max_parts(self, num_requests: int) -> int:
        """Most parts that so many requests can have."""
        ...

    def query_tiles(self, query_lens: NDArray[np.int64], first_request: int) -> NDArray[np.int32]:
        """`AttentionBatch.tiles` of the requests from `first_request` on."""
        ...

    def max_tiles(self, num_tokens: int, max_num_requests: int) -> int:
        """Most tiles that a step of so many tokens can have."""
        ...


class SeparateRotation:
    """What a backend inherits that leaves norm, rotation and cache write to `Ops`."""

    takes_qkv = False

    def run_qkv(self, layer: int, qkv: Tensor, heads: Heads, norms: HeadNorms | None) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} takes rotated queries")
