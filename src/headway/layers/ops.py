"""The vocabulary a decoder is written in. An implementation decides where and how; the model never asks.

`TorchOps` runs on any device and float dtype; `NativeOps` runs on the CPU in float32. All tensors of one call live on
one device. A row's result never depends on the other rows.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from headway.attention.base import LayerKVCache


class Linear(Protocol):
    """y = x @ weight.T + bias; how the weight is stored is its own business."""

    in_features: int
    out_features: int
    num_bytes: int
    """Memory held by the weight and the bias, in whatever form they are stored."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, out_features]"""
        ...


class Ops(Protocol):
    """Everything in a decoder layer that is neither a Linear nor attention."""

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """token_ids int64 [T], table [vocab, hidden] -> [T, hidden]"""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, hidden] scaled to unit root mean square, times weight; a new tensor."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x IN PLACE; returns rms_norm(residual) as a new tensor. x may be destroyed."""
        ...

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
        """Normalise (if weights are given) and rotate q and k, write k and v to the cache, return q [T, Hq, D].

        qkv [T, (Hq + 2 Hkv) * D]; positions int64 [T]; cos_sin float32 [max_position, D], the first half of a row
        cosines and the second half sines. The rotation pairs element i with element i + D/2 (the "neox" order).
        q_norm and k_norm [D] are RMS norms over each head. slot_mapping int64 [T]; qkv may be destroyed.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2 I] -> silu(first half) * second half, [T, I]"""
        ...
