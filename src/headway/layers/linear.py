"""The interface of linear layers: the product, and the fused forms in which a decoder layer uses it.

    kind             weight                                       module
    TorchLinear      as it is, any device and dtype               here
    TritonLinear     as it is, on CUDA                            triton_ops.py
    QuantizedLinear  codes of 8 or 4 bits and scales, on CUDA     quantized_linear.py
    Float32Linear    packed for the CPU kernels                   native_ops.py
    Int8Linear       quantised for the CPU kernels                native_ops.py
    Int4Linear       codes of 4 bits and scales, on the CPU       native_ops.py
    SummedLinear     any of them, inputs divided among ranks      collectives.py

A projection of a decoder layer reads a norm of the residual (`after_norm`), or adds to the residual (`into_residual`).
Both methods are called once, at load, and return a function. The default computes the steps one by one; a kind with
fused kernels returns a function that uses them for the numbers of rows that they are made for. So a kind that is
quantised, sharded or adapted keeps its fast paths, and no code that runs in a step asks a layer what it can do.

`residual` [T, hidden] is the running sum of the decoder and is changed in place. `delta` is what a projection into the
residual leaves for the next norm: the product, which the norm adds; or, if the product was added at once, nothing or
the first half of the norm's own work (`ScaledRows`).
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
    """Half-normed rows of the residual: each must still be divided by its root mean square."""

    values: Tensor
    """[T, hidden]: the residual times the norm's weight."""
    squares: Tensor
    """float32 [parts, T or more]: partial sums of squares of each row of the residual."""


Delta = Tensor | ScaledRows | None
AfterNorm = Callable[[Tensor, Delta], Tensor]
"""(residual, delta): residual += delta IN PLACE, then the projection of the residual's norm."""
IntoResidual = Callable[[Tensor, Tensor], Delta]
"""(residual, x): residual += projection of x, IN PLACE or by returning it as `delta` for the next norm to add."""
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
    """Whether `into_residual` adds to the residual itself if it can; otherwise the next norm adds the product."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that hold the weight and the bias, in any form."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @abstractmethod
    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The product, written to `out` if that is given."""

    @property
    def own(self) -> Linear:
        """The layer of this rank's part alone, if inputs are divided among ranks; otherwise the layer itself."""
        return self

    # ---- called once for each decoder layer, at load

    def after_norm(self, norm: Norm, gate: Gate | None = None) -> AfterNorm:
        """A function that computes the product of the residual's norm, and applies `gate` to it if given."""
        if gate is None:
            return lambda residual, delta: self(norm(residual, delta))
        return lambda residual, delta: gate(self(norm(residual, delta)))

    def into_residual(self, next_norm: Tensor) -> IntoResidual:
        """A function that adds the product to the residual. `next_norm` is the weight of the norm that follows."""
        return lambda residual, x: self(x)

    def gated_into_residual(self) -> tuple[range, IntoResidual] | None:
        """`into_residual` of silu(first half) * second half of x, and the numbers of rows for which it is faster than a
        separate gate; `None` if the layer has no kernel for it."""
        return None

    def whole_mlp(self, gate_up: Linear, norm: Norm) -> AfterNorm | None:
        """A function for the whole MLP that ends in this layer, if one call computes all of it; otherwise `None`."""
        return None


class TorchLinear(Linear):
    """Holds the weight [out, in] unchanged."""

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
