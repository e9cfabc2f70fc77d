"""The interface of attention backends: a layer's heads, the batch of a step, and the calls of a backend.

The cache is described in `headway/kv/layer_cache.py`; `Ops.rope_write_kv` or `AttentionBackend.run_qkv` fills it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headway.kv.layer_cache import LayerKVCache

NUM_PART_COLUMNS = 8
"""The columns of `AttentionBatch.parts`, of four bytes each, so that a part fills one 32-byte memory sector."""
MAX_FUSED_REQUESTS = 64
"""Up to this many requests, Triton's decode kernel also rotates and writes the cache. With more, doing so in each of
its programs takes longer than a launch (H200, 0.6B model: 1 request is 3% faster, 64 are 1% faster, 256 are 2% slower).
"""
NO_REQUEST = -1
"""Marks an unused part, in its first column."""


@dataclass(frozen=True, eq=False)
class Heads:
    """One layer's attention heads. A row of its qkv is `num_heads` q heads, then the k heads, then the v heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    cos_sin: Tensor = field(repr=False)
    """float32 [max_position, head_dim]: in each row the cosines of the head_dim / 2 pairs, then their sines. Layers
    with the same rotary positions share one table."""
    eps: float
    """The epsilon of the head norms, in layers that have them."""
    window: int | None = None
    """How many tokens a query sees, its own included; `None`: all. The decoder refuses any other value than `None`."""

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, eq=False)
class HeadNorms:
    """One layer's RMS norms over each head, weights [head_dim]."""

    q: Tensor
    k: Tensor


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
    """int64 or int32 [num_tokens]: the cache slot of each of the step's tokens; negative for a padding token."""
    rows: Tensor | None = None
    """int32 [num_requests]: the line of `block_table` of each request. `None`: request i has line i."""
    num_single: int = 0
    """How many requests, at the front of the step, have one new token each."""
    parts: Tensor | None = None
    """int32 [num_parts, NUM_PART_COLUMNS]: the parts of these requests' contexts, for backends that divide work on the
    host."""
    tiles: Tensor | None = None
    """int32 [num_tiles, NUM_PART_COLUMNS]: new tokens of the other requests in tiles, with parts of their contexts."""
    num_tiles: Tensor | None = None
    """int32 [1]: the true number of tiles, if there is room for more (in a CUDA graph)."""
    rows_are_shared: bool = False
    """Whether several of the single tokens may belong to one request, so that some read what others write."""

    def own_block_table(self) -> Tensor:
        """The block table with one line per request, in the order of the step: int32 [num_requests, blocks]."""
        if self.rows is None:
            return self.block_table
        return self.block_table[self.rows[: self.num_requests].long()]


class AttentionBackend(ABC):
    """Causal attention over the paged cache. Implementations are constructed as `Backend(kv_caches, num_heads)`.

    `plan` is called once per step, before any `run` of that step; `batch` is the batch last planned. `run` for a layer
    is called after the step's keys and values of that layer have been written. The scale is 1 / sqrt(head_dim).
    """

    name: str
    kv_caches: Sequence[LayerKVCache]
    batch: AttentionBatch

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> None:
        """Prepare for one step. This may copy lengths to the host."""

    @abstractmethod
    def run(self, layer: int, q: Tensor) -> Tensor:
        """q [num_tokens, num_heads, head_dim] -> [num_tokens, num_heads * head_dim], same dtype."""

    @property
    def takes_qkv(self) -> bool:
        """Whether the planned step uses `run_qkv`; otherwise `Ops` computes norm, rotation and cache write."""
        return False

    def run_qkv(self, layer: int, qkv: Tensor, positions: Tensor, heads: Heads, norms: HeadNorms | None) -> Tensor:
        """Do the work of `Ops.rope_write_kv` and `run` in one call. Returns [num_tokens, num_heads * head_dim]."""
        raise NotImplementedError(f"{type(self).__name__} takes rotated queries")


@runtime_checkable
class DividesWork(Protocol):
    """A backend whose work is divided on the host; its kernels read the division on the device."""

    def context_parts(
        self, seq_lens: NDArray[np.int64], rows: NDArray[np.int64], *, alone: bool = False
    ) -> NDArray[np.int32]:
        """`AttentionBatch.parts` for requests with one new token. `alone`: the step has no other requests, and no two
        of these share a row."""
        ...

    def max_parts(self, num_requests: int) -> int:
        """The most parts that this many requests can have."""
        ...

    def query_tiles(
        self, query_lens: NDArray[np.int64], seq_lens: NDArray[np.int64], first_request: int, *, num_tokens: int
    ) -> NDArray[np.int32]:
        """`AttentionBatch.tiles` for the requests from `first_request` on, in a step of `num_tokens` tokens."""
        ...

    def max_tiles(self, num_tokens: int, max_num_requests: int) -> int:
        """The most tiles that a step of this many tokens can have."""
        ...
