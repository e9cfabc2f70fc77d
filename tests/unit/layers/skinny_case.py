"""Random operands of a linear layer for few rows, and its result in float64.

Every operand lies between two stretches of NaN, and every result between two of a number that must stay as it is: a
program that reads or writes a little outside of its tensor shows.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.triton_device import DEVICE  # isort: split

from headway.layers.linear import ScaledRows
from headway.layers.skinny_gemm import _block_m, split_add

_MARGIN = 64
_UNTOUCHED = 7.0
EPS = 1e-5


class Operands:
    """x [rows, in], weight [out, in] (twice the rows where `gated`), bias, residual, and norms of input and result."""

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
        self.next_norm = self._operand(outputs, dtype=dtype)
        self.residual = self._result(rows, outputs, dtype=dtype)
        self.out = self._result(rows, outputs, dtype=dtype)

    def scaled_rows(self, num_parts: int) -> ScaledRows:
        """x as rows still to be divided by the root of random mean squares. Rows of padding have squares of NaN."""
        squares = self._operand(num_parts, _block_m(self.x), dtype=torch.float32)
        squares.square_().mul_(self.x.shape[1] / num_parts)
        squares[:, len(self.x) :] = math.nan
        return ScaledRows(self.x, squares)

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
    squares: Tensor | None = None,
    residual: Tensor | None = None,
    swiglu: bool = False,
) -> Tensor:
    """The layer in float64. With `squares` x is `ScaledRows`."""
    wide = x.double()
    if squares is not None:
        total = squares[:, : len(x)].double().sum(0)
        wide = wide * torch.rsqrt(total / x.shape[1] + EPS)[:, None]
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


def check_split_add(case: Operands, bias: Tensor | None) -> ScaledRows:
    """`split_add` of the operands: the sum, and of the sum as it was rounded the first half of the norm."""
    wanted = expected(case.x, case.weight, bias, residual=case.residual)
    scaled = split_add(case.x, case.weight, bias, case.residual, case.next_norm)
    assert_near(case.residual, wanted)
    total = case.residual.double()
    assert_near(scaled.values, total * case.next_norm.double())
    assert_near(scaled.squares.sum(0)[: len(case.x)], total.square().sum(1))
    case.assert_nothing_outside_was_written()
    return scaled
