"""The vocabulary a decoder is written in. An implementation decides where and how; the model never asks.

`TorchOps` runs on any device and float dtype, `NativeOps` on the CPU in float32, `TritonOps` on CUDA. The words are as
large as the largest step that one of them fuses: a norm with the projection behind it, a projection with the sum behind
it. All tensors of one call live on one device. A row's result never depends on the values of other rows.

`residual` [T, hidden] is the running sum of the decoder and is changed in place. `delta` is what `linear_add`, which
projects back to it, leaves for the norm that follows: the product, for the norm to add; or, where it was added at once,
nothing, or the first half of the norm's own work (`ScaledRows`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from headway.kv.layer_cache import LayerKVCache
from headway.layers.heads import HeadNorms, Heads


class Linear(Protocol):
    """y = x @ weight.T + bias; how the weight is stored is its own business."""

    in_features: int
    out_features: int
    num_bytes: int
    """Memory held by the weight and the bias, in whatever form they are stored."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, out_features]"""
        ...


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """Rows of the residual on their way through a norm: what is left is to divide each by its root mean square."""

    values: Tensor
    """[T, hidden]: the residual times the norm's weight."""
    squares: Tensor
    """float32 [parts, T or more]: parts of the sum of squares of each row of the residual."""


Delta = Tensor | ScaledRows | None


class Ops(Protocol):
    """Everything in a decoder but attention."""

    name: str

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """token_ids int64 [T], table [vocab, hidden] -> [T, hidden], a new tensor."""
        ...

    def norm(self, residual: Tensor, delta: Delta, weight: Tensor, eps: float) -> Tensor:
        """residual += delta IN PLACE; returns it scaled to unit root mean square, times weight, as a new tensor."""
        ...

    def norm_linear(self, residual: Tensor, delta: Delta, weight: Tensor, eps: float, linear: Linear) -> Tensor:
        """linear(norm(residual, delta, weight, eps)); residual += delta IN PLACE."""
        ...

    def norm_swiglu(self, residual: Tensor, delta: Delta, weight: Tensor, eps: float, gate_up: Linear) -> Tensor:
        """norm_linear with `gate_up`, then silu(first half) * second half: [T, gate_up.out_features / 2]."""
        ...

    def linear(self, x: Tensor, linear: Linear, out: Tensor | None = None) -> Tensor:
        """linear(x), with nothing before or after it; written to `out` where that is given."""
        ...

    def linear_add(self, x: Tensor, linear: Linear, residual: Tensor, next_norm: Tensor) -> Delta:
        """residual += linear(x), IN PLACE or left to the next norm, whose weight is `next_norm`. Its `delta`."""
        ...

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
        ...
