"""`QuantizedLinear`: a linear layer on CUDA whose weight stays codes and scales. Its products, chosen by measurement:

    rows            FP8, INT8 with one scale per output     codes with scales of groups (INT4, GGUF)
    1               floats × codes, with norm, gate, sum    the same; large 4-bit weights as for few rows
    few             rows become codes; codes × codes        floats × codes; up to 16 rows with half a norm
    many            FP8: torch's own; INT8: as few, or      the weight becomes floats first; cuBLAS
                    the weight becomes floats first

FP8 in blocks is multiplied as codes × codes, and as floats for many rows. Rows become codes in the kernel that computes
the norm or the gate before. With float32 activations the weight always becomes floats first: the sums are then those of
the float weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.layers import quantized_gemm as gemm
from headway.layers import skinny_gemm
from headway.layers.linear import AfterNorm, Delta, Gate, IntoResidual, Linear, Norm, ScaledRows
from headway.layers.quantized_weight import FP8, QuantizedWeight

# With more rows than these another product is faster; measured on an H200 (benchmarks/quantized_gemm.py).
MAX_CODES_ROWS = 256
MAX_WIDE_CODES_ROWS = 64  # of wide outputs, for which torch has enough tiles to fill the device
MAX_INT8_ROWS = 512
MAX_FLOATS_ROWS = 256
_WIDE_OUTPUTS = 8192
_MOST_ROWS = 2**31


class QuantizedLinear(Linear):
    """Packs the weight on construction, on the weight's device."""

    adds_in_place = True

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, *, dtype: torch.dtype) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight = gemm.pack(weight, dtype)
        self.bias = bias
        self._is_direct = dtype.itemsize == 2 and self.weight.has_product
        is_small = not self.weight.is_int4 or self.weight.codes.numel() <= skinny_gemm.MAX_ROW_WORDS
        self._takes_one_row = self._is_direct and is_small
        self._multiplies_codes = self._is_direct and self.weight.takes_codes
        is_even = self.out_features % 16 == 0 and self.in_features % 16 == 0
        self._in_library = self.weight.codes.dtype == FP8 and self.weight.group_size == 0 and is_even
        self._max_few, self._codes_rows = MAX_FLOATS_ROWS, range(0)
        if self._multiplies_codes:
            in_library = MAX_CODES_ROWS if self.out_features <= _WIDE_OUTPUTS else MAX_WIDE_CODES_ROWS
            self._max_few = in_library if self._in_library else MAX_INT8_ROWS
            self._codes_rows = range(_MOST_ROWS if self._in_library else self._max_few + 1)
        gemm.prepare(self.weight.codes.device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.weight.tensors if self.bias is None else (*self.weight.tensors, self.bias)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if self._is_one_row(x):
            return skinny_gemm.one_row(self._ordered(x), self.weight, self.bias, out=out)
        if len(x) in self._codes_rows:
            return self._product(*gemm.quantise_rows(x, self.weight.codes.dtype), dtype=x.dtype, out=out)
        if self._is_direct and len(x) <= self._max_few:
            return gemm.multiply_floats(self._ordered(x), self.weight, self.bias, out=out)[0]
        product = F.linear(self._ordered(x), gemm.dequantise(self.weight, x.dtype), self.bias)
        return product if out is None else out.copy_(product)

    def into_residual(self, next_norm: Tensor) -> IntoResidual:
        def add(residual: Tensor, x: Tensor) -> Delta:
            if self._is_one_row(x):
                skinny_gemm.one_row(self._ordered(x), self.weight, self.bias, residual=residual)
                return None
            if len(x) in self._codes_rows:
                return self._add_codes(residual, *gemm.quantise_rows(x, self.weight.codes.dtype))
            if self._is_direct and len(x) <= self._max_few:
                norm, ordered = next_norm if len(x) <= gemm.MAX_SCALED_ROWS else None, self._ordered(x)
                return gemm.multiply_floats(ordered, self.weight, self.bias, residual=residual, next_norm=norm)[1]
            if self.bias is not None:
                residual.add_(self.bias)
            residual.addmm_(self._ordered(x), gemm.dequantise(self.weight, x.dtype).t())
            return None

        return add

    def gated_into_residual(self) -> tuple[range, IntoResidual] | None:
        def add(residual: Tensor, gate_up: Tensor) -> Delta:
            return self._add_codes(residual, *gemm.quantise_rows(gate_up, self.weight.codes.dtype, silu=True))

        return (self._codes_rows[2:], add) if self._codes_rows else None

    def after_norm(self, norm: Norm, gate: Gate | None = None) -> AfterNorm:
        steps, weight, bias, eps = super().after_norm(norm), self.weight, self.bias, norm.eps

        def product(residual: Tensor, delta: Delta) -> Tensor:
            if isinstance(delta, ScaledRows) and self._takes_scaled(delta):
                return gemm.multiply_floats(delta.values, weight, bias, squares=delta.squares, eps=eps)[0]
            if len(residual) not in self._codes_rows:
                return steps(residual, delta)
            added = delta if isinstance(delta, Tensor) else None
            coded = gemm.quantise_rows(added, weight.codes.dtype, residual=residual, norm=norm.weight, eps=eps)
            return self._product(*coded, dtype=residual.dtype)

        def run(residual: Tensor, delta: Delta) -> Tensor:
            if delta is None and self._is_one_row(residual) and weight.order is None:
                is_gated = gate is not None
                return skinny_gemm.one_row(residual, weight, bias, norm=norm.weight, eps=eps, swiglu=is_gated)
            made = product(residual, delta)
            return made if gate is None else gate(made)

        return run

    def _product(self, codes: Tensor, scales: Tensor, *, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """The product of rows of codes with the weight."""
        if self._in_library and len(codes) > self._max_few:
            product = torch._scaled_mm(
                codes,
                self.weight.codes.t(),
                scale_a=scales[:, None],
                scale_b=self.weight.scales[None, :],
                out_dtype=torch.bfloat16,  # with a scale per row, torch has no float16 output
                use_fast_accum=True,
            ).to(dtype)
            if self.bias is not None:
                product += self.bias
            return product if out is None else out.copy_(product)
        if out is None:
            out = torch.empty(len(codes), self.out_features, dtype=dtype, device=codes.device)
        return gemm.multiply_codes(codes, scales, self.weight, self.bias, out)

    def _add_codes(self, residual: Tensor, codes: Tensor, scales: Tensor) -> Delta:
        if self._in_library and len(codes) > self._max_few:
            return self._product(codes, scales, dtype=residual.dtype)
        gemm.multiply_codes(codes, scales, self.weight, self.bias, residual, residual=residual)
        return None

    def _ordered(self, x: Tensor) -> Tensor:
        return x if self.weight.order is None else x.index_select(1, self.weight.order)

    def _takes_scaled(self, rows: ScaledRows) -> bool:
        """Whether half-normed rows can be multiplied directly. Other kinds of layers leave more and other parts."""
        is_direct = self._is_direct and not self._multiplies_codes and self.weight.order is None
        return is_direct and len(rows.values) <= gemm.MAX_SCALED_ROWS

    def _is_one_row(self, x: Tensor) -> bool:
        return self._takes_one_row and len(x) == 1
