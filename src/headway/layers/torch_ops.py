"""`Ops` in plain torch: any device, any float dtype. Norms and rotations are computed in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.attention.base import LayerKVCache


class TorchOps:
    """The portable implementation, and the one whose float32 results match Hugging Face transformers."""

    name = "torch"

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(token_ids, table)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # The order of operations (round to the dtype, then scale) is the one models were trained with.
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual.add_(x)
        return self.rms_norm(residual, weight, eps)

    def rope_write_kv(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        kv: LayerKVCache,
        slot_mapping: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> Tensor:
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
        q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        if q_norm is not None:
            q = self.rms_norm(q, q_norm, eps)
        if k_norm is not None:
            k = self.rms_norm(k, k_norm, eps)
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        q = _rotate(q, cos, sin)
        k = _rotate(k, cos, sin)
        block = slot_mapping // kv.block_size
        offset = slot_mapping % kv.block_size
        kv.k[block, :, :, offset] = k.to(kv.k.dtype)
        kv.v[block, :, offset] = v.to(kv.v.dtype)
        return q

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + D/2]) of x [T, heads, D] by its angle; cos and sin are float32 [T, 1, D/2]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
