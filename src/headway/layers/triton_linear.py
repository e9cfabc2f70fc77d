"""A linear layer on CUDA: cuBLAS and, for few rows, the fused matmuls of `skinny_gemm`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.layers import skinny_gemm
from headway.layers.linear import Delta, ScaledRows, TorchLinear


class TritonLinear(TorchLinear):
    """`skinny`: few rows go to `skinny_gemm`; otherwise cuBLAS takes all matmuls.

    `add_to` accumulates into the residual inside the matmul, so between layers nothing is left to add.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, skinny: bool = True) -> None:
        super().__init__(weight, bias)
        self._skinny = skinny

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if self._is_one_row(x):
            return skinny_gemm.one_row(x, self.weight, self.bias, out=out)
        if out is None:
            return F.linear(x, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)

    def add_to(self, residual: Tensor, x: Tensor, *, next_norm: Tensor) -> Delta:
        if self._is_one_row(x):
            skinny_gemm.one_row(x, self.weight, self.bias, residual=residual)
            return None
        if self._skinny and skinny_gemm.supports_split(x, self.weight):
            return skinny_gemm.split_add(x, self.weight, self.bias, residual, next_norm)
        if self.bias is not None:
            residual.add_(self.bias)
        residual.addmm_(x, self.weight.t())
        return None

    def norm_linear(self, residual: Tensor, delta: Delta, norm: Tensor, eps: float) -> Tensor | None:
        if delta is None and self._is_one_row(residual):
            return skinny_gemm.one_row(residual, self.weight, self.bias, norm=norm, eps=eps)
        if isinstance(delta, ScaledRows):
            return skinny_gemm.scaled_linear(delta, self.weight, self.bias, eps)
        return None

    def norm_swiglu(self, residual: Tensor, delta: Delta, norm: Tensor, eps: float) -> Tensor | None:
        if delta is None and self._is_one_row(residual):
            return skinny_gemm.one_row(residual, self.weight, self.bias, norm=norm, eps=eps, swiglu=True)
        if isinstance(delta, ScaledRows):
            return skinny_gemm.swiglu(delta.values, self.weight, self.bias, squares=delta.squares, eps=eps)
        return None

    def swiglu(self, x: Tensor) -> Tensor | None:
        if self._skinny and skinny_gemm.supports_swiglu(x, self.weight):
            return skinny_gemm.swiglu(x, self.weight, self.bias)
        return None

    def _is_one_row(self, x: Tensor) -> bool:
        return self._skinny and skinny_gemm.supports_one_row(x, self.weight)
