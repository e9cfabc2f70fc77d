"""Linear layers whose weight is packed for the CPU kernels. A row's result does not depend on the other rows.

`Int8Linear`: symmetric int8 with one scale per output channel and group of 64 inputs; activations are quantised the
same way inside each call. `Float32Linear`: the exact reference; each output is one chain of fused multiply-adds in
input order. Activations go in and come out as float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway import native
from headway.layers.linear import Linear
from headway.native.lib import RELEASE_LOCK_MACS, PackedWeight, check


class PackedLinear(Linear):
    """Keeps only the packed weight. Addresses and functions are looked up once: a decode step is many short calls."""

    def __init__(self, packed: PackedWeight, bias: Tensor | None) -> None:
        self.out_features, self.in_features = packed.out_features, packed.in_features
        self._packed = packed
        self._bias = None if bias is None else check(bias, torch.float32, "bias")
        if self._bias is not None and self._bias.shape != (self.out_features,):
            raise ValueError(f"bias has shape {tuple(self._bias.shape)}, the weight has {self.out_features} outputs")
        self._weight_pointer = packed.data.data_ptr()
        self._bias_pointer = None if self._bias is None else self._bias.data_ptr()
        self._held = getattr(packed.library.held, packed.kernel)
        self._released = getattr(packed.library.released, packed.kernel)
        self._long_rows = RELEASE_LOCK_MACS // (self.out_features * self.in_features) + 1

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._packed.data,) if self._bias is None else (self._packed.data, self._bias)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        rows, columns = check(x, torch.float32, "x").shape
        if columns != self.in_features:
            raise ValueError(f"x has {columns} columns, the layer takes {self.in_features}")
        product = torch.empty(rows, self.out_features)
        run = self._released if rows >= self._long_rows else self._held
        run(
            x.data_ptr(),
            rows,
            columns,
            self._weight_pointer,
            self.out_features,
            self._bias_pointer,
            product.data_ptr(),
        )
        return product if out is None else out.copy_(product)


class Int8Linear(PackedLinear):
    """Quantises the weight [out, in] on construction."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(native.pack_int8(_float32(weight)), None if bias is None else _float32(bias))


class Float32Linear(PackedLinear):
    """Packs the weight [out, in] on construction."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(native.pack_float32(_float32(weight)), None if bias is None else _float32(bias))


def _float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32).contiguous()
