"""Keys and values as codes and scales in Triton: the arithmetic of headway/attention/kv_format.py, to the bit.

A row is encoded from two parts that need not lie in the order of its dimensions: the halves that rotation works on, or
the even and the odd dimensions that share bytes in a 4-bit row. LARGEST is the largest code: 127, 448 or 7.
"""

from __future__ import annotations

import triton
import triton.language as tl

# 1.5 * 2^23: a float32 below 2^22 that is added to it loses its fraction, rounded to nearest even.
_ROUNDER = tl.constexpr(12582912.0)
_FP8_SUBNORMAL = tl.constexpr(16384.0)


@triton.jit
def row_scales(first: tl.tensor, second: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """float16 [rows]: the scales of float32 rows of which these are the two parts, each [rows, columns]."""
    largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
    RECIPROCAL: tl.constexpr = 1.0 / LARGEST
    return (largest * RECIPROCAL).to(tl.float16)


@triton.jit
def _levels(x: tl.tensor, scales: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """x / scale within the limits; `scales` [rows] of x [rows, columns]."""
    wide = scales.to(tl.float32)
    # Where the scale is 0, every x is so small that its code is 0 without it.
    inverse = tl.div_rn(tl.full(wide.shape, 1.0, tl.float32), tl.where(wide == 0.0, 1.0, wide))
    return tl.minimum(tl.maximum(x * inverse[:, None], -LARGEST), LARGEST)


@triton.jit
def _rounded_levels(x: tl.tensor, scales: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    return (_levels(x, scales, LARGEST) + _ROUNDER) - _ROUNDER


@triton.jit
def codes(x: tl.tensor, scales: tl.tensor, dtype: tl.constexpr, LARGEST: tl.constexpr) -> tl.tensor:
    """The codes of x [rows, columns] as elements of a cache of `dtype`: int8 or float8e4nv."""
    if dtype == tl.int8:
        stored = _rounded_levels(x, scales, LARGEST).to(tl.int8)
    else:
        # In integers, since the conversion to float8 is not on every device, and not exact in the interpreter.
        levels = _levels(x, scales, LARGEST)
        magnitude = tl.abs(levels)
        bits = magnitude.to(tl.int32, bitcast=True)
        normal = (bits + 0x7FFFF + ((bits >> 20) & 1) - (120 << 23)) >> 20
        subnormal = (magnitude + _FP8_SUBNORMAL).to(tl.int32, bitcast=True) - 0x46800000
        sign = (levels.to(tl.int32, bitcast=True) >> 24) & 128
        code = tl.where(magnitude < 0.015625, subnormal, normal) | sign
        stored = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return stored


@triton.jit
def paired_codes(even: tl.tensor, odd: tl.tensor, scales: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """4-bit codes of the even and the odd dimensions, two to a byte."""
    low = _rounded_levels(even, scales, LARGEST).to(tl.int32) + 8
    high = _rounded_levels(odd, scales, LARGEST).to(tl.int32) + 8
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def _shifted(natural: tl.tensor, zero: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """int16 0 .. 255 less `zero` as numbers of `dtype`. 0x6400 are the bits of 1024 as a float16, and from there on its
    bits count in ones, so that an integer becomes a float16 by sums alone: GPUs have few units that convert."""
    if dtype == tl.float16:
        numbers = (natural + 0x6400).to(tl.float16, bitcast=True) - (1024.0 + zero)
    else:
        numbers = natural.to(tl.float32).to(dtype) - zero
    return numbers


@triton.jit
def as_numbers(stored: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Codes as numbers of `dtype`, which holds them all; bytes [rows, columns] of two each as [rows, 2 * columns]."""
    if stored.dtype == tl.uint8:
        wide = stored.to(tl.int16)
        numbers = tl.interleave(_shifted(wide & 15, 8, dtype), _shifted(wide >> 4, 8, dtype))
    elif stored.dtype == tl.int8:
        numbers = _shifted(stored.to(tl.int16) + 128, 128, dtype)
    else:
        numbers = stored.to(dtype)
    return numbers


@triton.jit
def load_scales(scales: tl.tensor, at: tl.tensor, mask: tl.tensor | None) -> tuple[tl.tensor, tl.tensor]:
    """float32 scales of keys and of values in the slots `at`; `scales` points at int32, each a pair of float16."""
    if mask is None:
        pair = tl.load(scales + at)
    else:
        pair = tl.load(scales + at, mask=mask, other=0)
    keys = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    values = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return keys.to(tl.float32), values.to(tl.float32)
