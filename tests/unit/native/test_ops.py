"""NativeOps against the same arithmetic in torch, and row by row against itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headway.attention import HeadNorms, Heads
from headway.kv.layer_cache import LayerKVCache
from headway.kv_formats import FORMATS
from headway.layers.native_ops import NativeOps
from headway.layers.ops import TorchOps
from headway.native.lib import NativeLibrary

INT8 = FORMATS["int8"]


def norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("width", [1, 6, 17, 64, 576, 1000])
@pytest.mark.parametrize("rows", [1, 5, 100])
def test_norms(library: NativeLibrary, rows: int, width: int) -> None:
    ops = NativeOps(library)
    delta, residual, weight = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
    result = ops.norm(residual, None, weight, 1e-5)
    torch.testing.assert_close(result.double(), norm_reference(residual, weight, 1e-5), rtol=2e-6, atol=2e-6)

    total = residual + delta
    result = ops.norm(residual, delta, weight, 1e-5)
    assert torch.equal(residual, total)
    assert torch.equal(result, ops.norm(total, None, weight, 1e-5))


@pytest.mark.parametrize("width", [1, 3, 16, 50, 1536])
def test_swiglu(library: NativeLibrary, width: int) -> None:
    gate_up = torch.randn(7, 2 * width) * 8
    gate_up[0, 0], gate_up[1, 0], gate_up[2, 0] = -200.0, 200.0, 0.0
    gate, up = gate_up.double().chunk(2, dim=-1)
    result = NativeOps(library).silu_mul(gate_up)
    torch.testing.assert_close(result.double(), gate * torch.sigmoid(gate) * up, rtol=1e-6, atol=1e-7)


def test_rows_do_not_depend_on_the_batch(library: NativeLibrary) -> None:
    ops = NativeOps(library)
    x, weight = torch.randn(90, 576), torch.randn(576)
    for function in (lambda rows: ops.norm(rows, None, weight, 1e-6), ops.silu_mul):
        single = torch.cat([function(row[None]) for row in x])
        for m in (1, 2, 31, 90):
            assert torch.equal(function(x[:m]), single[:m])
        library.set_num_threads(1)
        assert torch.equal(function(x), single)
        library.set_num_threads(2)


def test_embedding(fast: NativeLibrary) -> None:
    table, ids = torch.randn(11, 8), torch.tensor([3, 3, 0, 10])
    assert torch.equal(NativeOps().embedding(ids, table), table[ids])


def rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"),
    [(9, 3, 64, 16), (4, 4, 80, 1), (8, 1, 128, 128), (2, 1, 6, 5), (2, 2, 96, 16), (1, 1, 2, 3)],
)
@pytest.mark.parametrize("with_norm", [False, True])
def test_rope_write_kv(
    library: NativeLibrary,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    with_norm: bool,
) -> None:
    tokens, blocks = 37, 40 if block_size < 5 else 9
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    positions, cos_sin = torch.randint(0, 50, (tokens,)), torch.randn(50, dim)
    slots = torch.randperm(blocks * block_size)[:tokens]
    norms = HeadNorms(q=torch.randn(dim), k=torch.randn(dim)) if with_norm else None
    cache = LayerKVCache.zeros(blocks, kv_heads, dim, block_size, dtype=dtype)

    shape = Heads(heads, kv_heads, dim, cos_sin, 1e-6)
    q = NativeOps(library).rope_write_kv(qkv, positions, slots, shape, norms, cache)

    q_in, k_in, v_in = qkv.view(tokens, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        q_in, k_in = norm_reference(q_in, norms.q, 1e-6).float(), norm_reference(k_in, norms.k, 1e-6).float()
    tolerance = 2e-3 if dtype is torch.float16 else 1e-5
    torch.testing.assert_close(q, rotated(q_in, cos_sin[positions]), rtol=1e-5, atol=1e-5)
    k_expected, v_expected = torch.zeros_like(cache.k), torch.zeros_like(cache.v)
    k_expected[slots // block_size, :, :, slots % block_size] = rotated(k_in, cos_sin[positions]).to(dtype)
    v_expected[slots // block_size, :, slots % block_size] = v_in.to(dtype)
    torch.testing.assert_close(cache.k, k_expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(cache.v, v_expected)


def test_float16_rounding_is_ieee(library: NativeLibrary) -> None:
    """Ties, subnormals, overflow and infinities go into a float16 cache as torch would put them."""
    values = torch.tensor([0.0, -0.0, 1e-8, 3e-8, 6e-8, 6.1e-5, 2049.0, 2051.0, 65504.0, 65519.9, 65520.0, 1e9])
    values = torch.cat((values, -values, torch.tensor([float("inf"), 5.9605e-8, 1.0009766, 1.00048828125])))
    values = torch.cat((values, torch.randn(100) * torch.logspace(-9, 5, 100)))
    dim = values.numel()
    cache = LayerKVCache.zeros(1, 1, dim, 1, dtype=torch.float16)
    qkv = torch.cat((torch.zeros(2 * dim), values))[None]
    at = torch.zeros(1, dtype=torch.int64)
    NativeOps(library).rope_write_kv(qkv, at, at, Heads(1, 1, dim, torch.zeros(1, dim), 0.0), None, cache)
    assert torch.equal(cache.v.flatten(), values.half())


@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
@pytest.mark.parametrize(("dim", "block_size"), [(64, 16), (80, 1), (128, 24), (6, 5), (2, 3)])
def test_codes_and_scales_are_those_of_the_reference(
    library: NativeLibrary, name: str, dim: int, block_size: int
) -> None:
    """To the bit: numbers of every magnitude, not rotated, with zeros, ties and what a float16 scale cannot hold."""
    tokens, kv_heads = 40, 3
    qkv = torch.randn(tokens, 5 * dim + 2 * kv_heads * dim) * torch.logspace(-9, 5, tokens)[:, None]
    qkv[3] = 0.0
    qkv[4] = torch.arange(qkv.shape[1]).remainder(29) - 14.0  # many ties
    qkv[5, -1], qkv[6, -1] = 1e9, float("nan")
    heads = Heads(5, kv_heads, dim, torch.cat((torch.ones(1, dim // 2), torch.zeros(1, dim // 2)), 1), 1e-6)
    at, slots = torch.zeros(tokens, dtype=torch.int64), torch.randperm(tokens + block_size)[:tokens]
    shape = (-(-(tokens + block_size) // block_size), kv_heads, dim, block_size)
    cache, expected = (LayerKVCache.zeros(*shape, dtype=FORMATS[name]) for _ in range(2))
    NativeOps(library).rope_write_kv(qkv, at, slots, heads, None, cache)
    TorchOps().rope_write_kv(qkv, at, slots, heads, None, expected)
    for got, wanted in zip(cache.tensors, expected.tensors, strict=True):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    assert cache.scales is not None and cache.scales[..., 1].isnan().sum() == 1


def test_a_quantised_token_does_not_depend_on_the_batch(library: NativeLibrary) -> None:
    heads, slots = Heads(9, 3, 64, torch.randn(50, 64), 1e-6), torch.randperm(160)[:90]
    qkv, positions = torch.randn(90, heads.qkv_size), torch.randint(0, 50, (90,))
    together, alone = (LayerKVCache.zeros(10, 3, 64, 16, dtype=INT8) for _ in range(2))
    ops = NativeOps(library)
    ops.rope_write_kv(qkv, positions, slots, heads, None, together)
    for t in range(90):
        ops.rope_write_kv(qkv[t : t + 1], positions[t : t + 1], slots[t : t + 1], heads, None, alone)
    for a, b in zip(together.tensors, alone.tensors, strict=True):
        assert torch.equal(a, b)


def test_wrong_inputs_are_refused(fast: NativeLibrary) -> None:
    ops, at = NativeOps(), torch.zeros(2, dtype=torch.int64)
    heads = Heads(1, 1, 8, torch.zeros(9, 8), 0.0)
    for cache, message in (
        (LayerKVCache.zeros(1, 1, 8, 4, dtype=torch.bfloat16), "no cache in bfloat16"),
        (LayerKVCache.zeros(1, 1, 8, 4, dtype=torch.float32, token_major=True), "key cache .*not token_major"),
        (LayerKVCache(INT8, *(torch.zeros(1, 1, *shape, dtype=torch.int8) for shape in ((8, 4), (4, 8)))), "no scales"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.rope_write_kv(torch.zeros(2, 24), at, at, heads, None, cache)
    for residual, delta, weight, message in (
        (torch.zeros(2, 8), None, torch.zeros(7), "norm weight"),
        (torch.zeros(2, 8).double(), None, torch.zeros(8), "residual must be"),
        (torch.zeros(2, 8), torch.zeros(3, 8), torch.zeros(8), "delta has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.norm(residual, delta, weight, 1e-5)
