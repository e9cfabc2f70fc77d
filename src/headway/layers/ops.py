"""The operations a decoder is written in, beside `Linear` and attention: `Ops`, and the kinds of `Mlp`.

`TorchOps`, here, runs on any device and float dtype, `NativeOps` on the CPU in float32, `TritonOps` on CUDA. All
tensors of one call are on one device. A row's result never depends on the values of other rows. `residual` and `delta`
are explained in `layers/linear.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.attention.base import HeadNorms, Heads
from headway.kv.layer_cache import LayerKVCache
from headway.layers.linear import Delta, Gate, Linear, Norm


class Ops(ABC):
    """The operations of a decoder other than its linear layers and attention."""

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
        """Normalise (if there are norms) and rotate q and k, write k and v to the cache, and return q [T, Hq, D].

        qkv [T, heads.qkv_size] may be overwritten; positions and slot_mapping int64 [T]. The rotation pairs element i
        with element i + D/2 (the "neox" order). Only implementations that say so take slots below zero (padding).
        """


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


AddMlp = Callable[[Tensor, Delta], Delta]
"""(residual, delta): residual += delta, then residual += mlp(norm(residual)), IN PLACE or left to the next norm."""


class Mlp(Protocol):
    """A layer's MLP."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All of its weights."""
        ...

    @property
    def own(self) -> Mlp:
        """The MLP with this rank's parts as if they were the whole; see `Linear.own`."""
        ...

    def into_residual(self, norm: Norm, gate: Gate, next_norm: Tensor) -> AddMlp:
        """A function for the MLP, the norm before it and the sum after it, in the fastest forms that its weights have.
        Called once, at load. `next_norm` is as in `Linear.into_residual`."""
        ...


@dataclass(frozen=True)
class DenseMlp:
    """down(gate(gate_up(x))); gate and up are one projection."""

    gate_up: Linear
    down: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.gate_up, self.down

    @property
    def own(self) -> DenseMlp:
        return DenseMlp(self.gate_up, self.down.own)

    def into_residual(self, norm: Norm, gate: Gate, next_norm: Tensor) -> AddMlp:
        whole = self.down.whole_mlp(self.gate_up, norm)
        if whole is not None:
            return whole
        activated, add = self.gate_up.after_norm(norm, gate), self.down.into_residual(next_norm)
        gated = self.down.gated_into_residual()
        if gated is None:
            return lambda residual, delta: add(residual, activated(residual, delta))
        product, (gated_rows, add_gated) = self.gate_up.after_norm(norm), gated

        def add_mlp(residual: Tensor, delta: Delta) -> Delta:
            if len(residual) in gated_rows:
                return add_gated(residual, product(residual, delta))
            return add(residual, activated(residual, delta))

        return add_mlp
