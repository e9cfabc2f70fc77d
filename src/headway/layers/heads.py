"""How the fused q, k, v projection divides into heads, and what is done to them before attention."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Heads:
    """What is the same in every layer of a model. A row of qkv is `num_heads` q heads, then the k, then the v heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    cos_sin: Tensor = field(repr=False)
    """float32 [max_position, head_dim]: in each row the cosines of the head_dim / 2 pairs, then their sines."""
    eps: float
    """Of the head norms, in the layers that have them."""

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, eq=False)
class HeadNorms:
    """One layer's RMS norms over each head, weights [head_dim]."""

    q: Tensor
    k: Tensor
