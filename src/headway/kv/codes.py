"""Keys and values as codes and scales in Triton: the arithmetic of headway/kv/format.py, to the bit.

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
