"""Linear layers for few rows, in Triton, fused with the norm before, the gate, and the residual sum after. For one row
the weight may also be codes of 8 or 4 bits, which become floats in registers.

With few rows a linear layer is bound by reading its weight, and a general matmul leaves much of the bandwidth unused:
too few programs, and further launches around it for the norm, the gate and the sum.

One row: a program owns a few outputs and streams their weights once, on the plain arithmetic units. The norm needs no
pass of its own: rms_norm(x) @ W.T = (x * norm) @ W.T / rms(x), and the mean square is summed while x is multiplied.

Up to 64 rows, on the matrix units: into a narrow output (what projects back to the residual) the input dimension is
split over programs as well, and the last program of a tile to arrive adds the parts up in a fixed order, so results do
not depend on timing; gate and value are multiplied side by side, so that their product leaves the kernel. The norm
between two of them is split up: the one before leaves the residual times the norm's weight and, for each tile, sums of
squares; the one after multiplies and then divides each row by its root mean square.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.attention.triton_device import await_previous, begin, dependent_launch, stages_that_fit
from headway.layers.linear import ScaledRows
from headway.layers.quantized_gemm import PackedCodes

_MAX_WIDE_ROWS = 65536  # more outputs than any layer has but the last
MAX_ROW_WORDS = 2**21
"""Larger 4-bit weights are multiplied faster on the matrix units, even for one row."""
MAX_SPLIT_ROWS = 64
# Wider outputs give a general matmul enough tiles to fill the device.
MAX_SPLIT_OUTPUTS = 2048
_SPLITS = 4
_SPLIT_BLOCK_N = 32
_SPLIT_BLOCK_K = 128

# A code of 4 bits at the top of a float's fraction is 128 + code; codes are 8 more than the numbers they mean.
_FLOAT_128 = tl.constexpr(0x43000000)
_CODE_BITS = tl.constexpr(0x000F0000)
_CODE_OF_ZERO = tl.constexpr(136.0)

# ---- one row --------------------------------------------------------------------------------------------------------


@triton.jit
def _store_row(
    result, up_result, squares, out, scales, bias, norm, residual, eps, n, n_mask, N, K: tl.constexpr,
    SWIGLU: tl.constexpr,
):  # fmt: skip
    """What is done with the sums of outputs n: `scales` of codes, norm, bias, gate, residual; any may be None."""
    if scales is not None:
        result *= tl.load(scales + n, mask=n_mask, other=0.0)
        if SWIGLU:
            up_result *= tl.load(scales + N + n, mask=n_mask, other=0.0)
    if norm is not None:
        inverse_rms = tl.rsqrt(squares / K + eps)
        result *= inverse_rms
        up_result *= inverse_rms
    if bias is not None:
        result += tl.load(bias + n, mask=n_mask, other=0.0).to(tl.float32)
        if SWIGLU:
            up_result += tl.load(bias + N + n, mask=n_mask, other=0.0).to(tl.float32)
    if SWIGLU:
        result = result * tl.sigmoid(result) * up_result
    if residual is not None:
        result += tl.load(residual + n, mask=n_mask, other=0.0).to(tl.float32)
    tl.store(out + n, result.to(out.dtype.element_ty), mask=n_mask)


@triton.jit
def one_row_kernel(
    out,
    x,
    weight,
    scales,
    bias,
    norm,
    residual,
    eps,
    N,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWIGLU: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """out [N]. With SWIGLU the weight has 2 N rows: gates, then values. `scales`: of a weight of codes, one an output.

    `scales`, `bias`, `norm` and `residual` may be None.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n < N
    first_weight = n.to(tl.int64)[:, None] * K
    first_up = first_weight + tl.cast(N, tl.int64) * K
    squares = tl.zeros([BLOCK_K], tl.float32)
    begin(DEPENDENT)
    # The first weights come while the row is still being computed.
    k = tl.arange(0, BLOCK_K)
    mask = n_mask[:, None] & (k < K)[None, :]
    first = tl.load(weight + first_weight + k[None, :], mask=mask, other=0.0)
    up = first
    if SWIGLU:
        up = tl.load(weight + first_up + k[None, :], mask=mask, other=0.0)
    await_previous(DEPENDENT)
    value, squares = _row_part(x, norm, squares, k, K)
    products = first.to(tl.float32) * value[None, :]
    products_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    if SWIGLU:
        products_up = up.to(tl.float32) * value[None, :]
    for start in tl.range(BLOCK_K, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        value, squares = _row_part(x, norm, squares, k, K)
        mask = n_mask[:, None] & (k < K)[None, :]
        products += tl.load(weight + first_weight + k[None, :], mask=mask, other=0.0).to(tl.float32) * value[None, :]
        if SWIGLU:
            up = tl.load(weight + first_up + k[None, :], mask=mask, other=0.0)
            products_up += up.to(tl.float32) * value[None, :]
    _store_row(
        tl.sum(products, 1), tl.sum(products_up, 1), tl.sum(squares, 0), out, scales, bias, norm, residual, eps, n,
        n_mask, N, K, SWIGLU,
    )  # fmt: skip


@triton.jit
def _row_part(x, norm, squares, k, K: tl.constexpr):
    """Inputs k of the row, times the norm's weight, and the sum of squares with theirs."""
    inside = k < K
    value = tl.load(x + k, mask=inside, other=0.0).to(tl.float32)
    if norm is not None:
        squares += value * value
        value *= tl.load(norm + k, mask=inside, other=0.0).to(tl.float32)
    return value, squares


@triton.jit
def _add_group_of_row(acc, products, values, group_scales, group_offsets, group, n, mask, N):
    """acc [BLOCK_N, SPANS, SPAN] plus products, of which each output and span has a scale, and plus its offset times
    the values [SPANS, SPAN]."""
    places = group[None, :] * N + n[:, None]
    acc += products * tl.load(group_scales + places, mask=mask, other=0.0).to(tl.float32)[:, :, None]
    if group_offsets is not None:
        acc += tl.load(group_offsets + places, mask=mask, other=0.0).to(tl.float32)[:, :, None] * values[None, :, :]
    return acc


@triton.jit
def _words_plane(words, PLANE: tl.constexpr):
    """128 + code, of the PLANE-th of the four in a word."""
    return ((words << (16 - 4 * PLANE)) & _CODE_BITS | _FLOAT_128).to(tl.float32, bitcast=True)


@triton.jit
def _add_words_of_row(
    acc, words, x0, x1, x2, x3, group_scales, group_offsets, span, n, mask, N, PER_GROUP: tl.constexpr
):
    """acc [BLOCK_N, SPANS, SPAN] plus words of four codes times four parts of the row. PER_GROUP: planes of a group."""
    wide = words.to(tl.int32)
    p0 = _words_plane(wide, 0) * x0[None, :, :]
    p1 = _words_plane(wide, 1) * x1[None, :, :]
    p2 = _words_plane(wide, 2) * x2[None, :, :]
    p3 = _words_plane(wide, 3) * x3[None, :, :]
    group = span * (4 // PER_GROUP)
    if PER_GROUP == 1:
        p0 -= (x0 * _CODE_OF_ZERO)[None, :, :]
        p1 -= (x1 * _CODE_OF_ZERO)[None, :, :]
        p2 -= (x2 * _CODE_OF_ZERO)[None, :, :]
        p3 -= (x3 * _CODE_OF_ZERO)[None, :, :]
        acc = _add_group_of_row(acc, p0, x0, group_scales, group_offsets, group, n, mask, N)
        acc = _add_group_of_row(acc, p1, x1, group_scales, group_offsets, group + 1, n, mask, N)
        acc = _add_group_of_row(acc, p2, x2, group_scales, group_offsets, group + 2, n, mask, N)
        acc = _add_group_of_row(acc, p3, x3, group_scales, group_offsets, group + 3, n, mask, N)
    else:
        x01 = x0 + x1
        x23 = x2 + x3
        p01 = p0 + (p1 - (x01 * _CODE_OF_ZERO)[None, :, :])
        p23 = p2 + (p3 - (x23 * _CODE_OF_ZERO)[None, :, :])
        acc = _add_group_of_row(acc, p01, x01, group_scales, group_offsets, group, n, mask, N)
        acc = _add_group_of_row(acc, p23, x23, group_scales, group_offsets, group + 1, n, mask, N)
    return acc


@triton.jit
def grouped_row_kernel(
    out, x, weight, scales, group_scales, group_offsets, bias, norm, residual, eps, N,
    K: tl.constexpr, WIDTH: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr, PER_GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, SWIGLU: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`one_row_kernel` of codes with scales for groups of inputs: `group_scales` [groups, rows of the weight] and the
    offsets, times that row's scale in `scales`.

    A row of the weight has WIDTH bytes, SPAN of them a group; or, where PER_GROUP > 0, WIDTH words of four codes, SPAN
    of them a block, whose four planes are 4 / PER_GROUP groups (see `quantized_gemm`).
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n < N
    rows = N * 2 if SWIGLU else N
    j = tl.arange(0, SPAN)
    NUM_SPANS: tl.constexpr = (WIDTH + SPAN - 1) // SPAN
    first_weight = n.to(tl.int64)[:, None, None] * WIDTH
    first_up = tl.cast(N, tl.int64) * WIDTH
    products = tl.zeros([BLOCK_N, SPANS, SPAN], tl.float32)
    products_up = tl.zeros([BLOCK_N, SPANS, SPAN], tl.float32)
    squares = tl.zeros([SPANS, SPAN], tl.float32)
    begin(DEPENDENT)
    await_previous(DEPENDENT)
    for first in tl.range(0, NUM_SPANS, SPANS, num_stages=STAGES):
        span = first + tl.arange(0, SPANS)
        place = span[:, None] * SPAN + j[None, :]
        at = weight + first_weight + place[None, :, :]
        inside = n_mask[:, None, None] & (place < WIDTH)[None, :, :]
        mask = n_mask[:, None] & (span < NUM_SPANS)[None, :]
        codes = tl.load(at, mask=inside, other=0.0)
        codes_up = codes
        if SWIGLU:
            codes_up = tl.load(at + first_up, mask=inside, other=0.0)
        if PER_GROUP > 0:
            k = span[:, None] * (4 * SPAN) + j[None, :]
            x0, squares = _row_part(x, norm, squares, k, K)
            x1, squares = _row_part(x, norm, squares, k + SPAN, K)
            x2, squares = _row_part(x, norm, squares, k + 2 * SPAN, K)
            x3, squares = _row_part(x, norm, squares, k + 3 * SPAN, K)
            products = _add_words_of_row(
                products, codes, x0, x1, x2, x3, group_scales, group_offsets, span, n, mask, rows, PER_GROUP
            )
            if SWIGLU:
                products_up = _add_words_of_row(
                    products_up, codes_up, x0, x1, x2, x3, group_scales, group_offsets, span, n + N, mask, rows,
                    PER_GROUP,
                )  # fmt: skip
        else:
            value, squares = _row_part(x, norm, squares, place, K)
            part = codes.to(tl.float32) * value[None, :, :]
            products = _add_group_of_row(products, part, value, group_scales, group_offsets, span, n, mask, rows)
            if SWIGLU:
                part = codes_up.to(tl.float32) * value[None, :, :]
                products_up = _add_group_of_row(
                    products_up, part, value, group_scales, group_offsets, span, n + N, mask, rows
                )
    _store_row(
        tl.sum(tl.sum(products, 2), 1), tl.sum(tl.sum(products_up, 2), 1), tl.sum(tl.sum(squares, 1), 0), out, scales,
        bias, norm, residual, eps, n, n_mask, N, K, SWIGLU,
    )  # fmt: skip


# ---- up to 64 rows --------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_rows"])
def split_kernel(
    residual,
    scaled,
    squares,
    x,
    weight,
    bias,
    next_norm,
    parts,
    num_arrived,
    num_rows,
    N,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """residual [num_rows, N] += x [num_rows, K] @ weight [N, K].T + bias. Program (tile of outputs, split of K).

    scaled [num_rows, N] = residual * next_norm; squares [tiles, BLOCK_M] = sums over a tile of residual squared.
    """
    tile = tl.program_id(0)
    m = tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m_mask = m < num_rows
    n_mask = n < N
    begin(DEPENDENT)
    await_previous(DEPENDENT)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    K_PART: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    first = tl.program_id(1) * K_PART
    for step in tl.range(0, K_PART, BLOCK_K, num_stages=STAGES):
        k = first + step + tl.arange(0, BLOCK_K)
        k_mask = k < K
        rows = tl.load(x + m[:, None] * K + k[None, :], mask=m_mask[:, None] & k_mask[None, :], other=0.0)
        w = tl.load(
            weight + n.to(tl.int64)[None, :] * K + k[:, None], mask=n_mask[None, :] & k_mask[:, None], other=0.0
        )
        acc = tl.dot(rows, w, acc, input_precision=PRECISION)

    inner = m[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    first_part = parts + tile * SPLITS * BLOCK_M * BLOCK_N
    tl.store(first_part + tl.program_id(1) * BLOCK_M * BLOCK_N + inner, acc)
    tl.debug_barrier()  # every thread's part is written before the program counts itself as arrived
    if tl.atomic_add(num_arrived + tile, 1, sem="acq_rel") == SPLITS - 1:
        tl.store(num_arrived + tile, 0)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for split in tl.static_range(SPLITS):
            acc += tl.load(first_part + split * BLOCK_M * BLOCK_N + inner, cache_modifier=".cg")
        if bias is not None:
            acc += tl.load(bias + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
        offsets = m[:, None] * N + n[None, :]
        mask = m_mask[:, None] & n_mask[None, :]
        acc += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
        rounded = acc.to(residual.dtype.element_ty)
        tl.store(residual + offsets, rounded, mask=mask)
        wide = tl.where(mask, rounded.to(tl.float32), 0.0)
        norm = tl.load(next_norm + n, mask=n_mask, other=0.0).to(tl.float32)
        tl.store(scaled + offsets, (wide * norm[None, :]).to(scaled.dtype.element_ty), mask=mask)
        tl.store(squares + tile * BLOCK_M + m, tl.sum(wide * wide, 1))


@triton.jit
def _inverse_rms(squares, eps, K, NUM_PARTS: tl.constexpr, PARTS_ROWS: tl.constexpr, BLOCK_M: tl.constexpr):
    """[BLOCK_M], from squares [NUM_PARTS, BLOCK_M] of rows of length K."""
    part = tl.arange(0, PARTS_ROWS)
    places = part[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    values = tl.load(squares + places, mask=(part < NUM_PARTS)[:, None], other=0.0)
    return tl.rsqrt(tl.sum(values, 0) / K + eps)


@triton.jit(do_not_specialize=["num_rows"])
def scaled_kernel(
    out,
    x,
    weight,
    bias,
    squares,
    eps,
    num_rows,
    N,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PARTS_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """out [num_rows, N] = x [num_rows, K] @ weight [N, K].T, each row divided by its root mean square, + bias."""
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_mask = m < num_rows
    n_mask = n < N
    begin(DEPENDENT)
    await_previous(DEPENDENT)
    scale = _inverse_rms(squares, eps, K, NUM_PARTS, PARTS_ROWS, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)
        k_mask = k < K
        rows = tl.load(x + m[:, None] * K + k[None, :], mask=m_mask[:, None] & k_mask[None, :], other=0.0)
        w = tl.load(
            weight + n.to(tl.int64)[None, :] * K + k[:, None], mask=n_mask[None, :] & k_mask[:, None], other=0.0
        )
        acc = tl.dot(rows, w, acc, input_precision=PRECISION)
    acc *= scale[:, None]
    if bias is not None:
        acc += tl.load(bias + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
    tl.store(out + m[:, None] * N + n[None, :], acc.to(out.dtype.element_ty), mask=m_mask[:, None] & n_mask[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def swiglu_kernel(
    out,
    x,
    weight,
    bias,
    squares,
    eps,
    num_rows,
    N,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PARTS_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """out [num_rows, N] = silu(gate) * value, where the weight [2 N, K] has the gates first, then the values.

    Where `squares` is given, rows are divided by their root mean square before anything else.
    """
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_mask = m < num_rows
    n_mask = n < N
    begin(DEPENDENT)
    await_previous(DEPENDENT)
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    value = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)
        k_mask = k < K
        rows = tl.load(x + m[:, None] * K + k[None, :], mask=m_mask[:, None] & k_mask[None, :], other=0.0)
        gates = weight + n.to(tl.int64)[None, :] * K + k[:, None]
        mask = n_mask[None, :] & k_mask[:, None]
        gate = tl.dot(rows, tl.load(gates, mask=mask, other=0.0), gate, input_precision=PRECISION)
        values = tl.load(gates + tl.cast(N, tl.int64) * K, mask=mask, other=0.0)
        value = tl.dot(rows, values, value, input_precision=PRECISION)
    if squares is not None:
        scale = _inverse_rms(squares, eps, K, NUM_PARTS, PARTS_ROWS, BLOCK_M)
        gate *= scale[:, None]
        value *= scale[:, None]
    if bias is not None:
        gate += tl.load(bias + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
        value += tl.load(bias + N + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
    result = gate * tl.sigmoid(gate) * value
    tl.store(out + m[:, None] * N + n[None, :], result.to(out.dtype.element_ty), mask=m_mask[:, None] & n_mask[None, :])


def one_row(
    x: Tensor,
    weight: Tensor | PackedCodes,
    bias: Tensor | None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    swiglu: bool = False,
    out: Tensor | None = None,
    blocks: tuple[int, int, int, int] | None = None,
) -> Tensor:
    """x [1, in] times weight.T. Optionally, x is normed first and the product is gated or added to `residual`."""
    numbers, scales = (weight, None) if isinstance(weight, Tensor) else (weight.codes, weight.scales)
    num_outputs, num_inputs = len(numbers), x.shape[1]
    if swiglu:
        num_outputs //= 2
    if residual is not None:
        out = residual
    elif out is None:
        out = torch.empty(1, num_outputs, dtype=x.dtype, device=x.device)
    if isinstance(weight, PackedCodes) and weight.group_size > 0:
        block_n, block_k, num_warps, stages = blocks or _grouped_row_blocks(weight, swiglu=swiglu)
        span = weight.plane or weight.group_size
        grouped_row_kernel[(triton.cdiv(num_outputs, block_n),)](
            out, x, numbers, scales, weight.group_scales, weight.group_offsets, bias, norm, residual, eps, num_outputs,
            K=num_inputs, WIDTH=numbers.shape[1], SPAN=span, SPANS=max(block_k // span, 1),
            PER_GROUP=weight.group_size // span if weight.is_int4 else 0, BLOCK_N=block_n, SWIGLU=swiglu, STAGES=stages,
            num_warps=num_warps, **dependent_launch(x),
        )  # fmt: skip
        return out
    block_n, block_k, num_warps, stages = blocks or _one_row_blocks(numbers, swiglu=swiglu)
    one_row_kernel[(triton.cdiv(num_outputs, block_n),)](
        out,
        x,
        numbers,
        scales,
        bias,
        norm,
        residual,
        eps,
        num_outputs,
        K=num_inputs,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        SWIGLU=swiglu,
        STAGES=stages,
        num_warps=num_warps,
        **dependent_launch(x),
    )
    return out


def split_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, next_norm: Tensor) -> ScaledRows:
    """residual += x @ weight.T + bias, for up to 64 rows, and the first half of the norm that follows."""
    num_outputs, num_inputs = weight.shape
    block_m = _block_m(x)
    num_tiles = triton.cdiv(num_outputs, _SPLIT_BLOCK_N)
    parts, num_arrived = _scratch(x.device)
    scaled = torch.empty_like(residual)
    squares = torch.empty(num_tiles, block_m, dtype=torch.float32, device=x.device)
    split_kernel[(num_tiles, _SPLITS)](
        residual,
        scaled,
        squares,
        x,
        weight,
        bias,
        next_norm,
        parts,
        num_arrived,
        len(x),
        num_outputs,
        K=num_inputs,
        BLOCK_M=block_m,
        BLOCK_N=_SPLIT_BLOCK_N,
        BLOCK_K=_SPLIT_BLOCK_K,
        SPLITS=_SPLITS,
        PRECISION=_precision(x),
        STAGES=_stages(4, x, block_m + _SPLIT_BLOCK_N, _SPLIT_BLOCK_K),
        num_warps=4,
        **dependent_launch(x),
    )
    return ScaledRows(scaled, squares)


def scaled_linear(x: ScaledRows, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """The second half of the norm, and the linear layer after it."""
    num_outputs, num_inputs = weight.shape
    rows = x.values
    out = torch.empty(len(rows), num_outputs, dtype=rows.dtype, device=rows.device)
    scaled_kernel[(triton.cdiv(num_outputs, 32),)](
        out,
        rows,
        weight,
        bias,
        x.squares,
        eps,
        len(rows),
        num_outputs,
        K=num_inputs,
        BLOCK_M=_block_m(rows),
        BLOCK_N=32,
        BLOCK_K=128,
        NUM_PARTS=len(x.squares),
        PARTS_ROWS=triton.next_power_of_2(len(x.squares)),
        PRECISION=_precision(rows),
        STAGES=_stages(5, rows, _block_m(rows) + 32, 128),
        num_warps=4,
        **dependent_launch(rows),
    )
    return out


def swiglu(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, squares: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """silu(first half) * second half of x @ weight.T + bias, for up to 64 rows. `squares` are those of `ScaledRows`."""
    num_outputs, num_inputs = weight.shape[0] // 2, weight.shape[1]
    out = torch.empty(len(x), num_outputs, dtype=x.dtype, device=x.device)
    block_n = 32 if num_outputs <= 4096 else 64
    num_parts = 1 if squares is None else len(squares)
    swiglu_kernel[(triton.cdiv(num_outputs, block_n),)](
        out,
        x,
        weight,
        bias,
        squares,
        eps,
        len(x),
        num_outputs,
        K=num_inputs,
        BLOCK_M=_block_m(x),
        BLOCK_N=block_n,
        BLOCK_K=128,
        NUM_PARTS=num_parts,
        PARTS_ROWS=triton.next_power_of_2(num_parts),
        PRECISION=_precision(x),
        STAGES=_stages(4, x, _block_m(x) + 2 * block_n, 128),
        num_warps=4,
        **dependent_launch(x),
    )
    return out


def _stages(wanted: int, x: Tensor, num_rows: int, num_columns: int) -> int:
    return stages_that_fit(wanted, num_rows * num_columns * x.element_size(), x.device)


def _block_m(x: Tensor) -> int:
    return int(max(16, triton.next_power_of_2(len(x))))


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _one_row_blocks(weight: Tensor, *, swiglu: bool) -> tuple[int, int, int, int]:
    """(BLOCK_N, BLOCK_K, warps, stages), by measurement on an H200 over the layers of 0.6B and 8B models."""
    num_outputs, num_inputs = weight.shape
    if weight.element_size() == 1:
        if num_inputs <= 1024:
            return (2, 1024, 2, 2) if swiglu else (8, 1024, 4, 3)
        if swiglu:
            return (8 if weight.is_floating_point() else 4), 256, 1, 4
        return (4, 2048, 4, 2) if 4096 < num_outputs <= _MAX_WIDE_ROWS else (4, 1024, 2, 3)
    if num_inputs <= 1024:
        return (2, 1024, 4, 2) if swiglu else (8, 1024, 8, 2)
    if num_inputs <= 4096 and swiglu:
        return 1, 4096, 4, 2
    if num_inputs <= 4096 and num_outputs <= 1024:
        return (1, 2048, 4, 2) if num_inputs <= 2048 else (1, 4096, 4, 2)
    if num_inputs <= 4096 and 4096 < num_outputs <= _MAX_WIDE_ROWS:
        return 2, 4096, 8, 2
    return (4, 1024, 4, 2) if num_inputs > 4096 else (4, 512, 2, 3)


def _grouped_row_blocks(weight: PackedCodes, *, swiglu: bool) -> tuple[int, int, int, int]:
    """(BLOCK_N, bytes or words of a step, warps, stages), by measurement as above."""
    if not weight.is_int4:
        return 4, 512, 1, 3
    if weight.num_inputs > 1024:
        return 4, 512, 4, 3
    return (2, 256, 1, 3) if swiglu else (4, 256, 1, 3)


@functools.cache
def _scratch(device: torch.device) -> tuple[Tensor, Tensor]:
    """Parts of sums and counters of arrived programs, shared by all layers: steps of a device run one by one."""
    num_tiles = triton.cdiv(MAX_SPLIT_OUTPUTS, _SPLIT_BLOCK_N)
    parts = torch.empty(num_tiles * _SPLITS * MAX_SPLIT_ROWS * _SPLIT_BLOCK_N, dtype=torch.float32, device=device)
    return parts, torch.zeros(num_tiles, dtype=torch.int32, device=device)
