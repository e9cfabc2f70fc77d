"""Sampling in Triton: from a step's logits to tokens that never leave the device, by the definition of `sampler.py`.

The next step is launched before this one's tokens are known, so nothing here may depend on a token's value on the host.
What a row asks for lies in one record of a permanent table, which programs find by row id, and so do the tokens it has
and has seen; they are written when a request enters and by the kernels as tokens are chosen. A token is found in one
pass over the logits: the largest of many numbers does not depend on the order in which they are looked at, so a row's
token is the same however the vocabulary is split over programs. A step uses, of these, what its rows need:

    edit_logits       bans, biases and bad words, one entry each, into a float32 copy of the logits
    penalise          repetition, frequency and presence penalties, by a dense table of what each row has seen
    find_thresholds   top_k, top_p, min_p: per row the lowest logit that is kept
    pick_tokens       the choice, in two kernels: the best of each part of the vocabulary, then the best of those
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.runner.sampler import (
    FILTERS,
    LOGIT_IS_INFINITE,
    LOGIT_IS_NAN,
    NOTHING_LEFT,
    ONE_OUTPUT,
    PENALTIES,
    Int32Array,
    Int64Array,
    LogitEntries,
    RowRecord,
    SamplingRows,
    Seat,
    seen_tokens,
)

RECORD_WORDS = RowRecord.itemsize // 4


def _word(field: str) -> tl.constexpr:
    """Where a field of the record starts, in 32-bit words."""
    assert RowRecord.fields is not None
    return tl.constexpr(RowRecord.fields[field][1] // 4)


_WORDS = tl.constexpr(RECORD_WORDS)
_SEED = _word("seed")
_TOP_P = _word("top_p")
_INVERSE_TEMPERATURE = _word("inverse_temperature")
_TOP_K = _word("top_k")
_MIN_P_OFFSET = _word("min_p_offset")
_REPETITION = _word("repetition")
_FREQUENCY = _word("frequency")
_PRESENCE = _word("presence")

_NOTHING_LEFT = tl.constexpr(NOTHING_LEFT)
_LOGIT_IS_NAN = tl.constexpr(LOGIT_IS_NAN)
_LOGIT_IS_INFINITE = tl.constexpr(LOGIT_IS_INFINITE)

_ONE_OUTPUT = tl.constexpr(ONE_OUTPUT)

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
_NO_ID = tl.constexpr(2**31 - 1)
_UNITS = tl.constexpr(2.0**40)

# Logits that a program of `pick_tokens` takes at a time: 16 bytes of bfloat16 per thread.
PICK_TILE = 1024
# Programs that a step's picking is spread over: enough to fill a large device several times.
PICK_PROGRAMS = 2048
# A row's threshold is found by one program of many threads.
THRESHOLD_TILE = 4096
# Up to this top_k the search starts from a bound that is close to its end.
TOP_K_GROUPS = 64
EDIT_ENTRIES = 128
PENALTY_TILE = 2048


# ---------------------------------------------------------------------------------------------------------------- noise


@triton.jit
def _mix64(word):
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def _mix32(word):
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def noise_key(seed, position):
    """The two 32-bit halves of a hash of (seed, position), all uint64."""
    key = _mix64(seed + 0x9E3779B97F4A7C15)
    key = _mix64(key + position * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15)
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def gumbel_noise(key_low, key_high, ids):
    """-log(-log(1 - u)) with u in (0, 1) from a hash of key and id.

    Small u make large noise, which is what wins: there the inner logarithm is taken from its series, as 1 - u has lost
    the digits of u. Elsewhere 1 - u comes from the complement of the hash, which has all of its own.
    """
    bits = _mix32(_mix32(ids.to(tl.uint32) + key_low) ^ key_high)
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    rest = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    exponential = tl.where(u < 0.00390625, u * (1.0 + 0.5 * u), -_log(rest))
    return -_log(exponential)


@triton.jit
def _log(x):
    """The device's own approximation: good to 2^-22, which noise does not notice, and several times faster."""
    if _INTERPRETED:
        return tl.log(x)
    log2 = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return log2 * 0.6931471805599453


# -------------------------------------------------------------------------------------------------------------- records


@triton.jit
def _float_field(record, FIELD: tl.constexpr):
    return tl.load(record + FIELD).to(tl.float32, bitcast=True)


@triton.jit
def _wide_field(record, FIELD: tl.constexpr):
    low = tl.load(record + FIELD).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(record + FIELD + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    return low | (high << 32)


# -------------------------------------------------------------------------------------------------------------- picking


@triton.jit(
    do_not_specialize=["tiles_per_split"], do_not_specialize_on_alignment=["row_ids", "positions", "thresholds"]
)
def _pick_from_part_kernel(
    logits,
    line_stride,
    vocab_size,
    row_ids,
    positions,
    table,
    thresholds,
    part_scores,
    part_ids,
    part_stride,
    tiles_per_split,
    HAS_THRESHOLDS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (line, split): the best score and its id in one part of the line; a score of NaN where a logit is NaN."""
    line = tl.program_id(0)
    split = tl.program_id(1)
    record = table + tl.load(row_ids + line).to(tl.int64) * _WORDS
    inverse_temperature = _float_field(record, _INVERSE_TEMPERATURE)
    position = tl.load(positions + line).to(tl.uint64)
    key_low, key_high = noise_key(_wide_field(record, _SEED), position)
    if HAS_THRESHOLDS:
        threshold = tl.load(thresholds + line)

    lanes = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_ids = tl.full([TILE], _NO_ID, tl.int32)
    is_nan = tl.zeros([TILE], tl.int32)
    start = split * tiles_per_split * TILE
    end = tl.minimum(start + tiles_per_split * TILE, vocab_size)
    for first in range(start, end, TILE):
        ids = first + lanes
        scores = tl.load(logits + line.to(tl.int64) * line_stride + ids, mask=ids < end, other=float("-inf"))
        scores = scores.to(tl.float32)
        is_nan |= (scores != scores).to(tl.int32)
        if HAS_THRESHOLDS:
            scores = tl.where(scores >= threshold, scores, float("-inf"))
        if inverse_temperature > 0:
            scores = scores * inverse_temperature + gumbel_noise(key_low, key_high, ids)
        better = scores > best
        best = tl.where(better, scores, best)
        best_ids = tl.where(better, ids, best_ids)

    score = tl.max(best, 0)
    token = tl.min(tl.where(best == score, best_ids, _NO_ID), 0)
    score = tl.where(tl.max(is_nan, 0) > 0, float("nan"), score)
    tl.store(part_scores + line * part_stride + split, score)
    tl.store(part_ids + line * part_stride + split, token)


@triton.jit(
    do_not_specialize=["num_splits"],
    do_not_specialize_on_alignment=["row_ids", "positions", "token_ids"],
)
def _pick_from_parts_kernel(
    part_scores,
    part_ids,
    part_stride,
    num_splits,
    row_ids,
    positions,
    token_ids,
    token_rows,
    token_row_stride,
    max_model_len,
    seen,
    vocab_size,
    HAS_SEEN: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Program (line): the best of the parts, or why there is none, and its traces in the row."""
    line = tl.program_id(0)
    splits = tl.arange(0, MAX_SPLITS)
    exists = splits < num_splits
    scores = tl.load(part_scores + line * part_stride + splits, mask=exists, other=float("-inf"))
    ids = tl.load(part_ids + line * part_stride + splits, mask=exists, other=_NO_ID)
    is_nan = tl.max((scores != scores).to(tl.int32), 0) > 0
    score = tl.max(tl.where(scores == scores, scores, float("-inf")), 0)
    token = tl.min(tl.where(scores == score, ids, _NO_ID), 0)
    token = tl.where(score == float("-inf"), _NOTHING_LEFT, token)
    token = tl.where(score == float("inf"), _LOGIT_IS_INFINITE, token)
    token = tl.where(is_nan, _LOGIT_IS_NAN, token)
    tl.store(token_ids + line, token)

    row = tl.load(row_ids + line).to(tl.int64)
    position = tl.load(positions + line)
    chosen = tl.maximum(token, 0)  # a row without a token may run one more step, and must be able to
    tl.store(token_rows + row * token_row_stride + position, chosen, mask=position < max_model_len)
    if HAS_SEEN:
        entry = seen + row * vocab_size + chosen
        tl.store(entry, tl.load(entry) + _ONE_OUTPUT, mask=token >= 0)


@dataclass(frozen=True, slots=True)
class PickScratch:
    """Where the programs that each look at a part of the vocabulary leave what they found; lines × parts."""

    scores: Tensor
    ids: Tensor

    @classmethod
    def zeros(cls, num_lines: int, vocab_size: int, device: torch.device) -> PickScratch:
        shape = (num_lines, triton.cdiv(vocab_size, PICK_TILE))
        return cls(torch.zeros(shape, device=device), torch.zeros(shape, dtype=torch.int32, device=device))


def pick_tokens(
    logits: Tensor,
    *,
    row_ids: Tensor,
    positions: Tensor,
    table: Tensor,
    thresholds: Tensor | None,
    token_rows: Tensor,
    seen: Tensor | None,
    scratch: PickScratch,
) -> Tensor:
    """A token, or a negative code, for each of `row_ids` [R] from the first R lines of `logits`; int32 [R].

    The token is also written to its position in `token_rows` (0 where there is none) and counted in `seen`.
    """
    num_lines, vocab_size = len(row_ids), logits.shape[1]
    num_tiles, max_parts = triton.cdiv(vocab_size, PICK_TILE), scratch.ids.shape[1]
    tiles_per_split = triton.cdiv(num_tiles, min(num_tiles, max(1, PICK_PROGRAMS // num_lines)))
    num_splits = triton.cdiv(num_tiles, tiles_per_split)
    _pick_from_part_kernel[(num_lines, num_splits)](
        logits,
        logits.stride(0),
        vocab_size,
        row_ids,
        positions,
        table,
        scratch.scores if thresholds is None else thresholds,
        scratch.scores,
        scratch.ids,
        max_parts,
        tiles_per_split,
        HAS_THRESHOLDS=thresholds is not None,
        TILE=PICK_TILE,
        num_warps=4,
    )
    token_ids = torch.empty(num_lines, dtype=torch.int32, device=logits.device)
    _pick_from_parts_kernel[(num_lines,)](
        scratch.scores,
        scratch.ids,
        max_parts,
        num_splits,
        row_ids,
        positions,
        token_ids,
        token_rows,
        token_rows.stride(0),
        token_rows.shape[1],
        scratch.ids if seen is None else seen,
        vocab_size,
        HAS_SEEN=seen is not None,
        MAX_SPLITS=triton.next_power_of_2(max_parts),
        num_warps=1,
    )
    return token_ids


# ----------------------------------------------------------------------------------------------------------- thresholds
#
# A threshold is searched for among float32 numbers in their order as integers, four ways at a time: a pass over the
# line measures what lies at or above each of three pivots, and the search goes on between the last pivot with enough
# and the first without. 32 bits take at most 16 passes. Half-precision logits have only zeros in the low bits of their
# float32 form, so the search leaves those bits out: 8 passes for bfloat16. It starts from bounds that mostly leave few
# numbers to search, and ends as soon as a single logit is left between them.


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
    top_p = _wide_field(record, _TOP_P).to(tl.float64, bitcast=True)
    min_p_offset = _float_field(record, _MIN_P_OFFSET)
    inverse_temperature = _float_field(record, _INVERSE_TEMPERATURE)
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
    """For each of `row_ids` [R] the lowest logit that its top_k, top_p and min_p keep; -inf: all. float32 [R]."""
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


# -------------------------------------------------------------------------------------------------------------- editing


@triton.jit(
    do_not_specialize=["num_entries", "longest"],
    do_not_specialize_on_alignment=["row_ids", "positions", "entries", "prefixes"],
)
def _edit_kernel(
    logits,
    line_stride,
    row_ids,
    positions,
    token_rows,
    token_row_stride,
    max_model_len,
    entries,
    num_entries,
    prefixes,
    longest,
    ENTRIES: tl.constexpr,
):
    """Program (group of entries). See `edit_logits` for what an entry is."""
    places = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    applies = places < num_entries
    line = tl.load(entries + places, mask=applies, other=0)
    token = tl.load(entries + num_entries + places, mask=applies, other=0)
    value = tl.load(entries + 2 * num_entries + places, mask=applies, other=0).to(tl.float32, bitcast=True)
    prefix = tl.load(entries + 3 * num_entries + places, mask=applies, other=0)
    length = tl.load(entries + 4 * num_entries + places, mask=applies, other=0)
    row = tl.load(row_ids + line, mask=applies, other=0).to(tl.int64)
    first = tl.load(positions + line, mask=applies, other=0) - length
    for step in range(longest):
        compares = applies & (step < length)
        wanted = tl.load(prefixes + prefix + step, mask=compares, other=0)
        exists = compares & (first + step >= 0) & (first + step < max_model_len)
        present = tl.load(token_rows + row * token_row_stride + first + step, mask=exists, other=-1)
        applies = applies & ((step >= length) | (present == wanted))
    # A ban and a bias may meet at one token: whichever comes first, -inf remains.
    where = logits + line.to(tl.int64) * line_stride + token
    is_ban = value == float("-inf")
    tl.store(where, value, mask=applies & is_ban)
    tl.atomic_add(where, value, mask=applies & (value > float("-inf")))


def edit_logits(
    logits: Tensor,
    *,
    row_ids: Tensor,
    positions: Tensor,
    token_rows: Tensor,
    entries: Tensor,
    prefixes: Tensor,
    longest_prefix: int,
) -> None:
    """Add to single logits, float32 [R, V], in place. `entries` and `prefixes` are those of `LogitEntries`."""
    num_entries = entries.shape[1]
    _edit_kernel[(triton.cdiv(num_entries, EDIT_ENTRIES),)](
        logits,
        logits.stride(0),
        row_ids,
        positions,
        token_rows,
        token_rows.stride(0),
        token_rows.shape[1],
        entries,
        num_entries,
        prefixes,
        longest_prefix,
        ENTRIES=EDIT_ENTRIES,
        num_warps=4,
    )


@triton.jit(do_not_specialize_on_alignment=["row_ids"])
def _penalty_kernel(logits, line_stride, vocab_size, row_ids, table, seen, TILE: tl.constexpr):
    """Program (line, tile)."""
    line = tl.program_id(0)
    row = tl.load(row_ids + line).to(tl.int64)
    record = table + row * _WORDS
    repetition = _float_field(record, _REPETITION)
    frequency = _float_field(record, _FREQUENCY)
    presence = _float_field(record, _PRESENCE)
    if (repetition == 1.0) & (frequency == 0.0) & (presence == 0.0):
        return
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    exists = ids < vocab_size
    entry = tl.load(seen + row * vocab_size + ids, mask=exists, other=0)
    is_seen = exists & (entry != 0)
    where = logits + line.to(tl.int64) * line_stride + ids
    value = tl.load(where, mask=is_seen, other=0.0)
    value = tl.where(value > 0, value / repetition, value * repetition)
    count = (entry // _ONE_OUTPUT).to(tl.float32)
    value -= frequency * count + tl.where(count > 0, presence, 0.0)
    tl.store(where, value, mask=is_seen)


def penalise(logits: Tensor, *, row_ids: Tensor, table: Tensor, seen: Tensor) -> None:
    """Lower (or raise) the logits, float32 [R, V], of tokens seen before, in place, for the rows that ask for it.

    Repetition scales tokens of prompt or output away from "likely"; frequency and presence subtract for tokens of the
    output. `seen` int32 [rows, V] has the entries described at `IN_PROMPT` in sampler.py.
    """
    vocab_size = logits.shape[1]
    _penalty_kernel[(len(row_ids), triton.cdiv(vocab_size, PENALTY_TILE))](
        logits, logits.stride(0), vocab_size, row_ids, table, seen, TILE=PENALTY_TILE, num_warps=4
    )


# ------------------------------------------------------------------------------------------------------------- a device


class TritonSampling:
    """`SamplingKernels` on a device.

    `token_rows` int32 [max_num_seqs, max_model_len] holds the tokens of all rows. `sample_rows` and `sample_positions`
    int32 are where a staged step has the rows and positions that it samples at, in fixed places; they must be those
    that `edit` and `pick` are called with.
    """

    def __init__(
        self, rows: SamplingRows, *, token_rows: Tensor, sample_rows: Tensor, sample_positions: Tensor
    ) -> None:
        device = token_rows.device
        self._rows = rows
        self._device = device
        self._is_pinned = device.type == "cuda"
        self._token_rows = token_rows
        self._sample_rows = sample_rows
        self._sample_positions = sample_positions
        self._table = torch.zeros((rows.max_num_seqs, RECORD_WORDS), dtype=torch.int32, device=device)
        self._scratch = PickScratch.zeros(rows.max_num_seqs, rows.vocab_size, device)
        self._seen: Tensor | None = None

    def seat(self, seats: Sequence[Seat]) -> None:
        """Send records and seen tokens, in one copy."""
        row_ids = np.asarray([seat.row for seat in seats], dtype=np.int32)
        words = self._rows.records[row_ids].view(np.int32).reshape(len(seats), RECORD_WORDS)
        seen = [_seen_entries(seat) for seat in seats if seat.params.is_penalised]
        if not seen:
            on_device, words_on_device = self._upload(row_ids, words)
            self._table.index_copy_(0, on_device.long(), words_on_device)
            return
        on_device, words_on_device, entries = self._upload(row_ids, words, np.concatenate(seen, axis=1))
        self._table.index_copy_(0, on_device.long(), words_on_device)
        if self._seen is None:
            shape = (self._rows.max_num_seqs, self._rows.vocab_size)
            self._seen = torch.zeros(shape, dtype=torch.int32, device=self._device)
        self._seen.index_fill_(0, on_device.long(), 0)
        self._seen.index_put_((entries[0].long(), entries[1].long()), entries[2])

    def prepare(self, logits: Tensor, num_lines: int) -> Tensor:
        """As they are: kernels read any float type."""
        return logits

    def edit(
        self,
        logits: Tensor,
        rows: Int64Array,
        positions: Int64Array,
        *,
        entries: LogitEntries | None,
        penalised: bool,
        keep_logits: bool,
    ) -> Tensor:
        """A float32 copy of the logits with edits and penalties."""
        edited = logits.to(torch.float32, copy=True)
        row_ids = self._sample_rows[: len(rows)]
        if entries is not None:
            columns, prefixes = self._upload(entries.columns, entries.prefixes)
            edit_logits(
                edited,
                row_ids=row_ids,
                positions=self._sample_positions[: len(rows)],
                token_rows=self._token_rows,
                entries=columns,
                prefixes=prefixes,
                longest_prefix=int(entries.columns[-1].max()),
            )
        if penalised:
            assert self._seen is not None
            penalise(edited, row_ids=row_ids, table=self._table, seen=self._seen)
        return edited

    def pick(self, logits: Tensor, rows: Int64Array, positions: Int64Array, *, used: int) -> Tensor:
        """Filters and the choice, and its traces in the row."""
        row_ids = self._sample_rows[: len(rows)]
        return pick_tokens(
            logits,
            row_ids=row_ids,
            positions=self._sample_positions[: len(rows)],
            table=self._table,
            thresholds=find_thresholds(logits, row_ids=row_ids, table=self._table) if used & FILTERS else None,
            token_rows=self._token_rows,
            seen=self._seen if used & PENALTIES else None,
            scratch=self._scratch,
        )

    def upload(self, array: Int32Array) -> Tensor:
        """A copy on the device that nothing waits for."""
        (on_device,) = self._upload(array)
        return on_device

    def download(self, tensor: Tensor) -> Tensor:
        """A host tensor that has the values once the device has come this far."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._is_pinned)
        return host.copy_(tensor, non_blocking=True)

    def _upload(self, *arrays: Int32Array) -> list[Tensor]:
        """All arrays in one copy from page-locked memory, whose allocator keeps it until the copy is done."""
        sizes = [array.size for array in arrays]
        host = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=self._is_pinned)
        np.concatenate([array.ravel() for array in arrays], out=host.numpy())
        parts = host.to(self._device, non_blocking=True).split(sizes)
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def _seen_entries(seat: Seat) -> Int32Array:
    """Row, token and entry of each distinct token of a request; int32 [3, E]."""
    tokens, entries = seen_tokens(seat.request)
    return np.stack([np.full_like(tokens, seat.row), tokens, entries])
