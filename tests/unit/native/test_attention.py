"""Paged attention: against a float64 oracle on odd batches, and bit for bit against itself in other compositions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from headway.attention.base import AttentionBatch, HeadNorms, Heads
from headway.attention.cpu import CpuAttention
from headway.errors import ConfigError
from headway.kv.codes import decode, encode
from headway.kv.layer_cache import LayerKVCache
from headway.kv_formats import FORMATS, KVFormat
from headway.layers.native_ops import NativeOps
from headway.native.lib import NativeLibrary

ALL = [FORMATS[name] for name in ("float32", "float16", "fp8", "int8", "int4")]


def poison(cache: LayerKVCache) -> None:
    """What no kernel may use: NaN where a float stands, and the largest code beside a NaN scale."""
    for tensor in cache.tensors:
        if tensor.dtype.itemsize == 1:
            tensor.view(torch.uint8).fill_(0x7F)
        else:
            tensor.fill_(math.nan)


@dataclass
class Sequences:
    """Plain keys, values and queries of some requests, from which any paged batch can be made."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]

    @staticmethod
    def random(lengths: Sequence[int], heads: int, kv_heads: int, dim: int) -> Sequences:
        return Sequences(
            q=[torch.randn(n, heads, dim) for n in lengths],
            k=[torch.randn(n, kv_heads, dim) for n in lengths],
            v=[torch.randn(n, kv_heads, dim) for n in lengths],
        )

    def rounded(self, format: KVFormat) -> Sequences:
        """With keys and values that the format holds."""
        return Sequences(
            q=self.q,
            k=[decode(format.keys, *encode(format.keys, k), torch.float32) for k in self.k],
            v=[decode(format.values, *encode(format.values, v), torch.float32) for v in self.v],
        )

    def oracle(self, r: int, first: int, end: int) -> Tensor:
        """Queries first .. end of request r in float64."""
        group = self.q[r].shape[1] // self.k[r].shape[1]
        k = self.k[r][:end].double().repeat_interleave(group, dim=1)
        v = self.v[r][:end].double().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", self.q[r][first:end].double(), k) / math.sqrt(k.shape[-1])
        future = torch.arange(end)[None] > torch.arange(first, end)[:, None]
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -math.inf).softmax(-1), v).flatten(1)


def batch_of(spans: Sequence[tuple[int, int]], table: Tensor, slots: Tensor | None = None) -> AttentionBatch:
    """A step over spans (first query, end), one for each line of the block table."""
    lengths = [end - first for first, end in spans]
    return AttentionBatch(
        num_tokens=sum(lengths),
        num_requests=len(spans),
        max_query_len=max(lengths),
        max_seq_len=max(end for _, end in spans),
        query_start=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        seq_lens=torch.tensor([end for _, end in spans], dtype=torch.int32),
        block_table=table.int(),
        slot_mapping=torch.zeros(sum(lengths), dtype=torch.int64) if slots is None else slots,
    )


def attend(
    sequences: Sequences,
    spans: Sequence[tuple[int, int, int]],
    *,
    block_size: int = 16,
    format: KVFormat = FORMATS["float32"],
    library: NativeLibrary | None = None,
) -> list[Tensor]:
    """Runs one step over spans (request, first query, end); returns each span's rows. Unused slots hold NaN."""
    heads, dim = sequences.q[0].shape[1:]
    kv_heads = sequences.k[0].shape[1]
    counts = [-(-end // block_size) for _, _, end in spans]
    cache = LayerKVCache.zeros(sum(counts) + 3, kv_heads, dim, block_size, dtype=format)
    poison(cache)
    order = torch.randperm(sum(counts) + 3, dtype=torch.int32)
    table = torch.full((len(spans), max(counts) + 2), -1, dtype=torch.int32)
    used = 0
    for i, (r, _, end) in enumerate(spans):
        table[i, : counts[i]] = order[used : used + counts[i]]
        used += counts[i]
        token = torch.arange(end)
        block, offset = table[i].long()[token // block_size], token % block_size
        cache.write(block, offset, sequences.k[r][:end], sequences.v[r][:end])
    batch = batch_of([(first, end) for _, first, end in spans], table)
    backend = CpuAttention([cache], heads, library)
    backend.plan(batch)
    out = backend.run(0, torch.cat([sequences.q[r][first:end] for r, first, end in spans]))
    return list(out.split([end - first for _, first, end in spans]))


BLOCK_SIZES = (1, 7, 16, 24, 128)
HEADS = ((9, 3, 64), (2, 2, 80), (4, 2, 96), (4, 1, 128), (5, 1, 256), (16, 1, 64), (14, 2, 36), (2, 1, 6))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "format"),
    [
        pytest.param(*heads, BLOCK_SIZES[(h + f) % len(BLOCK_SIZES)], format, id=f"{heads}-{format.name}")
        for h, heads in enumerate(HEADS)
        for f, format in enumerate(ALL)
    ],
)
def test_against_the_oracle(
    library: NativeLibrary, heads: int, kv_heads: int, dim: int, block_size: int, format: KVFormat
) -> None:
    """Every two of heads, block size and format meet: a kernel is made for each format, and none for all three."""
    sequences = Sequences.random([300, 1, 33, 16, 70], heads, kv_heads, dim)
    oracle = sequences.rounded(format).oracle
    spans = [(0, 299, 300), (1, 0, 1), (2, 0, 33), (3, 10, 16), (4, 65, 70), (0, 250, 280)]
    for span, rows in zip(
        spans, attend(sequences, spans, block_size=block_size, format=format, library=library), strict=True
    ):
        torch.testing.assert_close(rows.double(), oracle(*span), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("format", ALL, ids=lambda format: format.name)
def test_long_contexts_are_split_and_right(library: NativeLibrary, format: KVFormat) -> None:
    sequences = Sequences.random([1400, 40], 6, 2, 64)
    oracle = sequences.rounded(format).oracle
    spans = [(0, 1399, 1400), (0, 1350, 1400), (1, 39, 40), (1, 0, 40)]
    (alone,) = attend(sequences, spans[:1], format=format, library=library)
    torch.testing.assert_close(alone.double(), oracle(0, 1399, 1400), rtol=2e-5, atol=2e-5)
    results = []
    for num_threads in (1, 8, 3, 2):
        library.set_num_threads(num_threads)
        assert torch.equal(alone, attend(sequences, spans[:1], format=format, library=library)[0])
        results.append(torch.cat(attend(sequences, spans, format=format, library=library)))
        assert torch.equal(results[0], results[-1])
    assert torch.equal(alone[0], results[0][0]) and torch.equal(alone[0], results[0][50])
    assert torch.equal(alone, attend(sequences, spans[:1] * 9, format=format, library=library)[4])


CHUNKED_HEADS = ((9, 3, 64), (4, 1, 80), (6, 6, 128))


@pytest.mark.parametrize("format", ALL, ids=lambda format: format.name)
@pytest.mark.parametrize("shape", CHUNKED_HEADS, ids=str)
def test_rows_do_not_depend_on_batch_chunks_or_blocks(
    library: NativeLibrary, shape: tuple[int, int, int], format: KVFormat
) -> None:
    """Each format and each shape of heads sees each chunk in each block size, but not both of them all at once."""
    heads, kv_heads, dim = shape
    length = 530
    turn = CHUNKED_HEADS.index(shape) + ALL.index(format)
    sequences = Sequences.random([length, 290], heads, kv_heads, dim)
    whole = attend(sequences, [(0, 0, length)], format=format, library=library)[0]
    torch.testing.assert_close(whole.double(), sequences.rounded(format).oracle(0, 0, length), rtol=2e-5, atol=2e-5)
    for place, chunk in enumerate((1, 7, 64)):
        firsts = range(0, length, chunk) if chunk > 1 else (0, 1, 15, 16, 255, 256, 257, 511, 512, 529)
        spans = [(0, first, min(length, first + chunk)) for first in firsts]
        block_size = (1, 16, 128)[(place + turn) % 3]
        chosen = spans if chunk == 1 else spans[-6:]  # over both bounds of segments, or over the last
        parts = attend(sequences, [*chosen, (1, 200, 290)], block_size=block_size, format=format, library=library)
        for (_, first, end), part in zip(chosen, parts[:-1], strict=True):
            assert torch.equal(part, whole[first:end]), (chunk, block_size, first)


def test_large_scores_do_not_overflow(library: NativeLibrary) -> None:
    sequences = Sequences.random([400], 2, 1, 64)
    sequences.q = [q * 60 for q in sequences.q]
    rows = attend(sequences, [(0, 300, 400)], library=library)[0]
    torch.testing.assert_close(rows.double(), sequences.oracle(0, 300, 400), rtol=1e-3, atol=1e-3)


def test_what_cannot_be_read_is_refused(fast: NativeLibrary) -> None:
    CpuAttention([LayerKVCache.zeros(1, 1, 8, 4, dtype=torch.float16)], 2)
    with pytest.raises(ConfigError, match="bfloat16"):
        CpuAttention([LayerKVCache.zeros(1, 1, 8, 4, dtype=torch.bfloat16)], 2)
    with pytest.raises(ConfigError, match="3"):
        CpuAttention([LayerKVCache.zeros(1, 2, 8, 4, dtype=torch.float16)], 3)


@pytest.mark.parametrize("format", ALL, ids=lambda format: format.name)
@pytest.mark.parametrize("where", ["k", "v", "q"])
@pytest.mark.parametrize("length", [5, 40, 700])
def test_what_is_no_number_reaches_all_that_attend_to_it(
    library: NativeLibrary, format: KVFormat, where: str, length: int
) -> None:
    """Also the only key that a query sees of its last stretch of keys."""
    sequences = Sequences.random([length, 30], 4, 2, 16)
    spans = [(0, length - 1, length), (1, 20, 30)]
    clean = attend(sequences, spans, format=format, library=library)
    for token in {0, length // 2, length - 1} if where != "q" else {length - 1}:
        tensors = getattr(sequences, where)
        kept = tensors[0].clone()
        tensors[0][token, 1, 3] = math.nan
        broken = attend(sequences, spans, format=format, library=library)
        tensors[0] = kept
        heads = broken[0].view(4, 16).isnan().all(dim=1).tolist()
        expected = [False, True, False, False] if where == "q" else [False, False, True, True]
        if where == "v" and not format.is_scaled:  # only that number of the value
            heads = broken[0].view(4, 16)[:, 3].isnan().tolist()
        assert heads == expected, (token, heads)
        torch.testing.assert_close(broken[1], clean[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1e6], ids=["nan", "inf", "too large for float16"])
def test_what_is_written_that_is_no_number_is_noticed(fast: NativeLibrary, where: str, value: float) -> None:
    """In place float16 are read by a way that takes them for numbers."""
    heads = Heads(
        num_heads=4, num_kv_heads=2, head_dim=16, cos_sin=torch.cat([torch.ones(8), torch.zeros(8)])[None], eps=1e-6
    )
    cache = LayerKVCache.zeros(1, 2, 16, 16, dtype=torch.float16)
    for token, expected in ((None, 0), (1, 1)):
        qkv = torch.randn(3, heads.qkv_size)
        if token is not None:
            qkv[token, (4 if where == "k" else 6) * 16 + 5] = value
        q = NativeOps(fast).rope_write_kv(qkv, torch.zeros(3, dtype=torch.int64), torch.arange(3), heads, None, cache)
        assert cache.not_finite.item() == expected
    backend = CpuAttention([cache], 4, fast)
    backend.plan(batch_of([(2, 3)], torch.zeros(1, 1)))
    out = backend.run(0, q[2:]).view(4, 16)
    if math.isnan(value):  # a key that is infinite may have a weight of 0
        assert not out[:2].isfinite().all()
    assert out[2:].isfinite().all()


@pytest.mark.parametrize("format", ALL, ids=lambda format: format.name)
@pytest.mark.parametrize("has_norms", [False, True])
def test_in_one_call_or_in_two_it_is_the_same(library: NativeLibrary, format: KVFormat, has_norms: bool) -> None:
    """A prompt of five tokens beside one token of another request: outputs and cache, to the last bit."""
    heads = Heads(num_heads=4, num_kv_heads=2, head_dim=16, cos_sin=torch.randn(32, 16), eps=1e-6)
    norms = HeadNorms(q=torch.rand(16) + 0.5, k=torch.rand(16) + 0.5) if has_norms else None
    caches = [LayerKVCache.zeros(4, 2, 16, 8, dtype=format) for _ in range(2)]
    qkv, positions = torch.randn(6, heads.qkv_size), torch.tensor([0, 1, 2, 3, 4, 2])
    slots = torch.tensor([8, 9, 10, 11, 12, 26])
    batch = batch_of([(0, 5), (2, 3)], torch.tensor([[1], [3]]), slots)
    one, two = (CpuAttention([cache], 4, library) for cache in caches)
    one.plan(batch)
    two.plan(batch)
    q = NativeOps(library).rope_write_kv(qkv.clone(), positions, batch.slot_mapping, heads, norms, caches[1])
    assert torch.equal(one.run_qkv(0, qkv.clone(), positions, heads, norms), two.run(0, q))
    for own, other in zip(caches[0].tensors, caches[1].tensors, strict=True):
        assert torch.equal(own.view(torch.uint8), other.view(torch.uint8))
    with pytest.raises(ValueError, match="columns"):
        one.run_qkv(0, qkv[:, :-1].contiguous(), positions, heads, norms)
    with pytest.raises(ValueError, match="positions for 6 tokens"):
        one.run_qkv(0, qkv, positions[:5], heads, norms)
