"""Matmuls with quantised weights, in Triton, and kernels that turn rows into codes and codes into a float weight.

    codes        rows of codes × codes of 8 bits          on the matrix units: FP8 × FP8 or INT8 × INT8
    floats       rows of floats × codes of 4 or 8 bits    codes become floats in registers

With few rows a linear layer is bound by reading its weight. So that the matrix units are filled all the same, the
weight is their first operand (out.T = weight @ x.T): 64 outputs fill an instruction, and rows are its narrow side. The
inputs may be split over programs; the last program of a tile to arrive adds the parts up in a fixed order.

Codes of 4 bits lie in words of 16: word p of a block of 4 × PLANE inputs has input i × PLANE + p in its bits 4 i to
4 i + 3. So four planes of a block come from one load, each with its inputs in order: shift, mask, and a float's
exponent above the bits make floats of two codes at a time.

The product of a group of inputs is scaled as it is added to the sum (`acc += dot * scale`). That is also what makes the
first operand safe in registers: Triton 3.6 may otherwise overwrite it while the matrix units still read it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.attention.triton_device import await_previous, begin, dependent_launch, stages_that_fit
from headway.layers.linear import ScaledRows
from headway.layers.quantized_weight import FP8, QuantizedWeight

MAX_FEW_ROWS = 64
MAX_SCALED_ROWS = 16
"""Up to this many rows, half of a norm is left to the next product; with more, a separate norm kernel costs less."""
_MAX_SPLITS = 8
_MAX_SPLIT_OUTPUTS = 8192
_MIN_GROUP, _MAX_GROUP = 16, 128
COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
_FP8_LARGEST = 448.0
_INT8_LARGEST = 127.0

# Two words in a register: four registers with two floats of 128 + code (bfloat16) or 1024 + code (float16) each, less
# what brings code 8 to zero.
_PLANES_BF16 = tl.constexpr("""{
    .reg .b32 w, one, moved;
    mov.b32 one, 0x3f803f80;
    mov.b32 moved, 0xc308c308;
    lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
    shr.b32 w, $4, 4;
    lop3.b32 $1, w, 0x000f000f, 0x43004300, 0xea;
    shr.b32 w, $4, 8;
    lop3.b32 $2, w, 0x000f000f, 0x43004300, 0xea;
    shr.b32 w, $4, 12;
    lop3.b32 $3, w, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 $0, $0, one, moved;
    fma.rn.bf16x2 $1, $1, one, moved;
    fma.rn.bf16x2 $2, $2, one, moved;
    fma.rn.bf16x2 $3, $3, one, moved;
}""")
_PLANES_F16 = tl.constexpr(
    _PLANES_BF16.value.replace("0x43004300", "0x64006400")
    .replace("0xc308c308", "0xe408e408")
    .replace("0x3f803f80", "0x3c003c00")
    .replace("bf16x2", "f16x2")
)


@triton.jit
def _planes(words, DTYPE: tl.constexpr):
    """[.., PLANE] words → the four planes of code - 8 in DTYPE (in float32 where the interpreter runs)."""
    if COMPILED:
        if tl.bfloat16 == DTYPE:
            p0, p1, p2, p3 = tl.inline_asm_elementwise(
                _PLANES_BF16, "=&r,=&r,=&r,=&r,r", [words],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            p0, p1, p2, p3 = tl.inline_asm_elementwise(
                _PLANES_F16, "=&r,=&r,=&r,=&r,r", [words],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
    else:
        wide = words.to(tl.int32)
        p0 = ((wide & 15) - 8).to(tl.float32)
        p1 = ((wide >> 4 & 15) - 8).to(tl.float32)
        p2 = ((wide >> 8 & 15) - 8).to(tl.float32)
        p3 = ((wide >> 12 & 15) - 8).to(tl.float32)
    return p0, p1, p2, p3


@triton.jit
def _operand(tile):
    """Without a matrix unit, in the interpreter: float32, which knows no product of bfloat16 or of float8."""
    return tile if COMPILED else tile.to(tl.float32)


@triton.jit
def _group(base, group, N, n, n_mask):
    """Scales or offsets of a group, for outputs n."""
    return tl.load(base + group * N + n, mask=n_mask, other=0.0).to(tl.float32)


# ---- several rows ---------------------------------------------------------------------------------------------------


@triton.jit
def _store(
    acc, out, x_scales, squares, eps, scales, bias, residual, next_norm, scaled, next_squares, tile, m, n, num_rows, N,
    K: tl.constexpr, NUM_PARTS: tl.constexpr, PARTS_ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_N, BLOCK_M], scaled, with bias and residual, to out [num_rows, N]; see `floats_kernel`."""
    m_mask = m < num_rows
    n_mask = n < N
    factor = tl.full([BLOCK_M], 1.0, tl.float32)
    if x_scales is not None:
        factor = tl.load(x_scales + m, mask=m_mask, other=0.0)
    if squares is not None:
        part = tl.arange(0, PARTS_ROWS)
        sums = tl.load(squares + part[:, None] * BLOCK_M + m[None, :], mask=(part < NUM_PARTS)[:, None], other=0.0)
        factor *= tl.rsqrt(tl.sum(sums, 0) / K + eps)
    acc *= tl.load(scales + n, mask=n_mask, other=0.0)[:, None] * factor[None, :]
    if bias is not None:
        acc += tl.load(bias + n, mask=n_mask, other=0.0).to(tl.float32)[:, None]
    places = m.to(tl.int64)[None, :] * N + n[:, None]
    mask = m_mask[None, :] & n_mask[:, None]
    if residual is not None:
        acc += tl.load(residual + places, mask=mask, other=0.0).to(tl.float32)
    rounded = acc.to(out.dtype.element_ty)
    tl.store(out + places, rounded, mask=mask)
    if next_norm is not None:
        wide = tl.where(mask, rounded.to(tl.float32), 0.0)
        norm = tl.load(next_norm + n, mask=n_mask, other=0.0).to(tl.float32)
        tl.store(scaled + places, (wide * norm[:, None]).to(scaled.dtype.element_ty), mask=mask)
        tl.store(next_squares + tile * BLOCK_M + m, tl.sum(wide * wide, 0))


@triton.jit
def _finish(
    acc, out, x_scales, squares, eps, scales, bias, residual, next_norm, scaled, next_squares, parts, num_arrived, tile,
    m, n, num_rows, N, K: tl.constexpr, NUM_PARTS: tl.constexpr, PARTS_ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Add up the parts of a tile, if this program is the last of it to arrive, and store the sum."""
    if SPLITS == 1:
        _store(
            acc, out, x_scales, squares, eps, scales, bias, residual, next_norm, scaled, next_squares, tile, m, n,
            num_rows, N, K, NUM_PARTS, PARTS_ROWS, BLOCK_M,
        )  # fmt: skip
    else:
        inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        first_part = parts + tile * SPLITS * BLOCK_M * BLOCK_N
        tl.store(first_part + tl.program_id(2) * BLOCK_M * BLOCK_N + inner, acc)
        tl.debug_barrier()  # every thread's part is written before the program counts itself as arrived
        if tl.atomic_add(num_arrived + tile, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(num_arrived + tile, 0)
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for split in tl.static_range(SPLITS):
                total += tl.load(first_part + split * BLOCK_M * BLOCK_N + inner, cache_modifier=".cg")
            _store(
                total, out, x_scales, squares, eps, scales, bias, residual, next_norm, scaled, next_squares, tile, m,
                n, num_rows, N, K, NUM_PARTS, PARTS_ROWS, BLOCK_M,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def codes_kernel(
    out, x, x_scales, weight, scales, group_scales, bias, residual, parts, num_arrived, num_rows, N,
    K: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out [num_rows, N] = x [num_rows, K] @ weight [N, K].T, both codes of 8 bits; x_scales [num_rows], scales [N].

    GROUP: inputs with a scale of their own in `group_scales` [groups, N], a multiple of BLOCK_K; 0: none. Program (tile
    of rows, tile of outputs, split of the inputs): those with the same weights run side by side.
    """
    tile = tl.program_id(1)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m_mask = m < num_rows
    n_mask = n < N
    begin(DEPENDENT)
    await_previous(DEPENDENT)
    IS_INT: tl.constexpr = weight.dtype.element_ty == tl.int8
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.int32 if IS_INT else tl.float32)
    K_PART: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    first = tl.program_id(2) * K_PART
    for step in tl.range(0, K_PART, BLOCK_K, num_stages=STAGES):
        k = first + step + tl.arange(0, BLOCK_K)
        w_at = weight + n.to(tl.int64)[:, None] * K + k[None, :]
        x_at = x + m.to(tl.int64)[:, None] * K + k[None, :]
        if K % (SPLITS * BLOCK_K) == 0:
            w = tl.load(w_at, mask=n_mask[:, None], other=0.0)
            rows = tl.load(x_at, mask=m_mask[:, None], other=0.0)
        else:
            w = tl.load(w_at, mask=n_mask[:, None] & (k < K)[None, :], other=0.0)
            rows = tl.load(x_at, mask=m_mask[:, None] & (k < K)[None, :], other=0.0)
        if not IS_INT:
            w = _operand(w)
            rows = _operand(rows)
        if GROUP > 0:
            product = tl.dot(w, rows.T)
            group = tl.minimum(first + step, K - 1) // GROUP
            total += product.to(tl.float32) * _group(group_scales, group, N, n, n_mask)[:, None]
        else:
            acc = tl.dot(w, rows.T, acc, out_dtype=acc.dtype)
    if GROUP == 0:
        total = acc.to(tl.float32)
    _finish(
        total, out, x_scales, None, 0.0, scales, bias, residual, None, None, None, parts, num_arrived, tile, m, n,
        num_rows, N, K, 1, 1, BLOCK_M, BLOCK_N, SPLITS,
    )  # fmt: skip


@triton.jit
def _rows_at(x, m, m_mask, k, K: tl.constexpr, EVEN: tl.constexpr):
    at = x + m.to(tl.int64)[:, None] * K + k[None, :]
    if EVEN:
        rows = tl.load(at, mask=m_mask[:, None], other=0.0)
    else:
        rows = tl.load(at, mask=m_mask[:, None] & (k < K)[None, :], other=0.0)
    return rows


@triton.jit
def _add_group(acc, codes, rows, sums, group_scales, group_offsets, group, N, n, n_mask):
    """acc [BLOCK_N, BLOCK_M] plus the product of a group of inputs. sums [BLOCK_M]: of the rows' values in it."""
    acc += tl.dot(_operand(codes), _operand(rows).T) * _group(group_scales, group, N, n, n_mask)[:, None]
    if group_offsets is not None:
        acc += _group(group_offsets, group, N, n, n_mask)[:, None] * sums[None, :]
    return acc


@triton.jit
def _add_two(acc, codes, rows, codes2, rows2, sums, group_scales, group_offsets, group, N, n, n_mask):
    """The same of a group that is two planes."""
    product = tl.dot(_operand(codes), _operand(rows).T)
    product = tl.dot(_operand(codes2), _operand(rows2).T, product)
    acc += product * _group(group_scales, group, N, n, n_mask)[:, None]
    if group_offsets is not None:
        acc += _group(group_offsets, group, N, n, n_mask)[:, None] * sums[None, :]
    return acc


@triton.jit
def _add_words(
    acc, words, x0, x1, x2, x3, s0, s1, s2, s3, group_scales, group_offsets, group, N, n, n_mask,
    PER_GROUP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """acc plus the product of a block of words."""
    p0, p1, p2, p3 = _planes(words, DTYPE)
    if PER_GROUP == 1:
        acc = _add_group(acc, p0, x0, s0, group_scales, group_offsets, group, N, n, n_mask)
        acc = _add_group(acc, p1, x1, s1, group_scales, group_offsets, group + 1, N, n, n_mask)
        acc = _add_group(acc, p2, x2, s2, group_scales, group_offsets, group + 2, N, n, n_mask)
        acc = _add_group(acc, p3, x3, s3, group_scales, group_offsets, group + 3, N, n, n_mask)
    else:
        acc = _add_two(acc, p0, x0, p1, x1, s0 + s1, group_scales, group_offsets, group, N, n, n_mask)
        acc = _add_two(acc, p2, x2, p3, x3, s2 + s3, group_scales, group_offsets, group + 1, N, n, n_mask)
    return acc


@triton.jit
def _words_at(weight, n, n_mask, word, WORDS: tl.constexpr, EVEN: tl.constexpr):
    at = weight + n.to(tl.int64)[:, None] * WORDS + word[None, :]
    if EVEN:
        words = tl.load(at, mask=n_mask[:, None], other=0.0)
    else:
        words = tl.load(at, mask=n_mask[:, None] & (word < WORDS)[None, :], other=0.0)
    return words


@triton.jit(do_not_specialize=["num_rows"])
def floats_kernel(
    out, x, squares, eps, weight, scales, group_scales, group_offsets, bias, residual, next_norm, scaled, next_squares,
    parts, num_arrived, num_rows, N,
    K: tl.constexpr, WORDS: tl.constexpr, PLANE: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, NUM_PARTS: tl.constexpr,
    PARTS_ROWS: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out [num_rows, N] = x [num_rows, K] @ weight.T + bias: rows of floats. Program (tile of rows, tile of
    outputs, split of the inputs).

    WORDS: of a row of the weight, blocks of 4 × PLANE codes of 4 bits; 0 where codes are bytes. GROUP: inputs in a
    group, for bytes also BLOCK_K; 0: none.

    `squares` [NUM_PARTS, BLOCK_M]: parts of the rows' sums of squares, and rows are divided by their root mean square.
    `residual`: added to the product; `next_norm`: leaves scaled [num_rows, N] = out × next_norm and next_squares
    [tiles, BLOCK_M] = sums over a tile of out squared. So a norm between two products is part of both.
    """
    tile = tl.program_id(1)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m_mask = m < num_rows
    n_mask = n < N
    DTYPE: tl.constexpr = x.dtype.element_ty
    begin(DEPENDENT)
    await_previous(DEPENDENT)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if WORDS > 0:
        j = tl.arange(0, PLANE)
        BLOCKS: tl.constexpr = WORDS // PLANE
        PART: tl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
        EVEN: tl.constexpr = K % (SPLITS * 4 * PLANE) == 0
        PER_GROUP: tl.constexpr = GROUP // PLANE
        first = tl.program_id(2) * PART
        for step in tl.range(0, PART, num_stages=STAGES):
            block = first + step
            words = _words_at(weight, n, n_mask, block * PLANE + j, WORDS, BLOCKS % SPLITS == 0)
            k = 4 * block * PLANE + j
            x0 = _rows_at(x, m, m_mask, k, K, EVEN)
            x1 = _rows_at(x, m, m_mask, k + PLANE, K, EVEN)
            x2 = _rows_at(x, m, m_mask, k + 2 * PLANE, K, EVEN)
            x3 = _rows_at(x, m, m_mask, k + 3 * PLANE, K, EVEN)
            s0 = 0.0
            s1 = 0.0
            s2 = 0.0
            s3 = 0.0
            if group_offsets is not None:
                s0 = tl.sum(x0.to(tl.float32), 1)
                s1 = tl.sum(x1.to(tl.float32), 1)
                s2 = tl.sum(x2.to(tl.float32), 1)
                s3 = tl.sum(x3.to(tl.float32), 1)
            group = 4 * block // PER_GROUP
            if BLOCKS % SPLITS != 0:  # beyond the last block rows are zero; groups must be within the table
                group = tl.minimum(group, (4 * BLOCKS - 4) // PER_GROUP)
            acc = _add_words(
                acc, words, x0, x1, x2, x3, s0, s1, s2, s3, group_scales, group_offsets, group, N, n, n_mask,
                PER_GROUP, DTYPE,
            )  # fmt: skip
    else:
        K_PART: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
        IS_EVEN: tl.constexpr = K % (SPLITS * BLOCK_K) == 0
        start = tl.program_id(2) * K_PART
        for step in tl.range(0, K_PART, BLOCK_K, num_stages=STAGES):
            k = start + step + tl.arange(0, BLOCK_K)
            rows = _rows_at(x, m, m_mask, k, K, IS_EVEN)
            codes = _words_at(weight, n, n_mask, k, K, IS_EVEN).to(DTYPE if COMPILED else tl.float32)
            sums = 0.0
            if group_offsets is not None:
                sums = tl.sum(rows.to(tl.float32), 1)
            if GROUP > 0:
                group = tl.minimum(start + step, K - 1) // GROUP
                acc = _add_group(acc, codes, rows, sums, group_scales, group_offsets, group, N, n, n_mask)
            else:
                acc += tl.dot(_operand(codes), _operand(rows).T)
    _finish(
        acc, out, None, squares, eps, scales, bias, residual, next_norm, scaled, next_squares, parts, num_arrived, tile,
        m, n, num_rows, N, K, NUM_PARTS, PARTS_ROWS, BLOCK_M, BLOCK_N, SPLITS,
    )  # fmt: skip


# ---- rows into codes, codes into floats -----------------------------------------------------------------------------


@triton.jit
def _store_codes(values, codes, scales, row, column, inside, WIDTH: tl.constexpr, LARGEST: tl.constexpr):
    """A whole row of `values` float32 as codes, with its scale."""
    scale = tl.max(tl.abs(values), 0) / LARGEST
    scale = tl.maximum(scale, 1e-30)
    scaled = values / scale
    if codes.dtype.element_ty == tl.int8:
        scaled = tl.floor(scaled + 0.5)
    tl.store(codes + row * WIDTH + column, scaled.to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def quantise_kernel(
    x, residual, norm, codes, scales, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr,
    SILU: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A program is a row. Codes of: x; with SILU, silu(first half) × second half of x [rows, 2 WIDTH]; with a `norm`,
    the norm of the residual, to which x (where it is given) is added first, in place. Rounded to the type of x or of
    the residual in between, as the steps one by one would."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    begin(DEPENDENT)
    await_previous(DEPENDENT)
    if norm is not None:
        dtype = residual.dtype.element_ty
        value = tl.load(residual + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        if x is not None:
            value += tl.load(x + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
            value = value.to(dtype).to(tl.float32)
            tl.store(residual + row * WIDTH + column, value.to(dtype), mask=inside)
        value *= tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
        value = value.to(dtype).to(tl.float32) * tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    elif SILU:
        dtype = x.dtype.element_ty
        gate = tl.load(x + 2 * row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + (2 * row + 1) * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        value = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up
    else:
        dtype = x.dtype.element_ty
        value = tl.load(x + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    _store_codes(value.to(dtype).to(tl.float32), codes, scales, row, column, inside, WIDTH, LARGEST)


@triton.jit
def dequantise_kernel(
    out, weight, scales, group_scales, group_offsets, N,
    K: tl.constexpr, WORDS: tl.constexpr, PLANE: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [N, K] in floats. Program (tile of outputs, of inputs, of words: plane). A program with all four planes of
    its words, one after the other, is compiled wrongly by Triton 3.6 where rows of tables are not aligned."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n < N
    row_scale = tl.load(scales + n, mask=n_mask, other=0.0)[:, None]
    if WORDS > 0:
        plane = tl.program_id(2)
        j = tl.program_id(1) * PLANE + tl.arange(0, PLANE)
        words = tl.load(weight + n.to(tl.int64)[:, None] * WORDS + j[None, :], mask=n_mask[:, None], other=0.0)
        value = ((words.to(tl.int32) >> (4 * plane) & 15) - 8).to(tl.float32)
        k = (tl.program_id(1) * 4 + plane) * PLANE + tl.arange(0, PLANE)
        mask = n_mask[:, None] & (k < K)[None, :]
    else:
        k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
        mask = n_mask[:, None] & (k < K)[None, :]
        value = tl.load(weight + n.to(tl.int64)[:, None] * K + k[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = row_scale
    if GROUP > 0:
        places = (k // GROUP)[None, :] * N + n[:, None]
        scale *= tl.load(group_scales + places, mask=mask, other=0.0).to(tl.float32)
    value *= scale
    if group_offsets is not None:
        value += tl.load(group_offsets + places, mask=mask, other=0.0).to(tl.float32) * row_scale
    tl.store(out + n.to(tl.int64)[:, None] * K + k[None, :], value.to(out.dtype.element_ty), mask=mask)


# ---- weights and launches -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedCodes:
    """A quantised weight [outputs, inputs] as the kernels read it."""

    codes: Tensor
    """Bytes [outputs, inputs], int8 or float8; or int16 words [outputs, words] of four codes."""
    scales: Tensor
    """float32 [outputs]"""
    group_scales: Tensor | None
    """[groups, outputs]; multiplied by the output's scale."""
    group_offsets: Tensor | None
    """As `group_scales`."""
    group_size: int
    """The number of inputs in a group; 0 without groups."""
    order: Tensor | None
    """[inputs]: which of a row's inputs is at each place, if they are not in order."""
    num_inputs: int
    plane: int
    """The number of inputs in a plane of words; 0 if codes are bytes."""

    @property
    def num_outputs(self) -> int:
        return len(self.codes)

    @property
    def is_int4(self) -> bool:
        return self.plane > 0

    @property
    def has_product(self) -> bool:
        """Whether a kernel multiplies with these codes. None does for groups smaller than a matrix unit's step."""
        return self.group_size == 0 or self.group_size >= _MIN_GROUP

    @property
    def takes_codes(self) -> bool:
        """Whether rows of codes can be multiplied with it: it is FP8, or INT8 with one scale per output."""
        if self.group_offsets is not None or self.is_int4 or self.order is not None:
            return False
        return self.group_size == 0 or (self.codes.dtype == FP8 and self.group_size % 128 == 0)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        parts = (self.codes, self.scales, self.group_scales, self.group_offsets, self.order)
        return tuple(part for part in parts if part is not None)


def pack(weight: QuantizedWeight, dtype: torch.dtype) -> PackedCodes:
    """Pack a weight for activations of `dtype`. Scales of groups are float16, relative to a power of two per output;
    for float32 activations they are float32."""
    num_inputs = weight.shape[1]
    own_size = weight.tile[1]
    if weight.bits == 4 or own_size < num_inputs:
        own_size = _group_within(own_size)
    rows = weight.by_rows(own_size) if weight.groups is None else weight.by_rows()
    scales, offsets, codes, order = rows.scales, rows.offsets, rows.codes, None
    if weight.groups is not None:
        # Sort the inputs by group. The kernels know one group size, so all groups must be equally large.
        order = torch.argsort(weight.groups, stable=True)
        codes = codes[:, order]
        sizes = torch.bincount(weight.groups, minlength=scales.shape[1])
        own_size = _group_within(math.gcd(*sizes.tolist()))
        spread = weight.groups[order][::own_size]
        scales = scales[:, spread]
        offsets = None if offsets is None else offsets[:, spread]
    if weight.bits == 4 and weight.lowest != -8:
        moved = scales * (8 + weight.lowest)
        offsets = moved if offsets is None else offsets + moved
        codes = codes - (8 + weight.lowest)
    is_grouped = scales.shape[1] > 1 or offsets is not None or weight.bits == 4
    if not is_grouped:
        return PackedCodes(codes.contiguous(), scales[:, 0].contiguous(), None, None, 0, order, num_inputs, 0)
    largest = scales.abs().amax(1, keepdim=True).clamp(min=1e-30)
    row_scales = torch.exp2(torch.floor(torch.log2(largest)))
    narrow = torch.float32 if dtype == torch.float32 else torch.float16

    def table(values: Tensor) -> Tensor:
        return (values / row_scales).t().to(narrow).contiguous()

    plane = 0
    if weight.bits == 4:
        plane = min(own_size, 64)
        padding = -num_inputs % (4 * plane)
        codes = torch.nn.functional.pad(codes, (0, padding))
        codes = _pack_words(codes, plane)
        missing = codes.shape[1] * 4 // own_size - scales.shape[1]
        scales = torch.nn.functional.pad(scales, (0, missing))
        offsets = None if offsets is None else torch.nn.functional.pad(offsets, (0, missing))
    return PackedCodes(
        codes.contiguous(),
        row_scales[:, 0].contiguous(),
        table(scales),
        None if offsets is None else table(offsets),
        own_size,
        order,
        num_inputs,
        plane,
    )


def _group_within(size: int) -> int:
    """The largest group size that the kernels support and that divides `size`."""
    return next(own for own in (_MAX_GROUP, 64, 32, 16, 8, 4, 2, 1) if size % own == 0)


def _pack_words(codes: Tensor, plane: int) -> Tensor:
    """int8 [outputs, inputs] of -8 to 7 → int16 [outputs, inputs / 4]"""
    num_outputs, num_inputs = codes.shape
    nibbles = (codes.to(torch.int16) + 8).view(num_outputs, num_inputs // (4 * plane), 4, plane)
    words = nibbles[:, :, 0] | nibbles[:, :, 1] << 4 | nibbles[:, :, 2] << 8 | nibbles[:, :, 3] << 12
    return words.reshape(num_outputs, num_inputs // 4)


def multiply_codes(
    x: Tensor,
    x_scales: Tensor,
    weight: PackedCodes,
    bias: Tensor | None,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    blocks: tuple[int, int, int, int, int, int] | None = None,
) -> Tensor:
    """out = (x × x_scales) @ weight.T + bias (+ residual, which may be `out`). x has codes of the weight's type."""
    block_m, block_n, block_k, splits, warps, stages = blocks or _codes_blocks(weight, len(x))
    num_tiles = triton.cdiv(weight.num_outputs, block_n)
    parts, num_arrived = _scratch(x.device)
    codes_kernel[(triton.cdiv(len(x), block_m), num_tiles, splits)](
        out, x, x_scales, weight.codes, weight.scales, weight.group_scales, bias, residual, parts, num_arrived, len(x),
        weight.num_outputs,
        K=weight.num_inputs, GROUP=weight.group_size, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, SPLITS=splits,
        STAGES=stages_that_fit(stages, (block_m + block_n) * block_k, x.device), num_warps=warps,
        **dependent_launch(x),
    )  # fmt: skip
    return out


def _codes_blocks(weight: PackedCodes, num_rows: int) -> tuple[int, int, int, int, int, int]:
    """(BLOCK_M, BLOCK_N, BLOCK_K, splits, warps, stages), by measurement as above."""
    num_outputs = weight.num_outputs
    wide_k = 128 if weight.group_size else 256
    if num_rows <= MAX_FEW_ROWS:
        splits = 1
        if num_outputs <= 4096 and weight.num_inputs > 1024:
            splits = 2 if num_outputs > 2048 else 4
        block_m = _block_m(num_rows)
        if num_outputs > _MAX_SPLIT_OUTPUTS:
            return block_m, 64, 128, 1, 4, 6
        return block_m, 64, wide_k, splits, 4, 4
    if num_rows <= 128:
        return (64, 64, wide_k, 1, 4, 4) if num_outputs <= 4096 else (64, 64, 128, 1, 4, 6)
    if num_outputs <= 2048:
        return 64, 64, wide_k, 1, 4, 4
    return (128, 64, wide_k, 1, 4, 3) if num_outputs <= 4096 else (128, 128, 128, 1, 8, 4)


def multiply_floats(
    x: Tensor,
    weight: PackedCodes,
    bias: Tensor | None,
    *,
    out: Tensor | None = None,
    residual: Tensor | None = None,
    next_norm: Tensor | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    blocks: tuple[int, int, int, int, int, int] | None = None,
) -> tuple[Tensor, ScaledRows | None]:
    """x @ weight.T + bias for rows of half precision, whose inputs are in the packed order. With `squares`, rows are
    first divided by their root mean square (see `ScaledRows`); with `residual`, the product is added to it in place;
    with `next_norm`, the first half of that norm is computed too."""
    num_outputs = weight.num_outputs
    if residual is not None:
        out = residual
    elif out is None:
        out = torch.empty(len(x), num_outputs, dtype=x.dtype, device=x.device)
    block_m, block_n, block_k, splits, warps, stages = blocks or _floats_blocks(weight, len(x))
    num_tiles = triton.cdiv(num_outputs, block_n)
    parts, num_arrived = _scratch(x.device)
    then = None
    if next_norm is not None:
        then = ScaledRows(torch.empty_like(out), torch.empty(num_tiles, block_m, dtype=torch.float32, device=x.device))
    num_parts = 1 if squares is None else len(squares)
    stage_bytes = 8 * block_m * weight.plane + block_n * 2 * weight.plane
    if not weight.is_int4:
        stage_bytes = (2 * block_m + block_n) * block_k
    floats_kernel[(triton.cdiv(len(x), block_m), num_tiles, splits)](
        out, x, squares, eps, weight.codes, weight.scales, weight.group_scales, weight.group_offsets, bias, residual,
        next_norm, None if then is None else then.values, None if then is None else then.squares, parts, num_arrived,
        len(x), num_outputs,
        K=weight.num_inputs, WORDS=weight.codes.shape[1] if weight.is_int4 else 0, PLANE=weight.plane,
        GROUP=weight.group_size, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, SPLITS=splits,
        NUM_PARTS=num_parts, PARTS_ROWS=triton.next_power_of_2(num_parts),
        STAGES=stages_that_fit(stages, stage_bytes, x.device), num_warps=warps, **dependent_launch(x),
    )  # fmt: skip
    return out, then


def _floats_blocks(weight: PackedCodes, num_rows: int) -> tuple[int, int, int, int, int, int]:
    """(BLOCK_M, BLOCK_N, BLOCK_K, splits, warps, stages), by measurement as above."""
    block_k = min(weight.group_size or 128, 128)
    block_m, few = _block_m(num_rows), num_rows <= MAX_SCALED_ROWS
    if num_rows > MAX_FEW_ROWS or (weight.num_outputs > _MAX_SPLIT_OUTPUTS and not few):
        return block_m, 128, block_k, 1, 8, 3
    if weight.num_outputs > _MAX_SPLIT_OUTPUTS:
        return block_m, 64, block_k, 1, 4, 3
    if weight.num_outputs > 4096:
        return block_m, 64, block_k, 4 if few else 2, 4, 3
    return block_m, 64, block_k, 8 if few else 4, 4, 3


def dequantise(weight: PackedCodes, dtype: torch.dtype) -> Tensor:
    """The weight as floats [outputs, inputs], with its inputs in the packed order (see `PackedCodes.order`)."""
    out = torch.empty(weight.num_outputs, weight.num_inputs, dtype=dtype, device=weight.codes.device)
    block_n, block_k = (32, 4 * weight.plane) if weight.is_int4 else (16, 256)
    grid = triton.cdiv(weight.num_outputs, block_n), triton.cdiv(weight.num_inputs, block_k), 4 if weight.is_int4 else 1
    dequantise_kernel[grid](
        out, weight.codes, weight.scales, weight.group_scales, weight.group_offsets, weight.num_outputs,
        K=weight.num_inputs, WORDS=weight.codes.shape[1] if weight.is_int4 else 0, PLANE=weight.plane,
        GROUP=weight.group_size, BLOCK_N=block_n, BLOCK_K=block_k,
    )  # fmt: skip
    return out


def quantise_rows(
    x: Tensor | None,
    dtype: torch.dtype,
    *,
    silu: bool = False,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Codes of `dtype` and one float32 scale per row, for x, for its gated half, or for a norm (see the kernel)."""
    source = x if residual is None else residual
    assert source is not None
    rows, width = len(source), source.shape[1] // (2 if silu else 1)
    codes = torch.empty(rows, width, dtype=dtype, device=source.device)
    scales = torch.empty(rows, dtype=torch.float32, device=source.device)
    block = triton.next_power_of_2(width)
    quantise_kernel[(rows,)](
        x, residual, norm, codes, scales, eps, WIDTH=width, BLOCK=block,
        LARGEST=_FP8_LARGEST if dtype == FP8 else _INT8_LARGEST, SILU=silu, num_warps=min(max(block // 512, 1), 16),
        **dependent_launch(source),
    )  # fmt: skip
    return codes, scales


def prepare(device: torch.device) -> None:
    """Allocate what all layers share. It must not happen while a CUDA graph is captured."""
    _scratch(device)


def _block_m(rows: int) -> int:
    """The rows of a tile. There are only two sizes, because each is compiled for each shape of a layer."""
    return MAX_SCALED_ROWS if rows <= MAX_SCALED_ROWS else MAX_FEW_ROWS


@functools.cache
def _scratch(device: torch.device) -> tuple[Tensor, Tensor]:
    """Parts of sums and counters of arrived programs, shared by all layers: steps of a device run one by one."""
    parts = torch.empty(_MAX_SPLITS * MAX_FEW_ROWS * _MAX_SPLIT_OUTPUTS, dtype=torch.float32, device=device)
    return parts, torch.zeros(_MAX_SPLIT_OUTPUTS // 16, dtype=torch.int32, device=device)
