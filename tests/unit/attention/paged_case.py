"""Requests with random keys and values in a paged cache, steps over any of them, and what each step must give.

The cache is hostile: blocks lie in random order, lines of the block table belong to requests in random order, and
every slot that is none of a request's is NaN: blocks of nobody, the rest of a last block, and the block that unused
places of the table name. So is every number that padding brings along. In a quantised cache these slots hold a large
code and a scale of NaN.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.triton_device import DEVICE  # isort: split

from headway.attention import AttentionBatch
from headway.attention.base import NO_REQUEST, NUM_PART_COLUMNS, DividesWork, HeadNorms, Heads
from headway.attention.triton_paged import TritonPagedAttention
from headway.kv.codes import plain_format
from headway.kv.layer_cache import LayerKVCache
from headway.kv_formats import FORMATS, KVFormat
from headway.layers.triton_ops import TritonOps

Length = tuple[int, int]
"""(new tokens, all tokens) of a request"""

_SPARE_LINES = 3
_SPARE_BLOCKS = 3
# Two kernels that round the same sums may differ in the last bit.
_ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# Scores that are held at one time: a gigabyte in float64.
_MAX_SCORES = 2**27


@dataclass(frozen=True)
class Shape:
    """What is the same for all requests of a model."""

    head_dim: int
    group: int
    block_size: int
    dtype: torch.dtype
    token_major: bool
    num_kv_heads: int = 2
    quantised: str | None = None
    """Format of the cache; `None`: numbers of `dtype` as they are."""

    @property
    def format(self) -> KVFormat:
        return plain_format(self.dtype) if self.quantised is None else FORMATS[self.quantised]

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    def __str__(self) -> str:
        layout = "by_token" if self.token_major else "transposed"
        dtype = str(self.dtype).removeprefix("torch.")
        cached = "" if self.quantised is None else f"-{self.quantised}"
        return f"d{self.head_dim}-g{self.group}-b{self.block_size}-{dtype}{cached}-{layout}"


@dataclass(frozen=True)
class Expected:
    """What attention gives one request in float64."""

    values: Tensor
    """[new tokens, heads, head_dim]"""
    noise: Tensor
    """By how much the sum moves if each weight is off by a random part of itself: root of sum of (weight × value)²."""


class PagedCase:
    """Requests of the given lengths. `sharpness` scales the scores."""

    def __init__(
        self,
        shape: Shape,
        lengths: Sequence[Length],
        *,
        sharpness: float = 1.0,
        seed: int = 0,
        backend: Callable[..., Any] = TritonPagedAttention,
    ) -> None:
        self.shape = shape
        self.lengths = list(lengths)
        self._random = torch.Generator(DEVICE).manual_seed(seed)
        order = np.random.default_rng(seed)
        num_blocks = [-(-total // shape.block_size) for _, total in lengths]
        blocks = order.permutation(sum(num_blocks) + _SPARE_BLOCKS)
        self.cache = LayerKVCache.zeros(
            len(blocks),
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            dtype=shape.format,
            device=DEVICE,
            token_major=shape.token_major,
        )
        for tensor in self.cache.tensors:
            poison(tensor)
        self._lines = order.permutation(len(lengths) + _SPARE_LINES)
        self._table = torch.full((len(self._lines), max(num_blocks) + 1), int(blocks[-1]), dtype=torch.int32)
        self._blocks = np.split(blocks[: sum(num_blocks)], np.cumsum(num_blocks)[:-1])
        self._queries = []
        for request, (new, total) in enumerate(lengths):
            own = torch.from_numpy(self._blocks[request])
            self._table[self._lines[request], : len(own)] = own.int()
            self._fill(own.to(DEVICE), total)
            self._queries.append(sharpness * self._randn(new, shape.num_heads, shape.head_dim))
        self._table = self._table.to(DEVICE)
        self.backend = backend([self.cache], shape.num_heads)

    def run(self, chosen: Sequence[int] | None = None, *, num_padding: int = 0) -> list[Tensor]:
        """One step of the chosen requests: [new tokens, heads, head_dim] for each."""
        chosen = range(len(self.lengths)) if chosen is None else chosen
        batch = self.batch(chosen, num_padding=num_padding)
        self.backend.plan(batch)
        out = self.backend.run(0, self.queries(chosen, num_padding=num_padding))
        assert out.shape == (batch.num_tokens, self.shape.num_heads * self.shape.head_dim)
        assert out.dtype == self.shape.dtype
        self.assert_counters_are_0()
        lens = [self.lengths[r][0] for r in chosen]
        return list(out[: sum(lens)].unflatten(1, (self.shape.num_heads, -1)).split(lens))

    def assert_counters_are_0(self) -> None:
        if isinstance(self.backend, TritonPagedAttention):
            assert not self.backend._num_arrived.any()

    def check(self, chosen: Sequence[int] | None = None, *, num_padding: int = 0) -> None:
        """A step gives each of the chosen requests what it must."""
        chosen = range(len(self.lengths)) if chosen is None else chosen
        for request, got in zip(chosen, self.run(chosen, num_padding=num_padding), strict=True):
            self._assert_near(got, self.expected(request), request)

    def check_room_changes_nothing(self) -> None:
        """A step in a CUDA graph with room for 20 requests more gives the same to the bit."""
        chosen = range(len(self.lengths))
        self.backend.plan(with_room(self.batch(chosen), 20))
        got = self.backend.run(0, self.queries(chosen))
        self.assert_counters_are_0()
        assert torch.equal(got.flatten(), torch.cat(self.run()).flatten())

    def check_qkv(self, *, with_norms: bool = False, extra: int = 0) -> None:
        """A step that rotates and caches in the kernel gives and caches the same as after `Ops.rope_write_kv`.

        The new token's slot is NaN before it. With `extra`, the step is one of a CUDA graph with so much room.
        """
        shape, chosen = self.shape, range(len(self.lengths))
        num_positions = max(total for _, total in self.lengths)
        heads = Heads(
            shape.num_heads, shape.num_kv_heads, shape.head_dim, self._random_float(num_positions, shape.head_dim), 1e-5
        )
        norms = HeadNorms(self._randn(shape.head_dim), self._randn(shape.head_dim)) if with_norms else None
        qkv = self._randn(len(chosen) + extra, heads.qkv_size)
        lasts = [total - 1 for _, total in self.lengths]
        slots = [
            int(self._blocks[r][last // shape.block_size]) * shape.block_size + last % shape.block_size
            for r, last in enumerate(lasts)
        ]
        for slot in slots:
            block, offset = divmod(slot, shape.block_size)
            for tensor in (self.cache.k[block].transpose(1, 2), self.cache.v[block]):
                poison(tensor[:, offset])
            if self.cache.scales is not None:
                poison(self.cache.scales[block, :, offset])
        separate = copy.copy(self)
        separate.cache = LayerKVCache(shape.format, *(tensor.clone() for tensor in self.cache.tensors))
        q = TritonOps().rope_write_kv(qkv[: len(chosen)], _int32(lasts), _int32(slots), heads, norms, separate.cache)
        separate._queries = list(q.split(1))

        batch = self.batch(chosen)
        self.backend.plan(with_room(batch, extra) if extra else batch)
        assert self.backend.takes_qkv
        out = self.backend.run_qkv(0, qkv, _int32(lasts), heads, norms)
        self.assert_counters_are_0()
        for request in chosen:
            got = out[request].view(1, shape.num_heads, -1)
            self._assert_near(got, separate.expected(request), request)
        for fused, apart in zip(self.cache.tensors, separate.cache.tensors, strict=True):
            if fused.dtype.itemsize == 1:
                assert torch.equal(fused.view(torch.uint8), apart.view(torch.uint8))
                continue
            assert torch.equal(fused.isnan(), apart.isnan())
            torch.testing.assert_close(fused.nan_to_num(), apart.nan_to_num(), rtol=_ROUNDING[shape.dtype], atol=1e-5)

    def part(self, request: int, first: int, last: int) -> PagedCase:
        """The same case, but the request computes only its new tokens first .. last - 1 in this step."""
        part = copy.copy(self)
        new, total = self.lengths[request]
        part.lengths, part._queries = list(self.lengths), list(self._queries)
        part.lengths[request] = (last - first, total - new + last)
        part._queries[request] = self._queries[request][first:last]
        return part

    def queries(self, chosen: Sequence[int], *, num_padding: int = 0) -> Tensor:
        """q of a step."""
        padding = torch.full((num_padding, self.shape.num_heads, self.shape.head_dim), math.nan, device=DEVICE)
        return torch.cat([*(self._queries[r] for r in chosen), padding.to(self.shape.dtype)])

    def batch(self, chosen: Sequence[int], *, num_padding: int = 0) -> AttentionBatch:
        """A step of the chosen requests and then some without a context, whose line of the table is the first."""
        lens = np.array([self.lengths[r][0] for r in chosen] + [1] * num_padding)
        totals = [self.lengths[r][1] for r in chosen] + [0] * num_padding
        rows = [self._lines[r] for r in chosen] + [0] * num_padding
        num_single, parts, tiles = 0, None, None
        if isinstance(self.backend, DividesWork):
            num_single = int((lens == 1).sum())
            assert (lens[:num_single] == 1).all(), "requests with one new token come first"
            if num_single < len(lens):
                found = self.backend.query_tiles(lens, np.array(totals), num_single, num_tokens=int(lens.sum()))
                tiles = torch.from_numpy(found).to(DEVICE)
            singles = np.array([totals, rows], dtype=np.int64)[:, :num_single]
            parts = torch.from_numpy(self.backend.context_parts(*singles)).to(DEVICE)
        return AttentionBatch(
            num_tokens=int(lens.sum()),
            num_requests=len(lens),
            max_query_len=int(lens.max()),
            max_seq_len=max(totals),
            query_start=_int32([0, *np.cumsum(lens)]),
            seq_lens=_int32(totals),
            block_table=self._table,
            slot_mapping=_int32([-1] * int(lens.sum())),
            rows=_int32(rows),
            num_single=num_single,
            parts=parts,
            tiles=tiles,
        )

    def expected(self, request: int) -> Expected:
        """Attention in plain torch over keys and values that were gathered."""
        new, total = self.lengths[request]
        own = torch.from_numpy(self._blocks[request]).to(DEVICE)
        keys, values = (
            numbers.transpose(1, 2).flatten(0, 1)[:total] for numbers in self.cache.read_blocks(own, torch.float64)
        )
        q = self._queries[request].double().view(new, self.shape.num_kv_heads, self.shape.group, -1)
        at_a_time = max(1, _MAX_SCORES // (self.shape.group * total))
        parts = [
            self._attend(q[first : first + at_a_time], keys, values, first_position=total - new + first)
            for first in range(0, new, at_a_time)
        ]
        return Expected(torch.cat([part.values for part in parts]), torch.cat([part.noise for part in parts]))

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, first_position: int) -> Expected:
        """q [tokens, key heads, group, head_dim], of which the first token is at `first_position`."""
        position = torch.arange(first_position, first_position + len(q), device=DEVICE)
        future = torch.arange(len(keys), device=DEVICE)[None, :] > position[:, None]
        sums, squares = [], []
        for head in range(self.shape.num_kv_heads):
            scores = q[:, head] @ keys[:, head].T / math.sqrt(self.shape.head_dim)
            weights = scores.masked_fill(future[:, None], -math.inf).softmax(-1)
            sums.append(weights @ values[:, head])
            squares.append(weights.square() @ values[:, head].square())
        return Expected(torch.cat(sums, 1), torch.cat(squares, 1).sqrt())

    def _randn(self, *shape: int) -> Tensor:
        return self._random_float(*shape).to(self.shape.dtype)

    def _random_float(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._random, device=DEVICE)

    def _fill(self, blocks: Tensor, num_tokens: int) -> None:
        """Random keys and values in the first slots of these blocks."""
        shape = self.shape
        keys, values = (self._randn(num_tokens, shape.num_kv_heads, shape.head_dim) for _ in range(2))
        token = torch.arange(num_tokens, device=DEVICE)
        self.cache.write(blocks[token // shape.block_size], token % shape.block_size, keys, values)

    def _assert_near(self, got: Tensor, expected: Expected, request: int) -> None:
        what = f"request {request} of lengths {self.lengths[request]}"
        assert_near(got, expected, what=what)


def poison(tensor: Tensor) -> None:
    """NaN; in a tensor of codes the largest one, or a NaN where a code can be that."""
    if tensor.dtype.itemsize == 1:
        tensor.view(torch.uint8).fill_(0x7F)
    else:
        tensor.fill_(math.nan)


def with_room(batch: AttentionBatch, extra: int) -> AttentionBatch:
    """The same step as a CUDA graph has it: the numbers are limits, and what fills the room must not be read."""

    def longer(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, torch.full_like(tensor[:1], 2**30).expand(extra, *tensor.shape[1:])])

    num_tiles = 0 if batch.tiles is None else len(batch.tiles)
    assert batch.rows is not None and batch.parts is not None
    unused = batch.parts.new_full((extra, NUM_PART_COLUMNS), NO_REQUEST)
    return dataclasses.replace(
        batch,
        num_requests=batch.num_requests + extra,
        num_single=batch.num_single + extra,
        query_start=longer(batch.query_start),
        seq_lens=longer(batch.seq_lens),
        rows=longer(batch.rows),
        tiles=None if batch.tiles is None else longer(batch.tiles),
        parts=torch.cat([batch.parts, unused]),
        num_tiles=_int32([num_tiles]),
    )


def assert_near(got: Tensor, expected: Expected, what: str) -> None:
    """float32: 1e-5 of the largest value. In half precision, what two roundings may take away besides.

    Each weight is rounded before it meets its value. These errors are up to an epsilon each, as the interpreter cuts
    bfloat16 off, and independent: they shift the sum by up to an epsilon of itself, and scatter it by 0.3 epsilon ×
    noise, of which 2 epsilon × noise is seven times as much. And the sum is rounded as it is stored, to one epsilon.
    """
    limit = torch.full_like(expected.values, 1e-5 * float(expected.values.abs().max()))
    if got.dtype != torch.float32:
        limit += 2 * torch.finfo(got.dtype).eps * (expected.noise + expected.values.abs())
    error = (got.double() - expected.values).abs()
    assert bool((error <= limit).all()), f"{what}: off by {float((error / limit).max()):.3g} times the limit"


def _int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32, device=DEVICE)
