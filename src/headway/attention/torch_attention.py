"""Attention in torch, for any device and float dtype: a vectorised backend, and the reference for all others.

`TorchReferenceAttention` is written to be obviously correct: one request at a time, one softmax.

`TorchPaddedAttention` gathers and pads all requests with one query (decodes) into a few batched calls. A request with
several queries (a prefill chunk) is a separate call. Padding exists only inside a call, and `memory_budget_bytes`
bounds it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.attention.base import AttentionBackend, AttentionBatch
from headway.kv.layer_cache import LayerKVCache


class TorchReferenceAttention(AttentionBackend):
    """Gathers each request's keys and values, then computes softmax(q k / sqrt(d)) v in `math_dtype`."""

    name = "torch_reference"

    def __init__(
        self, kv_caches: Sequence[LayerKVCache], num_heads: int, math_dtype: torch.dtype = torch.float32
    ) -> None:
        self.kv_caches = kv_caches
        self.num_heads = num_heads
        self.math_dtype = math_dtype

    def plan(self, batch: AttentionBatch) -> None:
        self.batch = batch
        self._query_start = batch.query_start.tolist()
        self._seq_lens = batch.seq_lens.tolist()
        self._block_table = batch.own_block_table().long()

    def run(self, layer: int, q: Tensor) -> Tensor:
        out = torch.empty_like(q)
        for r, seq_len in enumerate(self._seq_lens):
            start, end = self._query_start[r], self._query_start[r + 1]
            k, v = self._gather(self.kv_caches[layer], r, seq_len)
            out[start:end] = self._attend(q[start:end], k, v).to(q.dtype)
        return out.flatten(1)

    def _gather(self, cache: LayerKVCache, r: int, seq_len: int) -> tuple[Tensor, Tensor]:
        """Keys and values of request r as numbers, each [seq_len, num_kv_heads, head_dim]."""
        token = torch.arange(seq_len, device=cache.k.device)
        block = self._block_table[r, token // cache.block_size]
        offset = token % cache.block_size
        return cache.read_tokens(block, offset, self.math_dtype)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        num_queries, num_keys = q.shape[0], k.shape[0]
        group = self.num_heads // k.shape[1]
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q.to(self.math_dtype), k) / math.sqrt(q.shape[-1])
        query_position = torch.arange(num_keys - num_queries, num_keys, device=q.device)
        future = torch.arange(num_keys, device=q.device)[None, :] > query_position[:, None]
        weights = scores.masked_fill(future, -math.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v)


@dataclass(frozen=True)
class _DecodeSlice:
    """Decode rows that are computed in one call."""

    rows: Tensor
    """int64 [N]: rows of q."""
    blocks: Tensor
    """int64 [N, B]: their blocks, padded with the request's own first block."""
    padding: Tensor
    """bool [N, 1, B * block_size, 1]: True where there is no token."""


@dataclass(frozen=True)
class _Prefill:
    """One request with several queries."""

    start: int
    num_queries: int
    num_keys: int
    blocks: Tensor
    """int64 [B]"""


class TorchPaddedAttention(AttentionBackend):
    """`scaled_dot_product_attention` over gathered blocks."""

    name = "torch_padded"

    def __init__(
        self, kv_caches: Sequence[LayerKVCache], num_heads: int, memory_budget_bytes: int = 256 * 1024 * 1024
    ) -> None:
        self.kv_caches = kv_caches
        self.num_heads = num_heads
        self.memory_budget_bytes = memory_budget_bytes
        cache = kv_caches[0]
        self._block_size = cache.block_size
        self._num_kv_heads = cache.num_kv_heads
        self._group = num_heads // cache.num_kv_heads
        number_bytes = 4 if cache.format.is_scaled else cache.k.element_size()
        self._token_bytes = 2 * cache.num_kv_heads * cache.head_dim * number_bytes

    def plan(self, batch: AttentionBatch) -> None:
        self.batch = batch
        starts = batch.query_start.tolist()
        seq_lens = batch.seq_lens.tolist()
        table = batch.own_block_table().long()
        decodes = [r for r in range(batch.num_requests) if starts[r + 1] - starts[r] == 1]
        decodes.sort(key=lambda r: seq_lens[r], reverse=True)
        self._prefills = [
            _Prefill(starts[r], starts[r + 1] - starts[r], seq_lens[r], table[r, : self._num_blocks(seq_lens[r])])
            for r in range(batch.num_requests)
            if starts[r + 1] - starts[r] > 1
        ]
        self._decodes: list[_DecodeSlice] = []
        while decodes:
            longest = self._num_blocks(seq_lens[decodes[0]]) * self._block_size
            count = max(1, self.memory_budget_bytes // (longest * self._token_bytes))
            self._decodes.append(self._decode_slice(decodes[:count], starts, seq_lens, table))
            decodes = decodes[count:]

    def run(self, layer: int, q: Tensor) -> Tensor:
        cache = self.kv_caches[layer]
        out = torch.empty_like(q)
        for decode in self._decodes:
            out[decode.rows] = self._run_decode(cache, decode, q[decode.rows])
        for prefill in self._prefills:
            end = prefill.start + prefill.num_queries
            out[prefill.start : end] = self._run_prefill(cache, prefill, q[prefill.start : end])
        return out.flatten(1)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _decode_slice(self, requests: list[int], starts: list[int], seq_lens: list[int], table: Tensor) -> _DecodeSlice:
        device = table.device
        num_blocks = self._num_blocks(seq_lens[requests[0]])
        lengths = torch.tensor([seq_lens[r] for r in requests], device=device)[:, None]
        blocks = table[torch.tensor(requests, device=device), :num_blocks]
        unused = torch.arange(num_blocks, device=device) * self._block_size >= lengths
        padding = torch.arange(num_blocks * self._block_size, device=device) >= lengths
        return _DecodeSlice(
            rows=torch.tensor([starts[r] for r in requests], device=device),
            blocks=torch.where(unused, blocks[:, :1], blocks),
            padding=padding[:, None, :, None],
        )

    def _run_decode(self, cache: LayerKVCache, decode: _DecodeSlice, q: Tensor) -> Tensor:
        """q [N, Hq, D]. The query heads that share a KV head are computed as that head's queries."""
        num, _, head_dim = q.shape
        k, v = (
            numbers.transpose(1, 2).reshape(num, self._num_kv_heads, -1, head_dim)
            for numbers in cache.read_blocks(decode.blocks, q.dtype)
        )
        # Unused slots hold what an earlier request left; a NaN there would pass through a weight of zero.
        k = k.masked_fill(decode.padding, 0)
        v = v.masked_fill(decode.padding, 0)
        grouped = q.view(num, self._num_kv_heads, self._group, head_dim)
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=~decode.padding.transpose(2, 3))
        return out.reshape(num, self.num_heads, head_dim)

    def _run_prefill(self, cache: LayerKVCache, prefill: _Prefill, q: Tensor) -> Tensor:
        """q [Q, Hq, D]; queries are taken in slices whose scores fit the budget."""
        num_queries, num_keys, head_dim = prefill.num_queries, prefill.num_keys, q.shape[-1]
        shape = (self._num_kv_heads, self._group, num_keys, head_dim)
        k, v = (
            numbers.transpose(0, 1).flatten(1, 2)[:, :num_keys].unsqueeze(1).expand(shape)
            for numbers in cache.read_blocks(prefill.blocks, q.dtype)
        )
        grouped = q.view(num_queries, self._num_kv_heads, self._group, head_dim).permute(1, 2, 0, 3)
        step = max(1, self.memory_budget_bytes // (4 * self.num_heads * num_keys))
        parts = []
        for begin in range(0, num_queries, step):
            part = grouped[:, :, begin : begin + step]
            first = num_keys - num_queries + begin
            last = first + part.shape[2]
            if first == 0:
                attended = F.scaled_dot_product_attention(part, k[:, :, :last], v[:, :, :last], is_causal=True)
            else:
                position = torch.arange(first, last, device=q.device)[:, None]
                visible = torch.arange(last, device=q.device) <= position
                attended = F.scaled_dot_product_attention(part, k[:, :, :last], v[:, :, :last], attn_mask=visible)
            parts.append(attended)
        return torch.cat(parts, dim=2).permute(2, 0, 1, 3).reshape(q.shape)
