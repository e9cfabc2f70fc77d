"""Attention in our own Triton kernels: the default on CUDA.

Requests with one new token go to the decode kernel, the others to the prefill kernel, both in the same step. The host
divides their work into parts and tiles and sends these lists with the step. So a step can be captured in a CUDA graph:
its lists have room for the largest number, and programs without work return at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headway.attention.base import (
    MAX_FUSED_REQUESTS,
    NUM_PART_COLUMNS,
    AttentionBackend,
    AttentionBatch,
    HeadNorms,
    Heads,
)
from headway.attention.paged_kernels import add_parts_kernel, decode_kernel, prefill_kernel
from headway.attention.triton_device import dependent_launch, num_processors, stages_that_fit
from headway.errors import ConfigError
from headway.kv.layer_cache import LayerKVCache

_LOG2_E = math.log2(math.e)
# The number of tokens that are copied as one piece; a block must hold whole tiles.
_DESCRIBED_TILE = 64
# How many programs of the decode kernel fit on a multiprocessor, by their registers. Contexts are divided accordingly.
_PROGRAMS_PER_PROCESSOR = 4
# The same if the first tile is kept in registers (H200: with few requests up to 9% faster, with many up to 18% slower).
_EARLY_PROGRAMS_PER_PROCESSOR = 3
_REGISTERS_PER_PROCESSOR = 2**16

REQUEST, ROW, START, END, SEQ_LEN, FIRST_PART, NUM_PARTS = range(7)
"""The columns of a part. The part covers the context's tokens from START to END; FIRST_PART is the index in the list of
the first of the NUM_PARTS parts of the same context."""
_MAX_PARTS = 32  # of one context: one program adds them up
# A context that exceeds a share by no more than this fraction is not cut: adding parts up would cost more.
_TOLERANCE = 0.15
_PROGRAM_TILES = 2  # a program's overhead, in tiles
# The prefill kernel: how many programs fit on a multiprocessor, and the fewest key tiles that are worth a program,
# whose sums are written and read again and take as many bytes as two tiles. Two programs on a multiprocessor are 1.6
# times as fast as one. So if each multiprocessor has one program without cutting, only longer contexts are cut, and in
# halves.
_PREFILL_PROGRAMS_PER_PROCESSOR = 2
_LEAST_PREFILL_TILES, _LEAST_HALF_TILES = 6, 24
_ROWS_ADDED_UP, _PARTS_AT_ONCE = 8, 8  # the rows one program adds up, and the parts it loads at once
_TO_THE_END = 2**30


class TritonPagedAttention(AttentionBackend):
    """`plan` keeps the batch; `run` launches one to three kernels."""

    name = "triton"

    def __init__(self, kv_caches: Sequence[LayerKVCache], num_heads: int) -> None:
        cache = kv_caches[0]
        if num_heads % cache.num_kv_heads:
            raise ConfigError(f"{num_heads} query heads cannot share {cache.num_kv_heads} key heads evenly")
        if "triton" not in cache.format.kernels:
            raise ConfigError(f"the Triton kernels know no KV cache in {cache.format.name}")
        self.kv_caches = kv_caches
        self._num_heads = num_heads
        self._num_kv_heads = cache.num_kv_heads
        self._head_dim = cache.head_dim
        self._group = num_heads // cache.num_kv_heads
        self._scale = _LOG2_E / math.sqrt(cache.head_dim)
        self._is_scaled = cache.format.is_scaled
        self._k_largest, self._v_largest = cache.format.keys.largest, cache.format.values.largest
        exact = cache.v.dtype == torch.float32
        # The precision of float32 products. A half-precision cache has none, a quantised one only for float32 queries.
        self._precision = "ieee" if exact or self._is_scaled else "tf32"
        self._scales = [None if layer.scales is None else layer.scales.view(torch.int32) for layer in kv_caches]
        self._group_rows = max(16, triton.next_power_of_2(self._group))
        # A product has at least 16 columns, and 4-bit values are multiplied in four parts.
        self._columns = max(64 if self._is_scaled else 16, triton.next_power_of_2(cache.head_dim))
        # Tiles must fit in shared memory: float32 and wide heads need smaller ones.
        self._wide = exact or self._columns > 128
        self._query_rows = max(self._group_rows, 32 if self._wide else 128)
        self._descriptors = None if self._wide or self._is_scaled else _describe(kv_caches)
        # Codes take half the bytes, so a tile has twice the tokens, which share its fixed cost.
        self._decode_tile = 32 if self._wide else (128 if self._is_scaled else 64)
        self._decode_warps = 2 if self._decode_tile == 128 else 4
        self._prefill_tile = 32 if self._descriptors is None else _DESCRIBED_TILE
        row_bytes, device = self._columns * cache.k.element_size(), cache.v.device
        self._decode_stages = stages_that_fit(
            2, 2 * self._decode_tile * row_bytes, device, fixed_bytes=self._group_rows * row_bytes
        )
        self._prefill_stages = stages_that_fit(
            2 if self._wide else (4 if self._descriptors is None else 3),
            2 * self._prefill_tile * row_bytes,
            device,
            fixed_bytes=self._query_rows * row_bytes,
        )
        self._is_plain = not self._wide and not self._is_scaled  # the others need more registers
        self._early_parts, self._parts = (
            ContextParts(self._decode_tile, self._num_kv_heads, number * num_processors(device))
            for number in (
                _EARLY_PROGRAMS_PER_PROCESSOR,
                _PROGRAMS_PER_PROCESSOR if self._is_plain else _EARLY_PROGRAMS_PER_PROCESSOR,
            )
        )
        num_partial = self._parts.most_of_cut_contexts * self._num_kv_heads
        rows = num_partial * self._group_rows
        self._partial_acc = torch.empty(rows * self._columns, dtype=torch.float32, device=device)
        self._partial_max = torch.empty(rows, dtype=torch.float32, device=device)
        self._partial_sum = torch.empty(rows, dtype=torch.float32, device=device)
        self._num_arrived = torch.zeros(num_partial, dtype=torch.int32, device=device)
        self._num_processors = num_processors(device)
        self._tile_parts = ContextParts(
            self._prefill_tile, self._num_kv_heads, _PREFILL_PROGRAMS_PER_PROCESSOR * self._num_processors
        )
        num_partial = self._tile_parts.most_of_cut_contexts * self._num_kv_heads
        rows = num_partial * self._query_rows
        self._tile_acc = torch.empty(rows * self._columns, dtype=torch.float32, device=device)
        self._tile_max = torch.empty(rows, dtype=torch.float32, device=device)
        self._tile_sum = torch.empty(rows, dtype=torch.float32, device=device)

    def plan(self, batch: AttentionBatch) -> None:
        """Keep the batch: the kernels read its lists and tables on the device."""
        if batch.rows is None or (batch.num_single and batch.parts is None):
            raise ValueError("the Triton backend needs the rows of the batch, and the parts of its single tokens")
        if batch.num_single < batch.num_requests and batch.tiles is None:
            raise ValueError("the Triton backend needs tiles where a request has many tokens")
        self.batch = batch
        self._num_tiles = batch.num_tiles
        if batch.num_tiles is None and batch.tiles is not None:
            self._num_tiles = torch.tensor([len(batch.tiles)], dtype=torch.int32).to(batch.rows.device)

    def context_parts(
        self, seq_lens: NDArray[np.int64], rows: NDArray[np.int64], *, alone: bool = False
    ) -> NDArray[np.int32]:
        """The parts that the decode kernel's programs read, for requests with one new token."""
        is_early = alone and len(seq_lens) <= MAX_FUSED_REQUESTS and self._loads_early(len(seq_lens))
        return (self._early_parts if is_early else self._parts).of(seq_lens, rows)

    def _loads_early(self, num_requests: int) -> bool:
        """Whether the first tiles of this many requests are loaded while their queries are computed."""
        return num_requests * self._num_kv_heads <= self._early_parts.num_programs

    def max_parts(self, num_requests: int) -> int:
        """The most parts that this many requests can have."""
        return self._parts.most(num_requests)

    def query_tiles(
        self, query_lens: NDArray[np.int64], seq_lens: NDArray[np.int64], first_request: int, *, num_tokens: int
    ) -> NDArray[np.int32]:
        """The tiles of the requests from `first_request` on, as parts of their contexts. ROW holds a tile's first new
        token. The last part has all keys that only some of its rows see. Long contexts come first, as they take
        longest."""
        lens = query_lens[first_request:]
        per_tile = self._tokens_per_tile
        num_tiles = -(-lens // per_tile)
        requests = np.repeat(np.arange(first_request, len(query_lens)), num_tiles)
        first_token = (np.arange(len(requests)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * per_tile
        num_seen = (seq_lens - query_lens)[requests] + first_token + 1  # keys seen by all rows of the tile
        num_seen = np.maximum(num_seen // self._prefill_tile, 1) * self._prefill_tile
        most = self._most_parts(num_tokens, len(requests))
        least = _LEAST_PREFILL_TILES if most > 2 else _LEAST_HALF_TILES
        parts = self._tile_parts.of(num_seen, first_token, least=least, most=most)
        parts[:, REQUEST] = requests[parts[:, REQUEST]]
        parts[:, END][parts[:, END] == parts[:, SEQ_LEN]] = _TO_THE_END
        return parts

    def max_tiles(self, num_tokens: int, max_num_requests: int) -> int:
        """The most tiles that a step of this many tokens can have: each multi-token request may leave one partly
        empty."""
        num_tiles = num_tokens // self._tokens_per_tile + min(max_num_requests, num_tokens // 2) + 1
        return self._tile_parts.most(num_tiles) if self._cuts_tiles(num_tokens) else num_tiles

    @property
    def _tokens_per_tile(self) -> int:
        return self._query_rows // self._group

    def _cuts_tiles(self, num_tokens: int) -> bool:
        """Whether this many new tokens leave part of the device idle, if each tile is one program per head."""
        return num_tokens // self._tokens_per_tile * self._num_kv_heads <= self._num_processors

    def _most_parts(self, num_tokens: int, num_tiles: int) -> int:
        """The most parts of a tile's context, in a step with this many tokens and tiles."""
        num_programs = num_tiles * self._num_kv_heads
        if not self._cuts_tiles(num_tokens) or num_programs > self._num_processors:
            return 1
        return 2 if num_programs > self._num_processors // 2 else _MAX_PARTS

    @property
    def takes_qkv(self) -> bool:
        """Whether norm, rotation and cache write are part of the kernel, as in a step of few single tokens."""
        batch = self.batch
        is_decode = batch.num_single == batch.num_requests <= MAX_FUSED_REQUESTS
        return is_decode and self._columns == self._head_dim and not batch.rows_are_shared

    def run_qkv(self, layer: int, qkv: Tensor, positions: Tensor, heads: Heads, norms: HeadNorms | None) -> Tensor:
        """qkv [num_tokens, (num_heads + 2 num_kv_heads) * head_dim] -> [num_tokens, num_heads * head_dim]"""
        out = torch.empty(len(qkv), self._num_heads * self._head_dim, dtype=qkv.dtype, device=qkv.device)
        self._decode(layer, qkv, out, heads, norms)
        return out

    def run(self, layer: int, q: Tensor) -> Tensor:
        """q [num_tokens, num_heads, head_dim] -> [num_tokens, num_heads * head_dim]"""
        out = torch.empty_like(q)
        if self.batch.parts is not None and len(self.batch.parts):
            self._decode(layer, q, out)
        if self.batch.num_single < self.batch.num_requests:
            self._prefill(layer, q, out)
        return out.view(len(q), -1)

    def _decode(
        self, layer: int, q: Tensor, out: Tensor, heads: Heads | None = None, norms: HeadNorms | None = None
    ) -> None:
        """Run the decode kernel. With `heads`, q is the whole projection, which the kernel rotates and caches."""
        batch, cache = self.batch, self.kv_caches[layer]
        k, v = cache.k, cache.v
        assert batch.parts is not None
        is_early = heads is not None and not self._is_scaled and self._loads_early(batch.num_requests)
        options = dependent_launch(q)
        if heads is not None and self._is_plain:
            programs = _EARLY_PROGRAMS_PER_PROCESSOR if is_early else _PROGRAMS_PER_PROCESSOR
            options["maxnreg"] = _REGISTERS_PER_PROCESSOR // (32 * self._decode_warps * programs) // 8 * 8
        decode_kernel[(len(batch.parts) * self._num_kv_heads,)](
            out, q, k, v, self._scales[layer], batch.block_table, batch.parts,
            None if heads is None else heads.cos_sin,
            None if norms is None else norms.q,
            None if norms is None else norms.k,
            0.0 if heads is None else heads.eps,
            self._partial_acc, self._partial_max, self._partial_sum, self._num_arrived,
            self._scale, batch.block_table.stride(0),
            k.stride(0), k.stride(1), k.stride(3), k.stride(2), *v.stride(),
            NUM_KV_HEADS=self._num_kv_heads, GROUP=self._group, GROUP_ROWS=self._group_rows,
            HEAD_DIM=self._head_dim, HEAD_COLUMNS=self._columns, BLOCK_SIZE=cache.block_size, TILE=self._decode_tile,
            PRECISION=self._precision, K_LARGEST=self._k_largest, V_LARGEST=self._v_largest,
            EARLY=is_early, num_warps=self._decode_warps, num_stages=self._decode_stages, **options,
        )  # fmt: skip

    def _prefill(self, layer: int, q: Tensor, out: Tensor) -> None:
        batch, cache = self.batch, self.kv_caches[layer]
        assert batch.tiles is not None
        k, v = cache.k, cache.v
        described, cuts = self._descriptors is not None, self._cuts_tiles(batch.num_tokens)
        k_source, v_source = (k, v) if self._descriptors is None else self._descriptors[layer]
        prefill_kernel[(self._num_kv_heads, len(batch.tiles))](
            out, q, k_source, v_source, self._scales[layer], batch.block_table,
            batch.rows, batch.query_start, batch.seq_lens, batch.tiles, self._num_tiles,
            self._tile_acc, self._tile_max, self._tile_sum,
            self._scale, batch.block_table.stride(0),
            k.stride(0), k.stride(1), k.stride(3), k.stride(2), *v.stride(),
            NUM_KV_HEADS=self._num_kv_heads, GROUP=self._group, HEAD_DIM=self._head_dim, HEAD_COLUMNS=self._columns,
            BLOCK_SIZE=cache.block_size, QUERY_ROWS=self._query_rows, TILE=self._prefill_tile, DESCRIBED=described,
            PRECISION=self._precision, STAGES=self._prefill_stages, DIAGONAL_STAGES=min(2, self._prefill_stages),
            V_LARGEST=self._v_largest, CUT=cuts, num_warps=4,
        )  # fmt: skip
        if cuts:
            most = min(len(batch.tiles), self._tile_parts.most_of_cut_contexts)
            add_parts_kernel[(self._num_kv_heads, most, self._query_rows // _ROWS_ADDED_UP)](
                out, batch.query_start, batch.tiles, self._num_tiles, self._tile_acc, self._tile_max, self._tile_sum,
                NUM_KV_HEADS=self._num_kv_heads, GROUP=self._group, HEAD_DIM=self._head_dim, HEAD_COLUMNS=self._columns,
                QUERY_ROWS=self._query_rows, ROWS=_ROWS_ADDED_UP, MAX_PARTS=_MAX_PARTS, AT_ONCE=_PARTS_AT_ONCE,
                num_warps=4,
            )  # fmt: skip


def _describe(kv_caches: Sequence[LayerKVCache]) -> list[tuple[TensorDescriptor, TensorDescriptor]] | None:
    """For each layer, descriptors with which the memory unit copies tiles of keys and values. `None` if a tile is not
    contiguous."""
    cache = kv_caches[0]
    by_token = cache.k.transpose(2, 3)
    width = cache.head_dim
    if not by_token.is_contiguous() or cache.block_size % _DESCRIBED_TILE or width not in (64, 128):
        return None
    if by_token.is_cuda and torch.cuda.get_device_capability(by_token.device) < (9, 0):  # it has no such unit
        return None

    def described(tensor: Tensor) -> TensorDescriptor:
        return TensorDescriptor(tensor, [tensor.numel() // width, width], [width, 1], [_DESCRIBED_TILE, width])

    return [(described(layer.k.transpose(2, 3)), described(layer.v)) for layer in kv_caches]


@dataclass(frozen=True)
class ContextParts:
    """How the contexts of requests with one new token, or tile of them, are divided among the programs of a device.

    Decoding reads each context once, so a step takes as long as the busiest part of the device. Contexts differ a lot:
    one of 6,000 tokens beside a hundred of 500 would keep a single program busy long after all others are done. A
    program's share is therefore measured by the whole step: contexts that are much longer than it are cut into parts of
    about that size, with one program for each part; every other context is one part. Even contexts must not give
    slightly more programs than run at once: the last ones would take as long again as all others.

    The device runs `num_programs` programs at once, each of which reads tiles of `tile` tokens for one of `num_heads`
    heads.
    """

    tile: int
    num_heads: int
    num_programs: int

    def of(
        self, seq_lens: NDArray[np.int64], rows: NDArray[np.int64], *, least: int = 1, most: int = _MAX_PARTS
    ) -> NDArray[np.int32]:
        """[num_parts, NUM_PART_COLUMNS] for requests 0, 1, … with these contexts in these lines of the block table.

        Long contexts come first: cut contexts are at the front, and the longest work begins early. A context without
        tokens has no part. A part has at least about `least` tiles, and a context at most `most` parts.
        """
        order = np.argsort(-seq_lens, kind="stable")
        lengths = seq_lens[order]
        num_tiles = -(-lengths // self.tile)
        num_parts, tiles_per_part = self._cut(num_tiles, least, most)
        first = np.cumsum(num_parts) - num_parts
        context = np.repeat(np.arange(len(order)), num_parts)
        part_tokens = tiles_per_part[context] * self.tile
        start = (np.arange(len(context)) - first[context]) * part_tokens
        parts = np.zeros((len(context), NUM_PART_COLUMNS), dtype=np.int32)
        parts[:, REQUEST] = order[context]
        parts[:, ROW] = rows[order][context]
        parts[:, START] = start
        parts[:, END] = np.minimum(start + part_tokens, lengths[context])
        parts[:, SEQ_LEN] = lengths[context]
        parts[:, FIRST_PART] = first[context]
        parts[:, NUM_PARTS] = num_parts[context]
        return parts

    def _cut(self, num_tiles: NDArray[np.int64], least: int, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each context, the number of its parts, and the number of tiles in each part."""
        share = max(-(-int(num_tiles.sum()) * self.num_heads // self.num_programs), least)
        wanted = np.clip(np.ceil(num_tiles / share - _TOLERANCE), 1, most).astype(np.int64)
        num_parts, tiles_per_part = _even(num_tiles, wanted)
        at_once = self.num_programs // self.num_heads
        if not len(num_tiles) <= at_once < (num_all := int(num_parts.sum())):
            return num_parts, tiles_per_part
        # Some programs must wait until others have ended. With fewer parts none waits, but each takes longer.
        num_whole = int((num_parts == 1).sum())
        wanted = np.maximum(num_parts * (at_once - num_whole) // (num_all - num_whole), 1)
        fewer_parts, more_tiles = _even(num_tiles, wanted)
        sizes = np.sort(np.repeat(tiles_per_part, num_parts) + _PROGRAM_TILES)[::-1]
        takes = max(sizes.sum() / at_once, sizes[at_once - 1] + sizes[at_once])
        if int(fewer_parts.sum()) <= at_once and more_tiles.max() + _PROGRAM_TILES <= takes:
            return fewer_parts, more_tiles
        return num_parts, tiles_per_part

    def most(self, num_requests: int) -> int:
        """The most parts that this many requests can have."""
        return num_requests + self.num_programs // self.num_heads

    @property
    def most_of_cut_contexts(self) -> int:
        """The most parts that belong to cut contexts: each is at least half as long as a share."""
        return 2 * self.num_programs // self.num_heads + 1


def _even(num_tiles: NDArray[np.int64], wanted: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide each context into the wanted number of parts, as evenly as whole tiles allow. Returns the number of parts
    of each context, and the tiles in each part."""
    tiles_per_part = -(-num_tiles // wanted)
    return -(-num_tiles // np.maximum(tiles_per_part, 1)), tiles_per_part
