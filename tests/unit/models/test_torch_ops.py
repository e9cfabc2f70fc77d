"""The torch operations, one by one, against the plainest statement of each."""

from __future__ import annotations

import pytest
import torch

from headway.attention import LayerKVCache
from headway.layers.torch_ops import TorchOps

OPS = TorchOps()


def test_add_rms_norm_updates_the_residual_in_place() -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(5, 32), torch.randn(5, 32), torch.rand(32)
    total = x + residual
    normed = OPS.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    expected = total / (total.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(normed, expected.float())


def test_rms_norm_leaves_its_input() -> None:
    x = torch.randn(3, 16)
    copy = x.clone()
    OPS.rms_norm(x, torch.ones(16), 1e-6)
    assert torch.equal(x, copy)


def test_silu_mul_takes_the_gate_first() -> None:
    gate, up = torch.randn(4, 6), torch.randn(4, 6)
    torch.testing.assert_close(OPS.silu_mul(torch.cat((gate, up), 1)), gate * gate.sigmoid() * up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_rope_write_kv_layout(block_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    num_heads, num_kv_heads, dim, num_slots = 4, 2, 8, 48
    cache = LayerKVCache.zeros(num_slots // block_size, num_kv_heads, dim, block_size, dtype=dtype)
    slots = torch.tensor([5, 0, 47, 13, 14])
    positions = torch.tensor([3, 0, 9, 1, 2])
    angles = torch.rand(10, dim // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    qkv = torch.randn(5, (num_heads + 2 * num_kv_heads) * dim, dtype=dtype)
    original = qkv.clone().view(5, -1, dim)
    q = OPS.rope_write_kv(qkv, positions, cos_sin, None, None, 1e-6, cache, slots, num_heads, num_kv_heads, dim)
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
