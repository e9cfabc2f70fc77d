"""The torch operations, one by one, against the plainest statement of each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headway.attention import HeadNorms, Heads
from headway.kv.layer_cache import LayerKVCache
from headway.layers.linear import TorchLinear
from headway.layers.ops import TorchOps

OPS = TorchOps()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (x.double() / (x.double().pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight).float()


@pytest.mark.parametrize("delta", [None, torch.linspace(-1, 1, 160).view(5, 32)], ids=["none", "some"])
def test_norm_adds_the_delta_to_the_residual_in_place(delta: Tensor | None) -> None:
    torch.manual_seed(0)
    residual, weight = torch.randn(5, 32), torch.rand(32)
    total = residual.clone() if delta is None else residual + delta
    normed = OPS.norm(residual, delta, weight, 1e-5)
    assert torch.equal(residual, total)
    torch.testing.assert_close(normed, rms_norm(total, weight, 1e-5))


def test_norm_linear_is_the_norm_and_the_linear() -> None:
    delta, residual, weight = torch.randn(5, 32), torch.randn(5, 32), torch.rand(32)
    linear = TorchLinear(torch.randn(7, 32), torch.randn(7))
    expected = linear(OPS.norm(residual.clone(), delta, weight, 1e-5))
    total = residual + delta
    assert torch.equal(OPS.norm_linear(residual, delta, weight, 1e-5, linear), expected)
    assert torch.equal(residual, total)


def test_norm_swiglu_takes_the_gate_first() -> None:
    delta, residual, weight = torch.randn(4, 32), torch.randn(4, 32), torch.rand(32)
    linear = TorchLinear(torch.randn(12, 32))
    total = residual + delta
    gate, up = linear(rms_norm(total, weight, 1e-5)).chunk(2, dim=-1)
    activated = OPS.norm_swiglu(residual, delta, weight, 1e-5, linear)
    torch.testing.assert_close(activated, gate * gate.sigmoid() * up)
    assert torch.equal(residual, total)


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_rope_write_kv_layout(block_size: int, dtype: torch.dtype, token_major: bool) -> None:
    torch.manual_seed(0)
    num_heads, num_kv_heads, dim, num_slots = 4, 2, 8, 48
    cache = LayerKVCache.zeros(
        num_slots // block_size, num_kv_heads, dim, block_size, dtype=dtype, token_major=token_major
    )
    slots = torch.tensor([5, 0, 47, 13, 14])
    positions = torch.tensor([3, 0, 9, 1, 2])
    angles = torch.rand(10, dim // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    qkv = torch.randn(5, (num_heads + 2 * num_kv_heads) * dim, dtype=dtype)
    original = qkv.clone().view(5, -1, dim)
    q = OPS.rope_write_kv(qkv, positions, slots, Heads(num_heads, num_kv_heads, dim, cos_sin, 1e-6), None, cache)
    for t in range(5):
        block, offset = divmod(int(slots[t]), block_size)
        turn = torch.polar(torch.ones(dim // 2), angles[positions[t]])
        for head in range(num_heads + num_kv_heads):
            x = original[t, head].float()
            rotated = torch.complex(x[: dim // 2], x[dim // 2 :]) * turn
            expected = torch.cat((rotated.real, rotated.imag)).to(dtype)
            got = q[t, head] if head < num_heads else cache.k[block, head - num_heads, :, offset]
            torch.testing.assert_close(got, expected)
        assert torch.equal(cache.v[block, :, offset], original[t, num_heads + num_kv_heads :])
    unwritten = torch.ones(num_slots, dtype=torch.bool)
    unwritten[slots] = False
    assert not cache.k.permute(0, 3, 1, 2).reshape(num_slots, -1)[unwritten].any()
    assert not cache.v.permute(0, 2, 1, 3).reshape(num_slots, -1)[unwritten].any()


def test_head_norms_come_before_the_rotation() -> None:
    norms = HeadNorms(q=torch.rand(8), k=torch.rand(8))
    qkv, at = torch.randn(3, 4 * 8), torch.arange(3)
    unturned = Heads(2, 1, 8, torch.tensor([1.0] * 4 + [0.0] * 4).repeat(3, 1), 1e-6)
    cache = LayerKVCache.zeros(1, 1, 8, 4, dtype=torch.float32)
    q = OPS.rope_write_kv(qkv, at, at, unturned, norms, cache)
    heads = qkv.view(3, 4, 8)
    torch.testing.assert_close(q, rms_norm(heads[:, :2], norms.q, 1e-6))
    torch.testing.assert_close(cache.k[0, :, :, :3].permute(2, 0, 1), rms_norm(heads[:, 2:3], norms.k, 1e-6))
