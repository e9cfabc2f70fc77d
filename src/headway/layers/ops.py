"""The vocabulary a decoder is written in, beside `Linear` and attention: `Ops`, and the kinds of `Mlp` made of them.

`TorchOps` runs on any device and float dtype, `NativeOps` on the CPU in float32, `TritonOps` on CUDA. All tensors of
one call live on one device. A row's result never depends on the values of other rows. `residual` and `delta` are those
of `layers/linear.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from headway.attention.base import HeadNorms, Heads
from headway.kv.layer_cache import LayerKVCache
from headway.layers.linear import Delta, Linear


class Ops(ABC):
    """Everything in a decoder but its linear layers and attention."""

    name: str

    @abstractmethod
    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """token_ids int64 [T], table [vocab, hidden] -> [T, hidden], a new tensor."""

    @abstractmethod
    def norm(self, residual: Tensor, delta: Delta, weight: Tensor, eps: float) -> Tensor:
        """residual += delta IN PLACE; returns it scaled to unit root mean square, times weight, as a new tensor."""

    @abstractmethod
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(first half) * second half of each row: [T, 2 N] -> [T, N]."""

    @abstractmethod
    def rope_write_kv(
        self,
        qkv: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        heads: Heads,
        norms: HeadNorms | None,
        kv: LayerKVCache,
    ) -> Tensor:
        """Normalise (where there are norms) and rotate q and k, write k and v to the cache, return q [T, Hq, D].

        qkv [T, heads.qkv_size], may be destroyed; positions and slot_mapping int64 [T]. The rotation pairs element i
        with element i + D/2 (the "neox" order). Only implementations that say so take slots below zero (padding).
        """

    def norm_linear(self, residual: Tensor, delta: Delta, weight: Tensor, eps: float, linear: Linear) -> Tensor:
        """linear(norm(residual, delta, weight, eps)), in one where the layer offers it."""
        fused = linear.norm_linear(residual, delta, weight, eps)
        return linear(self.norm(residual, delta, weight, eps)) if fused is None else fused

    def norm_swiglu(self, residual: Tensor, delta: Delta, weight: Tensor, eps: float, gate_up: Linear) -> Tensor:
        """silu_mul(norm_linear(..., gate_up)), with as much in one as the layer offers."""
        fused = gate_up.norm_swiglu(residual, delta, weight, eps)
        if fused is not None:
            return fused
        product = gate_up.norm_linear(residual, delta, weight, eps)
        if product is not None:
            return self.silu_mul(product)
        x = self.norm(residual, delta, weight, eps)
        activated = gate_up.swiglu(x)
        return self.silu_mul(gate_up(x)) if activated is None else activated


class Mlp(Protocol):
    """A layer's MLP, with the norm before it and the sum behind it."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All of its weights."""
        ...

    def add_to(self, residual: Tensor, delta: Delta, *, ops: Ops, norm: Tensor, eps: float, next_norm: Tensor) -> Delta:
        """residual += delta, then += mlp(norm(residual)), IN PLACE or left to the next norm: see `Linear.add_to`."""
        ...


@dataclass(frozen=True)
class DenseMlp:
    """down(swiglu(gate_up(x))); gate and up are one projection."""

    gate_up: Linear
    down: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.gate_up, self.down

    def add_to(self, residual: Tensor, delta: Delta, *, ops: Ops, norm: Tensor, eps: float, next_norm: Tensor) -> Delta:
        if self.down.takes_gates(len(residual)):
            return self.down.add_gated_to(residual, ops.norm_linear(residual, delta, norm, eps, self.gate_up))
        activated = ops.norm_swiglu(residual, delta, norm, eps, self.gate_up)
        return self.down.add_to(residual, activated, next_norm=next_norm)
