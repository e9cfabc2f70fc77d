"""What a linear layer is: the product, the fused forms that a kind of it offers, and which kind a checkpoint's weight
becomes.

    kind             weight                                       module
    TorchLinear      as it is, any device and dtype               here
    TritonLinear     as it is, on CUDA                            triton_ops.py
    QuantizedLinear  codes of 8 or 4 bits and scales, on CUDA     quantized_linear.py
    Float32Linear    packed for the CPU kernels                   packed_linear.py
    Int8Linear       quantised for the CPU kernels                packed_linear.py
    Int4Linear       codes of 4 bits and scales, on the CPU       packed_linear.py

A layer is asked for a fused form and answers None where it has none for these rows; `Ops` then computes the steps one
by one. So a kind that is quantised, sharded or adapted keeps the fast paths that it implements, and a caller never
looks at the kind.

`residual` [T, hidden] is the running sum of the decoder and is changed in place. `delta` is what `add_to`, which
projects back to it, leaves for the norm that follows: the product, for the norm to add; or, where it was added at once,
nothing, or the first half of the norm's own work (`ScaledRows`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from headway.layers.quantized_weight import ONLINE_FORMATS

QUANTIZATION_NAMES = ("none", *ONLINE_FORMATS)


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """Rows of the residual on their way through a norm: what is left is to divide each by its root mean square."""

    values: Tensor
    """[T, hidden]: the residual times the norm's weight."""
    squares: Tensor
    """float32 [parts, T or more]: parts of the sum of squares of each row of the residual."""


Delta = Tensor | ScaledRows | None


class Linear(ABC):
    """y = x @ weight.T + bias. x [T, in_features], y [T, out_features]."""

    in_features: int
    out_features: int
    adds_in_place = False
    """Whether `add_to` adds to the residual itself, where it can, or always leaves the product to the next norm."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """What holds the weight and the bias in memory, in whatever form."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @abstractmethod
    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The product, written to `out` where that is given."""

    @property
    def own(self) -> Linear:
        """The layer whose products are this rank's parts, where inputs are divided among ranks."""
        return self

    def summed(self, product: Tensor) -> Tensor:
        """The whole of a product of `own`."""
        return product

    def add_to(self, residual: Tensor, x: Tensor, *, next_norm: Tensor) -> Delta:
        """residual += self(x), IN PLACE or left to the next norm, whose weight is `next_norm`. Returns its `delta`.

        The only way from a product to the residual: `o` and `down` take it. Where their inputs are divided among
        ranks, `SummedLinear` sums the parts (`collectives.py`) before anything is added.
        """
        return self(x)

    def takes_gates(self, rows: Tensor) -> bool:
        """Whether `add_gated_to` is a faster way for as many rows."""
        return False

    def add_gated_to(self, residual: Tensor, gate_up: Tensor) -> Delta:
        """`add_to` of silu(first half) * second half of `gate_up`, where a kernel of the layer computes that."""
        raise NotImplementedError

    def norm_linear(self, residual: Tensor, delta: Delta, norm: Tensor, eps: float) -> Tensor | None:
        """self(norm of the residual), where one kernel does both; `delta` is taken as `Ops.norm` takes it."""
        return None

    def norm_mlp(self, residual: Tensor, delta: Delta, norm: Tensor, eps: float, down: Linear) -> Tensor | None:
        """down(`norm_swiglu`), where one call does both."""
        return None

    def norm_swiglu(self, residual: Tensor, delta: Delta, norm: Tensor, eps: float) -> Tensor | None:
        """`swiglu` of the norm of the residual, where one kernel does both."""
        return None

    def swiglu(self, x: Tensor) -> Tensor | None:
        """silu(first half) * second half of self(x), where one kernel does both."""
        return None


class TorchLinear(Linear):
    """Holds the weight [out, in] as it is given."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.out_features, self.in_features = weight.shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        product = F.linear(x, self.weight, self.bias)
        return product if out is None else out.copy_(product)
