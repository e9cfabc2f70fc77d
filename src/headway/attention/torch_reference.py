"""The oracle: attention written so that one can see it is right. One request at a time, one softmax, no tricks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headway.attention.base import AttentionBatch, SeparateRotation
from headway.kv.layer_cache import LayerKVCache


class TorchReferenceAttention(SeparateRotation):
    """Gathers each request's keys and values, then computes softmax(q k / sqrt(d)) v in `math_dtype`."""

    name = "torch_reference"
    batch: AttentionBatch

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
