"""`Ops` in plain torch: any device, any float dtype. Norms and rotations are computed in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.attention.base import HeadNorms, Heads
from headway.kv.layer_cache import LayerKVCache
from headway.layers.linear import Delta
from headway.layers.ops import Ops


class TorchOps(Ops):
    """The portable implementation, and the one whose float32 results match Hugging Face transformers."""

    name = "torch"

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(token_ids, table)

    def norm(self, residual: Tensor, delta: Delta, weight: Tensor, eps: float) -> Tensor:
        if isinstance(delta, Tensor):
            residual.add_(delta)
        return _rms_norm(residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rope_write_kv(
        self,
        qkv: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        heads: Heads,
        norms: HeadNorms | None,
        kv: LayerKVCache,
    ) -> Tensor:
        num_heads, num_kv_heads = heads.num_heads, heads.num_kv_heads
        split = qkv.view(-1, num_heads + 2 * num_kv_heads, heads.head_dim)
        q, k, v = split.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        if norms is not None:
            q = _rms_norm(q, norms.q, heads.eps)
            k = _rms_norm(k, norms.k, heads.eps)
        cos, sin = heads.cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        q = _rotate(q, cos, sin)
        k = _rotate(k, cos, sin)
        kv.write(slot_mapping // kv.block_size, slot_mapping % kv.block_size, k, v)
        return q


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # The order of operations (round to the dtype, then scale) is the one models were trained with.
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + D/2]) of x [T, heads, D] by its angle; cos and sin are float32 [T, 1, D/2]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
