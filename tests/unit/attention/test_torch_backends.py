"""The vectorised backend against the oracle, and the oracle against attention written out without a cache."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from headway import native
from headway.attention import BACKEND_NAMES, FORMATS, AttentionBatch, KVFormat, create_backend
from headway.attention.torch_attention import TorchPaddedAttention, TorchReferenceAttention
from headway.errors import ConfigError
from headway.kv.layer_cache import LayerKVCache

# (query_len, seq_len) of each request
DECODES = [(1, 1), (1, 17), (1, 33), (1, 128), (1, 5)]
PREFILLS = [(16, 16), (7, 30), (33, 33), (2, 129)]
MIXED = [(1, 40), (9, 9), (1, 1), (5, 64), (1, 64), (30, 31), (1, 129)]


class Case:
    """Random keys and values of several requests, in shuffled blocks of a cache whose other slots are poisoned."""

    def __init__(
        self,
        lengths: Sequence[tuple[int, int]],
        *,
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        token_major: bool = False,
        quantised: str | None = None,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.num_heads, num_kv_heads = heads
        num_blocks = sum(-(-seq_len // block_size) for _, seq_len in lengths) + 3
        free = list(range(num_blocks))
        random.Random(seed).shuffle(free)
        format = KVFormat.of(dtype) if quantised is None else FORMATS[quantised]
        self.cache = LayerKVCache.zeros(
            num_blocks, num_kv_heads, head_dim, block_size, dtype=format, token_major=token_major
        )
        for tensor in self.cache.tensors:
            if tensor.dtype.itemsize > 1:
                tensor.fill_(math.nan)
        width = max(-(-seq_len // block_size) for _, seq_len in lengths) + 1
        table = torch.full((len(lengths), width), 10**9, dtype=torch.int32)
        self.keys, self.values = [], []
        for r, (_, seq_len) in enumerate(lengths):
            keys, values = (torch.randn(seq_len, num_kv_heads, head_dim).to(dtype) for _ in range(2))
            self.keys.append(keys)
            self.values.append(values)
            for token in range(seq_len):
                if token % block_size == 0:
                    table[r, token // block_size] = free.pop()
                block = table[r, token // block_size]
                at = (block[None].long(), torch.tensor([token % block_size]))
                self.cache.write(*at, keys[token][None], values[token][None])
        starts = [0]
        for query_len, _ in lengths:
            starts.append(starts[-1] + query_len)
        self.cache = LayerKVCache(*(tensor.to(device) for tensor in self.cache.tensors))
        self.q = torch.randn(starts[-1], self.num_heads, head_dim).to(device, dtype)
        self.starts = starts
        self.batch = AttentionBatch(
            num_tokens=starts[-1],
            num_requests=len(lengths),
            max_query_len=max(query_len for query_len, _ in lengths),
            max_seq_len=max(seq_len for _, seq_len in lengths),
            query_start=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32, device=device),
            block_table=table.to(device),
            slot_mapping=torch.zeros(starts[-1], dtype=torch.int64, device=device),
        )

    def run(self, backend: TorchPaddedAttention | TorchReferenceAttention) -> Tensor:
        backend.plan(self.batch)
        return backend.run(0, self.q)

    def padded(self, **options: int) -> Tensor:
        return self.run(TorchPaddedAttention([self.cache], self.num_heads, **options))

    def exact(self) -> Tensor:
        return self.run(TorchReferenceAttention([self.cache], self.num_heads, math_dtype=torch.float64))


def written_out(case: Case) -> Tensor:
    """One query and one head at a time, in double precision, from the uncached keys and values."""
    out = torch.empty_like(case.q, dtype=torch.float64)
    group = case.num_heads // case.keys[0].shape[1]
    for r, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        start, end = case.starts[r], case.starts[r + 1]
        for row in range(start, end):
            visible = len(keys) - (end - 1 - row)
            for head in range(case.num_heads):
                k, v = keys[:visible, head // group].double(), values[:visible, head // group].double()
                weights = (k @ case.q[row, head].double() / math.sqrt(k.shape[1])).softmax(0)
                out[row, head] = weights @ v
    return out.flatten(1)


@pytest.mark.parametrize("lengths", [DECODES, PREFILLS, MIXED])
def test_reference_is_attention(lengths: list[tuple[int, int]]) -> None:
    case = Case(lengths, head_dim=16)
    torch.testing.assert_close(case.exact().double(), written_out(case), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("block_size", [1, 16, 128])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("lengths", [DECODES, PREFILLS, MIXED])
def test_padded_equals_reference(lengths: list[tuple[int, int]], head_dim: int, block_size: int) -> None:
    case = Case(lengths, head_dim=head_dim, block_size=block_size)
    torch.testing.assert_close(case.padded(), case.exact(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 3), (9, 3), (8, 1), (32, 8)])
def test_grouped_heads(heads: tuple[int, int]) -> None:
    case = Case(MIXED, heads=heads, head_dim=32)
    torch.testing.assert_close(case.padded(), case.exact(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("lengths", [DECODES, PREFILLS, MIXED])
def test_keys_stored_token_by_token(lengths: list[tuple[int, int]], block_size: int) -> None:
    transposed, by_token = (Case(lengths, block_size=block_size, token_major=major) for major in (False, True))
    assert torch.equal(by_token.exact(), transposed.exact())
    torch.testing.assert_close(by_token.padded(), by_token.exact(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("quantised", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("lengths", [DECODES, PREFILLS, MIXED])
def test_quantised_caches(lengths: list[tuple[int, int]], quantised: str) -> None:
    case = Case(lengths, quantised=quantised)
    format = FORMATS[quantised]
    case.keys = [format.keys.decode(*format.keys.encode(keys), torch.float64) for keys in case.keys]
    case.values = [format.values.decode(*format.values.encode(values), torch.float64) for values in case.values]
    torch.testing.assert_close(case.exact().double(), written_out(case), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(case.padded(), case.exact(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    case = Case(MIXED, dtype=dtype)
    result = case.padded()
    assert result.dtype == dtype
    torch.testing.assert_close(result, case.exact(), atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("token_major", [False, True])
def test_cuda(dtype: torch.dtype, head_dim: int, block_size: int, token_major: bool) -> None:
    case = Case(
        MIXED + PREFILLS,
        heads=(9, 3),
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device="cuda",
        token_major=token_major,
    )
    atol = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(case.padded(), case.exact(), atol=atol, rtol=atol)


@pytest.mark.parametrize("memory_budget_bytes", [1, 20_000, 200_000])
def test_slices_change_nothing(memory_budget_bytes: int) -> None:
    case = Case(MIXED + DECODES + PREFILLS, head_dim=32)
    torch.testing.assert_close(case.padded(memory_budget_bytes=memory_budget_bytes), case.exact(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(seed: int) -> None:
    draw = random.Random(seed)
    lengths = []
    for _ in range(draw.randint(1, 20)):
        seq_len = draw.randint(1, 200)
        lengths.append((1 if draw.random() < 0.6 else draw.randint(1, seq_len), seq_len))
    case = Case(
        lengths,
        heads=draw.choice([(4, 4), (4, 1), (9, 3)]),
        head_dim=draw.choice([16, 64, 80]),
        block_size=draw.choice([1, 8, 16, 32, 128]),
        seed=seed,
    )
    torch.testing.assert_close(case.padded(), case.exact(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["torch_padded", "torch_reference"])
def test_create_backend_by_name(name: str) -> None:
    caches = [LayerKVCache.zeros(2, 1, 8, 4, dtype=torch.float32)]
    backend = create_backend(name, caches, 2)
    assert backend.name == name
    assert backend.kv_caches is caches


def test_auto_is_torch_for_half_precision() -> None:
    caches = [LayerKVCache.zeros(2, 1, 8, 4, dtype=torch.bfloat16)]
    assert create_backend("auto", caches, 2).name == "torch_padded"


def test_auto_is_native_for_float32_on_the_cpu_where_it_can_be_built() -> None:
    caches = [LayerKVCache.zeros(2, 1, 8, 4, dtype=torch.float32)]
    assert create_backend("auto", caches, 2).name == ("cpu" if native.is_available() else "torch_padded")


def test_unknown_backend_names_the_valid_ones() -> None:
    caches = [LayerKVCache.zeros(2, 1, 8, 4, dtype=torch.float32)]
    with pytest.raises(
        ConfigError, match=f"unknown attention backend 'flash'; valid names are {', '.join(BACKEND_NAMES)}"
    ):
        create_backend("flash", caches, 2)


def test_cache_shape() -> None:
    cache = LayerKVCache.zeros(5, 2, 8, 4, dtype=torch.float16)
    assert (cache.k.shape, cache.v.shape) == ((5, 2, 8, 4), (5, 2, 4, 8))
    assert (cache.num_blocks, cache.num_kv_heads, cache.head_dim, cache.block_size) == (5, 2, 8, 4)


@pytest.mark.parametrize("token_major", [False, True])
def test_cache_is_stored_as_asked(token_major: bool) -> None:
    cache = LayerKVCache.zeros(5, 2, 8, 4, dtype=torch.float16, token_major=token_major)
    assert (cache.k.shape, cache.v.shape) == ((5, 2, 8, 4), (5, 2, 4, 8))
    assert cache.k.stride() == ((64, 32, 1, 8) if token_major else (64, 32, 4, 1))
    assert cache.v.is_contiguous()
    assert not cache.k.any() and not cache.v.any()


def test_the_device_decides_how_keys_are_stored() -> None:
    assert LayerKVCache.zeros(5, 2, 8, 4, dtype=torch.float16).k.is_contiguous()
    if torch.cuda.is_available():
        assert LayerKVCache.zeros(5, 2, 8, 4, dtype=torch.float16, device="cuda").k.stride(2) == 1


@pytest.mark.skipif(not native.is_available(), reason="no C compiler: the native kernels are not built")
def test_the_cpu_kernels_refuse_keys_stored_token_by_token() -> None:
    caches = [LayerKVCache.zeros(5, 2, 8, 4, dtype=torch.float32, token_major=True)]
    with pytest.raises(ConfigError, match="token_major"):
        create_backend("cpu", caches, 2)
    assert create_backend("auto", caches, 2).name == "torch_padded"
