"""Random operands of a linear layer for few rows, and its result in float64.

Every operand lies between two stretches of NaN, and every result between two of a number that must stay as it is: a
program that reads or writes a little outside of its tensor shows.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.triton_device import DEVICE

_MARGIN = 64
_UNTOUCHED = 7.0
EPS = 1e-5


class Operands:
    """x [rows, in], weight [out, in] (twice the rows where `gated`), bias, norm and residual."""

    def __init__(
        self, rows: int, outputs: int, inputs: int, dtype: torch.dtype, *, gated: bool = False, seed: int = 0
    ) -> None:
        self._random = torch.Generator(DEVICE).manual_seed(seed)
        self._results: list[Tensor] = []
        weights = 2 * outputs if gated else outputs
        self.x = self._operand(rows, inputs, dtype=dtype)
        self.weight = self._operand(weights, inputs, dtype=dtype).div_(math.sqrt(inputs))
        self.bias = self._operand(weights, dtype=dtype)
        self.norm = self._operand(inputs, dtype=dtype)
        self.residual = self._result(rows, outputs, dtype=dtype)
        self.out = self._result(rows, outputs, dtype=dtype)

    def assert_nothing_outside_was_written(self) -> None:
        for memory in self._results:
            assert bool((memory[:_MARGIN] == _UNTOUCHED).all() and (memory[-_MARGIN:] == _UNTOUCHED).all())

    def _operand(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return self._inside(torch.full((math.prod(shape) + 2 * _MARGIN,), math.nan, dtype=dtype, device=DEVICE), shape)

    def _result(self, *shape: int, dtype: torch.dtype) -> Tensor:
        memory = torch.full((math.prod(shape) + 2 * _MARGIN,), _UNTOUCHED, dtype=dtype, device=DEVICE)
        self._results.append(memory)
        return self._inside(memory, shape)

    def _inside(self, memory: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A view of the memory between the margins, with random numbers."""
        inner = memory[_MARGIN:-_MARGIN].view(shape)
        return inner.copy_(torch.randn(shape, generator=self._random, device=DEVICE))


def expected(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm: Tensor | None = None,
    residual: Tensor | None = None,
    swiglu: bool = False,
) -> Tensor:
    """The layer in float64."""
    wide = x.double()
    if norm is not None:
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * norm.double()
    result = wide @ weight.double().T
    if bias is not None:
        result = result + bias.double()
    if swiglu:
        gate, value = result.chunk(2, dim=-1)
        result = F.silu(gate) * value
    if residual is not None:
        result = result + residual.double()
    return result


def assert_near(got: Tensor, expected: Tensor) -> None:
    """Sums are float32: 1e-5 of the largest value. Half precision is rounded once, as the result is stored.

    A whole epsilon for that, not half of one: the interpreter cuts bfloat16 off.
    """
    assert got.shape == expected.shape
    limit = torch.full_like(expected, 1e-5 * float(expected.abs().max()))
    if got.dtype != torch.float32:
        limit += torch.finfo(got.dtype).eps * expected.abs()
    error = (got.double() - expected).abs()
    assert bool((error <= limit).all()), f"off by {float((error / limit).max()):.3g} times the limit"
