"""Keys and values as codes and scales in Triton: the arithmetic of headway/kv/codes.py, to the bit.

Writing: a row is encoded from two parts that need not lie in the order of its dimensions: the halves that rotation
works on, or the even and the odd dimensions that share bytes in a 4-bit row. LARGEST is the largest code: 127, 448 or
7.

Reading: decoding is bound by memory only if converting a code takes few instructions. Keys are read along their
dimensions, as the matrix unit needs them. Values are read across tokens, and the instruction that transposes a tile
supports only elements of 16 bits; bytes would be fetched one by one. So values are read as 16-bit words, each holding
the codes of n = 2 or 4 neighbouring dimensions, and the result is kept in n parts: part i has the dimensions i, i + n,
i + 2 n …

    word      d0 d1 | d2 d3 | d4 d5          8-bit codes: 2 parts
    part 0    d0      d2      d4
    part 1       d1      d3      d5

`code_type` is the dtype of the cache's values: int8, float8e4nv, or uint8 for two codes of 4 bits. Speed-critical
conversions are written twice: in PTX for the GPU, where a few instructions convert four codes at once, and in plain
Triton for the interpreter and for float32.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="assignment"

from __future__ import annotations

import os

import triton
import triton.language as tl

# 1.5 * 2^23: a float32 below 2^22 that is added to it loses its fraction, rounded to nearest even.
_ROUNDER = tl.constexpr(12582912.0)
_FP8_SUBNORMAL = tl.constexpr(16384.0)
_HAS_PTX = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")

# An integer below 1024 becomes a float16 by putting it below the bits of 1024, 0x6400, and taking that away again.
_KEYS_OF_INT8 = tl.constexpr("""{
    .reg .b32 codes, high, zero;
    xor.b32 codes, $2, 0x80808080;
    mov.b32 high, 0x64646464;
    mov.b32 zero, 0x64806480;
    prmt.b32 $0, codes, high, 0x4140;
    prmt.b32 $1, codes, high, 0x4342;
    sub.f16x2 $0, $0, zero;
    sub.f16x2 $1, $1, zero;
}""")
_PARTS_OF_INT8 = tl.constexpr("""{
    .reg .b32 codes, high, zero;
    xor.b32 codes, $2, 0x80808080;
    mov.b32 high, 0x64646464;
    mov.b32 zero, 0x64806480;
    prmt.b32 $0, codes, high, 0x4240;
    prmt.b32 $1, codes, high, 0x4341;
    sub.f16x2 $0, $0, zero;
    sub.f16x2 $1, $1, zero;
}""")
_PARTS_OF_FP8 = tl.constexpr("""{
    .reg .b32 sorted;
    .reg .b16 even, odd;
    prmt.b32 sorted, $2, $2, 0x3120;
    mov.b32 {even, odd}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}""")
_PARTS_OF_INT4 = tl.constexpr("""{
    .reg .b32 second, third, fourth, zero;
    shr.b32 second, $4, 4;
    shr.b32 third, $4, 8;
    shr.b32 fourth, $4, 12;
    mov.b32 zero, 0x64086408;
    lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $1, second, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $2, third, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $3, fourth, 0x000f000f, 0x64006400, 0xea;
    sub.f16x2 $0, $0, zero;
    sub.f16x2 $1, $1, zero;
    sub.f16x2 $2, $2, zero;
    sub.f16x2 $3, $3, zero;
}""")


@triton.jit
def row_codes(first: tl.tensor, second: tl.tensor, dtype: tl.constexpr, LARGEST: tl.constexpr):
    """The scales [rows] of float32 rows whose two parts are [rows, columns], and the codes of these parts.

    In a cache of uint8 the two share bytes: the parts are the even and the odd dimensions, and both results are these
    bytes.
    """
    scales = _row_scales(first, second, LARGEST)
    if dtype == tl.uint8:
        low = _rounded_levels(first, scales, LARGEST).to(tl.int32) + 8
        high = _rounded_levels(second, scales, LARGEST).to(tl.int32) + 8
        first_codes = (low | (high << 4)).to(tl.uint8)
        second_codes = first_codes
    else:
        first_codes = _codes(first, scales, dtype, LARGEST)
        second_codes = _codes(second, scales, dtype, LARGEST)
    return scales, first_codes, second_codes


@triton.jit
def _row_scales(first: tl.tensor, second: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
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
def _codes(x: tl.tensor, scales: tl.tensor, dtype: tl.constexpr, LARGEST: tl.constexpr) -> tl.tensor:
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
def key_numbers(stored, dtype: tl.constexpr):
    """Keys as numbers of `dtype`, which holds every code."""
    if stored.dtype == tl.int8 and dtype == tl.float16 and _HAS_PTX:
        numbers = tl.inline_asm_elementwise(
            _KEYS_OF_INT8, "=&r,=&r,r", [stored], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        numbers = stored.to(dtype)
    return numbers


@triton.jit
def _code(words, place: tl.constexpr, bits: tl.constexpr):
    """int32: `bits` bits of each word, the ones at `place`."""
    return (words.to(tl.int32) >> (place * bits)) & ((1 << bits) - 1)


@triton.jit
def _part(words, place: tl.constexpr, code_type: tl.constexpr, dtype: tl.constexpr):
    if code_type == tl.uint8:
        numbers = (_code(words, place, 4) - 8).to(dtype)
    else:
        numbers = _code(words, place, 8).to(tl.uint8).to(code_type, bitcast=True).to(dtype)
    return numbers


@triton.jit
def value_parts(words, code_type: tl.constexpr, dtype: tl.constexpr):
    """Words [rows, columns] as a tuple of 2 (codes of 8 bits) or 4 (of 4 bits) parts in numbers of `dtype`."""
    PTX: tl.constexpr = _HAS_PTX and dtype == tl.float16
    if code_type == tl.uint8:
        if PTX:
            parts = tl.inline_asm_elementwise(
                _PARTS_OF_INT4,
                "=&r,=&r,=&r,=&r,r",
                [words],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            parts = (
                _part(words, 0, code_type, dtype),
                _part(words, 1, code_type, dtype),
                _part(words, 2, code_type, dtype),
                _part(words, 3, code_type, dtype),
            )
    elif PTX:
        CODE: tl.constexpr = _PARTS_OF_INT8 if code_type == tl.int8 else _PARTS_OF_FP8
        parts = tl.inline_asm_elementwise(
            CODE, "=&r,=&r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        parts = (_part(words, 0, code_type, dtype), _part(words, 1, code_type, dtype))
    return parts


# No early returns from here on: what follows one is compiled all the same, and only 4-bit values have four parts.


@triton.jit
def no_parts(ROWS: tl.constexpr, COLUMNS: tl.constexpr, code_type: tl.constexpr):
    """Zeros [ROWS, COLUMNS] in 4 or 2 parts."""
    if code_type == tl.uint8:
        zero = tl.zeros([ROWS, COLUMNS // 4], tl.float32)
        parts = (zero, zero, zero, zero)
    else:
        zero = tl.zeros([ROWS, COLUMNS // 2], tl.float32)
        parts = (zero, zero)
    return parts


@triton.jit
def add_row(parts, row, COLUMNS: tl.constexpr, code_type: tl.constexpr):
    """Parts of [ROWS, COLUMNS] plus one row [1, COLUMNS]."""
    even, odd = tl.split(tl.reshape(row, (1, COLUMNS // 2, 2)))
    if code_type == tl.uint8:
        first, third = tl.split(tl.reshape(even, (1, COLUMNS // 4, 2)))
        second, fourth = tl.split(tl.reshape(odd, (1, COLUMNS // 4, 2)))
        added = (parts[0] + first, parts[1] + second, parts[2] + third, parts[3] + fourth)
    else:
        added = (parts[0] + even, parts[1] + odd)
    return added


@triton.jit
def add_values(parts, shrink, weights, words, code_type: tl.constexpr, PRECISION: tl.constexpr):
    """parts * shrink + weights · values, which come as words; weights are in their numbers."""
    values = value_parts(words, code_type, weights.dtype)
    first = tl.dot(weights, values[0], parts[0] * shrink[:, None], input_precision=PRECISION)
    second = tl.dot(weights, values[1], parts[1] * shrink[:, None], input_precision=PRECISION)
    if code_type == tl.uint8:
        third = tl.dot(weights, values[2], parts[2] * shrink[:, None], input_precision=PRECISION)
        fourth = tl.dot(weights, values[3], parts[3] * shrink[:, None], input_precision=PRECISION)
        added = (first, second, third, fourth)
    else:
        added = (first, second)
    return added


@triton.jit
def whole(parts, code_type: tl.constexpr):
    """[ROWS, COLUMNS], with all dimensions in their order."""
    if code_type == tl.uint8:
        joined = tl.interleave(tl.interleave(parts[0], parts[2]), tl.interleave(parts[1], parts[3]))
    else:
        joined = tl.interleave(parts[0], parts[1])
    return joined


@triton.jit
def load_scales(scales, at, mask):
    """float32 scales of keys and of values in the slots `at`; `scales` points at int32, each a pair of float16."""
    if mask is None:
        pair = tl.load(scales + at)
    else:
        pair = tl.load(scales + at, mask=mask, other=0)
    keys = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    values = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return keys.to(tl.float32), values.to(tl.float32)
