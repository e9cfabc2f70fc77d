"""The scaled formats of the KV cache: how numbers become codes and scales, and how these are read back.

The encoding uses only the vector of one token and head, so a token's stored bytes do not depend on the batch, on
chunking, or on which kernel wrote them: `encode` defines the arithmetic to the bit, and the kernels follow it. Keys are
encoded after rotation. Two 4-bit codes share a byte: dimension 2 i in the low half, 2 i + 1 in the high half, each as
code + 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.kv_formats import FORMATS, KVFormat, Numbers

SCALE_DTYPE = torch.float16


def plain_format(dtype: torch.dtype) -> KVFormat:
    """The format that stores keys and values in this dtype as they are."""
    return FORMATS[str(dtype).removeprefix("torch.")]


def stored_dtype(numbers: Numbers) -> torch.dtype:
    """The dtype of the stored tensor."""
    dtype: torch.dtype = getattr(torch, numbers.stored_as)
    return dtype


def encode(numbers: Numbers, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """x [..., head_dim] -> stored [..., head_dim / dims_per_element], scale [...] where there is one."""
    if numbers.largest is None:
        return x.to(stored_dtype(numbers)), None
    x = x.float()
    scale = (x.abs().amax(-1) * _reciprocal(numbers.largest)).to(SCALE_DTYPE)
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale.float())
    # The scale of a row with a NaN is NaN, so the whole row reads as NaN and its codes mean nothing.
    levels = (x * inverse.unsqueeze(-1)).clamp(-numbers.largest, numbers.largest).nan_to_num(-numbers.largest)
    dtype = stored_dtype(numbers)
    if dtype.is_floating_point:
        return levels.to(dtype), scale
    codes = levels.round()
    if numbers.dims_per_element == 1:
        return codes.to(dtype), scale
    even, odd = (codes + 8).to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return even | (odd << 4), scale


def decode(numbers: Numbers, stored: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Turn the results of `encode` back into numbers of `dtype` [..., head_dim]."""
    if scale is None:
        return stored.to(dtype)
    if numbers.dims_per_element == 1:
        codes = stored.to(dtype)
    else:
        codes = torch.stack((stored & 15, stored >> 4), -1).flatten(-2).to(dtype) - 8
    return codes * scale.unsqueeze(-1).to(dtype)


def _reciprocal(largest: float) -> float:
    """1 / largest as a float32. Kernels multiply by it, because their divisions may round differently."""
    return float(torch.tensor(1.0 / largest, dtype=torch.float32))
