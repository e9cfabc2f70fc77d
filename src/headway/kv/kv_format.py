"""In which numbers keys and values are cached: plain floats, or codes of 8 or 4 bits with a scale per token and head.

A scaled format keeps, for the key and for the value of one token and head, one float16 scale and head_dim codes:

    scale = float16(largest magnitude / largest code)      code = nearest(x / scale)      x ≈ code * scale

Nothing else is looked at, so what is stored for a token does not depend on the batch, on chunking, or on which kernel
wrote it: `encode` states the arithmetic to the bit, and the kernels follow it. Keys are encoded after rotation.

    format    keys                 values               bytes per token and head at head_dim 64 / 128
    int8      8-bit integers       8-bit integers       132 / 260
    fp8       float8 (e4m3fn)      float8 (e4m3fn)      132 / 260
    int4      8-bit integers       4-bit integers       100 / 196

Keys stay in 8 bits in `int4`: a few of their dimensions are many times larger than the others, and a 4-bit step sized
for these wipes the others out (docs/kv_quantisation.md has the measurement). Two 4-bit values share a byte: dimension
2 i in the low half, 2 i + 1 in the high half, each as code + 8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SCALE_DTYPE = torch.float16


@dataclass(frozen=True)
class Numbers:
    """How the keys, or the values, of one token and head are stored."""

    dtype: torch.dtype
    """Of the stored tensor."""
    bits: int
    """Per dimension."""
    largest: float | None = None
    """The largest code of a scaled format; `None`: stored as they are."""

    @property
    def packs_two(self) -> bool:
        """Two dimensions in one element of the stored tensor?"""
        return self.bits < 8

    def width(self, head_dim: int) -> int:
        """Elements of the stored tensor for `head_dim` dimensions."""
        return head_dim // 2 if self.packs_two else head_dim

    def num_bytes(self, head_dim: int) -> int:
        """For one token and head, with its scale."""
        scale_bytes = 0 if self.largest is None else SCALE_DTYPE.itemsize
        return head_dim * self.bits // 8 + scale_bytes

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [..., head_dim] -> stored [..., width], scale [...] where there is one."""
        if self.largest is None:
            return x.to(self.dtype), None
        x = x.float()
        scale = (x.abs().amax(-1) * _reciprocal(self.largest)).to(SCALE_DTYPE)
        inverse = torch.where(scale == 0, 0.0, 1.0 / scale.float())
        # The scale of a row with a NaN is NaN, and makes the whole row one; its codes mean nothing.
        levels = (x * inverse.unsqueeze(-1)).clamp(-self.largest, self.largest).nan_to_num(-self.largest)
        if self.dtype.is_floating_point:
            return levels.to(self.dtype), scale
        codes = levels.round()
        if not self.packs_two:
            return codes.to(self.dtype), scale
        even, odd = (codes + 8).to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
        return even | (odd << 4), scale

    def decode(self, stored: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """What `encode` gave, as numbers of `dtype` [..., head_dim]."""
        if scale is None:
            return stored.to(dtype)
        if self.packs_two:
            codes = torch.stack((stored & 15, stored >> 4), -1).flatten(-2).to(dtype) - 8
        else:
            codes = stored.to(dtype)
        return codes * scale.unsqueeze(-1).to(dtype)


@dataclass(frozen=True)
class KVFormat:
    """How a cache stores keys and values."""

    name: str
    keys: Numbers
    values: Numbers

    @property
    def is_scaled(self) -> bool:
        """Are there scales beside the stored numbers?"""
        return self.keys.largest is not None

    def num_bytes(self, head_dim: int) -> int:
        """For the key and the value of one token and head, scales included."""
        return self.keys.num_bytes(head_dim) + self.values.num_bytes(head_dim)

    @staticmethod
    def of(dtype: torch.dtype) -> KVFormat:
        """The format that stores keys and values in this dtype as they are."""
        return FORMATS[str(dtype).removeprefix("torch.")]

    @staticmethod
    def of_tensors(k: Tensor, v: Tensor) -> KVFormat:
        """The format of a cache's tensors."""
        return next(f for f in FORMATS.values() if (f.keys.dtype, f.values.dtype) == (k.dtype, v.dtype))


def _plain(dtype: torch.dtype) -> KVFormat:
    numbers = Numbers(dtype, dtype.itemsize * 8)
    return KVFormat(str(dtype).removeprefix("torch."), numbers, numbers)


def _reciprocal(largest: float) -> float:
    """1 / largest as a float32: kernels multiply by it, since their divisions may not round alike."""
    return float(torch.tensor(1.0 / largest, dtype=torch.float32))


_INT8 = Numbers(torch.int8, 8, largest=127.0)
_FP8 = Numbers(torch.float8_e4m3fn, 8, largest=448.0)
_INT4 = Numbers(torch.uint8, 4, largest=7.0)

FORMATS: dict[str, KVFormat] = {
    f.name: f
    for f in (
        _plain(torch.float32),
        _plain(torch.float16),
        _plain(torch.bfloat16),
        KVFormat("fp8", _FP8, _FP8),
        KVFormat("int8", _INT8, _INT8),
        KVFormat("int4", _INT8, _INT4),
    )
}
