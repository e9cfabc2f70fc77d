"""What an attention backend is: the step it is given and the two calls it answers. The cache it reads is that of
`headway/kv/layer_cache.py`; `Ops.rope_write_kv` fills it, backends only read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headway.kv.layer_cache import LayerKVCache

if TYPE_CHECKING:
    from headway.layers.heads import HeadNorms, Heads


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
