"""A linear layer with float32 weights packed for the CPU kernels: the exact reference, at the speed of the FMA units.

Each output is one chain of fused multiply-adds in input order, so it is the same in any batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway import native
from headway.native.lib import RELEASE_LOCK_MACS, check


class Float32Linear:
    """Packs the weight [out, in] on construction and keeps only the packed form."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._packed = native.pack_float32(weight.to(torch.float32).contiguous())
        self._bias = None if bias is None else bias.to(torch.float32).contiguous()
        self.num_bytes = self._packed.data.nbytes + (self._bias.nbytes if self._bias is not None else 0)
        self._weight_pointer = self._packed.data.data_ptr()
        self._bias_pointer = None if self._bias is None else self._bias.data_ptr()
        self._held = self._packed.library.held.hw_f32_linear
        self._released = self._packed.library.released.hw_f32_linear
        self._long_rows = RELEASE_LOCK_MACS // (self.out_features * self.in_features) + 1

    def __call__(self, x: Tensor) -> Tensor:
        rows, columns = check(x, torch.float32, "x").shape
        if columns != self.in_features:
            raise ValueError(f"x has {columns} columns, the layer takes {self.in_features}")
        out = torch.empty(rows, self.out_features)
        run = self._released if rows >= self._long_rows else self._held
        run(
            x.data_ptr(),
            rows,
            columns,
            self._weight_pointer,
            self.out_features,
            self._bias_pointer,
            out.data_ptr(),
        )
        return out
