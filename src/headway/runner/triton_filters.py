"""top_k, top_p and min_p in Triton: finds, for each row, the lowest logit that is kept. For `triton_sampling.py`.

A threshold is searched for among float32 numbers in their order as integers, four ways at a time: a pass over the line
measures what lies at or above each of three pivots, and the search goes on between the last pivot with enough and the
first without. 32 bits take at most 16 passes. Half-precision logits have only zeros in the low bits of their float32
form, so the search leaves those bits out: 8 passes for bfloat16. It starts from bounds that mostly leave few numbers to
search, and ends as soon as a single logit is left between them.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.runner.sampler import RowRecord, record_word

_WORDS = tl.constexpr(RowRecord.itemsize // 4)
_TOP_P = tl.constexpr(record_word("top_p"))
_TOP_K = tl.constexpr(record_word("top_k"))
_MIN_P_OFFSET = tl.constexpr(record_word("min_p_offset"))
_INVERSE_TEMPERATURE = tl.constexpr(record_word("inverse_temperature"))

_UNITS = tl.constexpr(2.0**40)
# A row's threshold is found by one program of many threads.
THRESHOLD_TILE = 4096
# Up to this top_k the search starts from a bound that is close to its end.
TOP_K_GROUPS = 64


@triton.jit
def _rank(values, LOW_BITS: tl.constexpr):
    """Integers in the order of the float32 `values`, without the lowest bits."""
    bits = values.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> LOW_BITS


@triton.jit
def _lowest_value(rank, LOW_BITS: tl.constexpr):
    """The lowest number of this rank."""
    bits = rank.to(tl.int32) << LOW_BITS
    value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(value == value, value, float("-inf"))  # -inf without its low bits is no number


@triton.jit
def _bounds(line, vocab_size, GROUPS: tl.constexpr, TILE: tl.constexpr):
    """The highest logit; one that at least GROUPS logits reach, the lowest of the maxima of groups; and the lowest."""
    highest = tl.full([TILE], float("-inf"), tl.float32)
    lowest = tl.full([TILE], float("inf"), tl.float32)
    for first in range(0, vocab_size, TILE):
        ids = first + tl.arange(0, TILE)
        exists = ids < vocab_size
        values = tl.load(line + ids, mask=exists, other=0.0).to(tl.float32)
        highest = tl.where(exists, tl.maximum(highest, values), highest)
        lowest = tl.where(exists, tl.minimum(lowest, values), lowest)
    maxima = tl.max(tl.reshape(highest, [GROUPS, TILE // GROUPS]), 1)
    return tl.max(maxima, 0), tl.min(maxima, 0), tl.min(lowest, 0)


@triton.jit
def _total(lane_sums):
    """The sum over lanes in units of 2^-40: integers, so that the order of adding does not matter."""
    return tl.sum((lane_sums.to(tl.float64) * _UNITS).to(tl.int64), 0).to(tl.float64)


@triton.jit
def _measures(
    line,
    vocab_size,
    pivot_1,
    pivot_2,
    pivot_3,
    cut,
    highest,
    inverse_temperature,
    BY_WEIGHT: tl.constexpr,
    TILE: tl.constexpr,
    LOW_BITS: tl.constexpr,
):
    """How many logits have at least each of three ranks; or how much those of them weigh that are not below `cut`.

    The highest logit weighs 1. A lane adds up its logits in the order of ids, so a higher rank never measures more.
    """
    sum_1 = tl.zeros([TILE], tl.float32)
    sum_2 = tl.zeros([TILE], tl.float32)
    sum_3 = tl.zeros([TILE], tl.float32)
    for start in range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        values = tl.load(line + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        ranks = _rank(values, LOW_BITS)
        if BY_WEIGHT:
            weights = tl.where(values >= cut, tl.exp((values - highest) * inverse_temperature), 0.0)
        else:
            weights = tl.full([TILE], 1.0, tl.float32)
        sum_1 += tl.where(ranks >= pivot_1.to(tl.int32), weights, 0.0)
        sum_2 += tl.where(ranks >= pivot_2.to(tl.int32), weights, 0.0)
        sum_3 += tl.where(ranks >= pivot_3.to(tl.int32), weights, 0.0)
    return _total(sum_1), _total(sum_2), _total(sum_3)


@triton.jit
def _highest_with(
    wanted,
    line,
    vocab_size,
    lowest,
    everything,
    cut,
    highest,
    inverse_temperature,
    BY_WEIGHT: tl.constexpr,
    TILE: tl.constexpr,
    LOW_BITS: tl.constexpr,
):
    """The highest logit that measures at least `wanted`, or a number that divides the logits in the same place.

    `lowest` must measure enough; `everything` is what the whole line measures.
    """
    low = _rank(lowest, LOW_BITS).to(tl.int64)
    high = _rank(highest, LOW_BITS).to(tl.int64) + 1
    at_low = everything
    at_high = everything * 0.0
    least = at_high if BY_WEIGHT else at_high + _UNITS  # that any logit in between measures
    while (high - low > 1) & (at_low > wanted) & (at_low - at_high > 1.9 * least):
        step = (high - low + 3) >> 2
        second = tl.minimum(low + 2 * step, high)
        third = tl.minimum(low + 3 * step, high)
        has_1, has_2, has_3 = _measures(
            line, vocab_size, low + step, second, third, cut, highest, inverse_temperature, BY_WEIGHT, TILE, LOW_BITS
        )
        is_1, is_2, is_3 = has_1 >= wanted, has_2 >= wanted, has_3 >= wanted
        at_low = tl.where(is_3, has_3, tl.where(is_2, has_2, tl.where(is_1, has_1, at_low)))
        at_high = tl.where(is_3, at_high, tl.where(is_2, has_3, tl.where(is_1, has_2, has_1)))
        num_enough = is_1.to(tl.int64) + is_2.to(tl.int64) + is_3.to(tl.int64)
        high = tl.minimum(low + (num_enough + 1) * step, high)
        low += num_enough * step
        if BY_WEIGHT:
            weight = tl.exp((_lowest_value(low, LOW_BITS) - highest) * inverse_temperature)
            least = weight.to(tl.float64) * _UNITS
    return _lowest_value(low, LOW_BITS)


@triton.jit(do_not_specialize_on_alignment=["row_ids"])
def _threshold_kernel(
    logits,
    line_stride,
    vocab_size,
    row_ids,
    table,
    thresholds,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    LOW_BITS: tl.constexpr,
):
    """Program (line). Rows without filters, and those that will fail, keep everything."""
    line = tl.program_id(0)
    record = table + tl.load(row_ids + line).to(tl.int64) * _WORDS
    top_k = tl.load(record + _TOP_K)
    top_p = tl.load((record + _TOP_P).to(tl.pointer_type(tl.float64)))
    min_p_offset = tl.load((record + _MIN_P_OFFSET).to(tl.pointer_type(tl.float32)))
    inverse_temperature = tl.load((record + _INVERSE_TEMPERATURE).to(tl.pointer_type(tl.float32)))
    tl.store(thresholds + line, float("-inf"))
    if (top_k == 0) & (top_p >= 1.0) & (min_p_offset == float("-inf")):
        return
    values = logits + line.to(tl.int64) * line_stride
    highest, high_enough, lowest = _bounds(values, vocab_size, GROUPS, TILE)
    if (highest == float("-inf")) | (highest == float("inf")) | (highest != highest):
        return
    cut = highest + min_p_offset
    if top_k > 0:
        start = tl.where(top_k <= GROUPS, high_enough, lowest)
        everything = vocab_size.to(tl.float64) * _UNITS
        wanted = top_k.to(tl.float64) * _UNITS
        kth = _highest_with(
            wanted, values, vocab_size, start, everything, lowest, highest, inverse_temperature, False, TILE, LOW_BITS
        )
        cut = tl.maximum(cut, kth)
    if top_p < 1.0:
        rank = _rank(cut, LOW_BITS)
        everything, _, _ = _measures(
            values, vocab_size, rank, rank, rank, cut, highest, inverse_temperature, True, TILE, LOW_BITS
        )
        # What weighs less than (1 - top_p) / vocab_size weighs less than 1 - top_p in all, and is not needed.
        spare = (tl.log(((1.0 - top_p) / vocab_size).to(tl.float32)) - 0.5) / inverse_temperature
        start = tl.maximum(cut, highest + spare)
        nucleus = _highest_with(
            everything * top_p,
            values,
            vocab_size,
            start,
            everything,
            cut,
            highest,
            inverse_temperature,
            True,
            TILE,
            LOW_BITS,
        )
        cut = tl.maximum(cut, nucleus)
    tl.store(thresholds + line, cut)


_ZERO_LOW_BITS = {torch.float16: 13, torch.bfloat16: 16}


def find_thresholds(logits: Tensor, *, row_ids: Tensor, table: Tensor) -> Tensor:
    """For each of `row_ids` [R], the lowest logit that its top_k, top_p and min_p keep; -inf: all. float32 [R]."""
    vocab_size = logits.shape[1]
    tile = min(THRESHOLD_TILE, max(128, triton.next_power_of_2(vocab_size)))
    thresholds = torch.empty(len(row_ids), device=logits.device)
    _threshold_kernel[(len(row_ids),)](
        logits,
        logits.stride(0),
        vocab_size,
        row_ids,
        table,
        thresholds,
        GROUPS=TOP_K_GROUPS,
        TILE=tile,
        LOW_BITS=_ZERO_LOW_BITS.get(logits.dtype, 0),
        num_warps=max(1, tile // 256),
    )
    return thresholds
