"""What a linear layer is: the product, and the forms in which a decoder layer uses it.

    kind             weight                                       module
    TorchLinear      as it is, any device and dtype               here
    TritonLinear     as it is, on CUDA                            triton_ops.py
    QuantizedLinear  codes of 8 or 4 bits and scales, on CUDA     quantized_linear.py
    Float32Linear    packed for the CPU kernels                   native_ops.py
    Int8Linear       quantised for the CPU kernels                native_ops.py
    Int4Linear       codes of 4 bits and scales, on the CPU       native_ops.py
    SummedLinear     any of them, its inputs among ranks          collectives.py

A projection of a decoder layer reads a norm of the residual (`after_norm`), or adds to the residual (`into_residual`).
For both a layer is asked once, at load, and gives a function. The default computes the steps one by one; a kind with
kernels for several steps gives a function that uses these for the rows that they are made for. So a kind that is
quantised, sharded or adapted keeps its fast ways, and nothing that runs in a step asks a layer what it can do.

`residual` [T, hidden] is the running sum of the decoder and is changed in place. `delta` is what a projection back to
it leaves for the norm that follows: the product, for the norm to add; or, where it was added at once, nothing, or the
first half of the norm's own work (`ScaledRows`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
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
AfterNorm = Callable[[Tensor, Delta], Tensor]
"""(residual, delta): residual += delta IN PLACE, then what a projection makes of the residual's norm."""
IntoResidual = Callable[[Tensor, Tensor], Delta]
"""(residual, x): residual += projection of x, IN PLACE or left to the next norm as the `delta` that is returned."""
Gate = Callable[[Tensor], Tensor]
"""silu(first half) * second half of each row."""


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """A norm of the residual, as the model's operations compute it."""

    weight: Tensor
    eps: float
    compute: Callable[[Tensor, Delta, Tensor, float], Tensor]
    """`Ops.norm`"""

    def __call__(self, residual: Tensor, delta: Delta) -> Tensor:
        return self.compute(residual, delta, self.weight, self.eps)


class Linear(ABC):
    """y = x @ weight.T + bias. x [T, in_features], y [T, out_features]."""

    in_features: int
    out_features: int
    adds_in_place = False
    """Whether `into_residual` adds to the residual itself where it can; otherwise the next norm adds the product."""

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

    # What a decoder layer asks for, once.

    def after_norm(self, norm: Norm, gate: Gate | None = None) -> AfterNorm:
        """The product of the residual's norm; with a `gate`, what that makes of the product."""
        if gate is None:
            return lambda residual, delta: self(norm(residual, delta))
        return lambda residual, delta: gate(self(norm(residual, delta)))

    def into_residual(self, next_norm: Tensor) -> IntoResidual:
        """The product, on its way to the residual. `next_norm`: the weight of the norm that follows."""
        return lambda residual, x: self(x)

    def gated_into_residual(self) -> tuple[range, IntoResidual] | None:
        """`into_residual` of silu(first half) * second half of x, and for how many rows that is faster than a gate
        before; `None` where the layer has no kernel for it."""
        return None

    def whole_mlp(self, gate_up: Linear, norm: Norm) -> AfterNorm | None:
        """The product of the MLP that ends in this layer, where one call computes all of it."""
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
