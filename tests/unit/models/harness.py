"""Drives a decoder by hand: a tiny stand-in for scheduler and runner, with shuffled blocks to catch indexing errors."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headway.attention import AttentionBatch, create_backend
from headway.kv.layer_cache import LayerKVCache
from headway.models.decoder import Decoder


@dataclass
class HandRequest:
    """One request: its tokens, how many are computed, and its blocks."""

    token_ids: list[int]
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


class Harness:
    """Runs chunks of requests through `decoder`; every row's logits are kept."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        backend: str = "torch_reference",
        block_size: int = 16,
        num_blocks: int = 64,
        seed: int = 0,
        token_major: bool | None = None,
    ) -> None:
        config = decoder.config
        dtype, device = decoder.embedding.dtype, decoder.embedding.device
        shapes = [(num_blocks, layer.heads.num_kv_heads, layer.heads.head_dim, block_size) for layer in decoder.layers]
        caches = [LayerKVCache.zeros(*shape, dtype=dtype, device=device, token_major=token_major) for shape in shapes]
        self.decoder = decoder
        self.device = device
        self.block_size = block_size
        self.attention = create_backend(backend, caches, config.num_heads)
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)

    def step(self, work: Sequence[tuple[HandRequest, int]]) -> Tensor:
        """Compute the next `count` tokens of each request in one flat batch; returns float32 logits [T, vocab]."""
        hidden = self.hidden(work)
        logits = self.decoder.logits(hidden).float()
        start = 0
        for request, count in work:
            request.logits.extend(logits[start : start + count])
            start += count
        return logits

    def hidden(self, work: Sequence[tuple[HandRequest, int]], wanted_rows: list[int] | None = None) -> Tensor:
        """Like `step`, but the hidden states, and only those of `wanted_rows` where they are given."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        query_start = [0]
        for request, count in work:
            end = request.num_computed + count
            while len(request.blocks) * self.block_size < end:
                request.blocks.append(self._free.pop())
            for position in range(request.num_computed, end):
                token_ids.append(request.token_ids[position])
                positions.append(position)
                slots.append(request.blocks[position // self.block_size] * self.block_size + position % self.block_size)
            query_start.append(len(token_ids))
        self.attention.plan(self._batch(work, query_start, slots))
        for request, count in work:
            request.num_computed += count
        return self.decoder.forward(
            self._long(token_ids),
            self._long(positions),
            self.attention,
            None if wanted_rows is None else self._long(wanted_rows),
        )

    def prompt_logits(self, prompt: Sequence[int], chunk_size: int | None = None) -> Tensor:
        """Logits of every position of one prompt, computed in chunks."""
        request = HandRequest(list(prompt))
        while request.num_computed < len(prompt):
            left = len(prompt) - request.num_computed
            self.step([(request, min(chunk_size or left, left))])
        return torch.stack(request.logits)

    def _batch(
        self, work: Sequence[tuple[HandRequest, int]], query_start: list[int], slots: list[int]
    ) -> AttentionBatch:
        seq_lens = [request.num_computed + count for request, count in work]
        width = max(len(request.blocks) for request, _ in work) + 2
        # Entries past a request's blocks mean nothing; out-of-range ones make a backend that reads them fail.
        table = [request.blocks + [10**9] * (width - len(request.blocks)) for request, _ in work]
        return AttentionBatch(
            num_tokens=query_start[-1],
            num_requests=len(work),
            max_query_len=max(count for _, count in work),
            max_seq_len=max(seq_lens),
            query_start=torch.tensor(query_start, dtype=torch.int32, device=self.device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=self.device),
            block_table=torch.tensor(table, dtype=torch.int32, device=self.device),
            slot_mapping=self._long(slots),
        )

    def _long(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
