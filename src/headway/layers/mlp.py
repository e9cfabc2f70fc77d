"""The feed-forward half of a decoder layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from headway.layers.linear import Delta, Linear
from headway.layers.ops import Ops


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
        activated = ops.norm_swiglu(residual, delta, norm, eps, self.gate_up)
        return self.down.add_to(residual, activated, next_norm=next_norm)
