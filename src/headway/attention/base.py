"""What an attention backend is: the heads of a layer, the step it is given and the calls it answers.

The cache is that of `headway/kv/layer_cache.py`: `Ops.rope_write_kv` or `AttentionBackend.run_qkv` fills it.
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
"""Of `AttentionBatch.parts`, of four bytes each: a part lies in one sector of memory."""
MAX_FUSED_REQUESTS = 64
"""Up to so many requests Triton's decode kernel rotates and caches too. With more, doing that in each of its programs
takes longer than a launch (H200: 64 requests of a 0.6B model are 1% faster with it, 1 is 3% faster, 256 are 2% slower).
"""
NO_REQUEST = -1
"""The first column of a part that is room and not used."""


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
    """Of the head norms, in the layers that have them."""
    window: int | None = None
    """How many tokens a query sees, its own included; `None`: all. The decoder refuses any other."""

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
    """int64 or int32 [num_tokens]: where each of the step's tokens goes; negative: nowhere, a token of padding."""
    rows: Tensor | None = None
    """int32 [num_requests]: the line of `block_table` that belongs to each request. `None`: the i-th to the i-th."""
    num_single: int = 0
    """So many requests at the front of the step have one new token each."""
    parts: Tensor | None = None
    """int32 [num_parts, NUM_PART_COLUMNS]: their contexts in parts, for backends that divide work on the host."""
    tiles: Tensor | None = None
    """int32 [num_tiles, NUM_PART_COLUMNS]: new tokens of the other requests in tiles, with parts of their contexts."""
    num_tiles: Tensor | None = None
    """int32 [1]: the true number of tiles, where there is room for more (in a CUDA graph)."""
    rows_are_shared: bool = False
    """Whether several of the single tokens may be of one request, so that some read what others write."""

    def own_block_table(self) -> Tensor:
        """int32 [num_requests, blocks]: the table with one line per request, in the order of the step."""
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
        """Prepare for one step; may copy lengths to the host."""

    @abstractmethod
    def run(self, layer: int, q: Tensor) -> Tensor:
        """q [num_tokens, num_heads, head_dim] -> [num_tokens, num_heads * head_dim], same dtype."""

    @property
    def takes_qkv(self) -> bool:
        """Whether the planned step is run by `run_qkv`; otherwise norm, rotation and cache write are left to `Ops`."""
        return False

    def run_qkv(self, layer: int, qkv: Tensor, positions: Tensor, heads: Heads, norms: HeadNorms | None) -> Tensor:
        """What `Ops.rope_write_kv` and `run` do, in one. As there -> [num_tokens, num_heads * head_dim]."""
        raise NotImplementedError(f"{type(self).__name__} takes rotated queries")


@runtime_checkable
class DividesWork(Protocol):
    """A backend whose kernels read on the device how a step's work is divided, which is found out on the host."""

    def context_parts(
        self, seq_lens: NDArray[np.int64], rows: NDArray[np.int64], *, alone: bool = False
    ) -> NDArray[np.int32]:
        """`AttentionBatch.parts` of requests with one new token. `alone`: there are no others in the step, and each has
        blocks of its own."""
        ...

    def max_parts(self, num_requests: int) -> int:
        """Most parts that so many requests can have."""
        ...

    def query_tiles(
        self, query_lens: NDArray[np.int64], seq_lens: NDArray[np.int64], first_request: int, *, num_tokens: int
    ) -> NDArray[np.int32]:
        """`AttentionBatch.tiles` of the requests from `first_request` on, in a step that runs with so many tokens."""
        ...

    def max_tiles(self, num_tokens: int, max_num_requests: int) -> int:
        """Most tiles that a step of so many tokens can have."""
        ...
