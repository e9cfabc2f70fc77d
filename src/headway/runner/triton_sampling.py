"""Sampling in Triton: from logits to tokens that never leave the device, by the definition in `headway.runner.sampler`.

The next step is launched before this one's tokens are known, so nothing here may depend on a token's value on the host.
A row's parameters are one record of a permanent table, which programs index by row id. The row's tokens and the tokens
it has seen are stored the same way; they are written when a request enters, and by the kernels as tokens are chosen. A
token is found in one pass over the logits: a maximum does not depend on the order of its inputs, so a row's token is
the same however the vocabulary is split over programs.

The choice takes two kernels: the first finds the best of each part of the vocabulary, the second the best of those. The
second also writes the token to the host's memory, because a separate copy would take longer. If rows ask for it, the
step first edits the logits (`triton_edits.py`) and finds the lowest logit to keep (`triton_filters.py`).

Noise takes two logarithms. For most of the vocabulary, a bound that takes none shows that the token cannot win.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import copy
import itertools
import math
import os
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.runner.logit_edits import ONE_OUTPUT, StepEdits
from headway.runner.sampler import (
    FILTERS,
    LOGIT_IS_INFINITE,
    LOGIT_IS_NAN,
    NOTHING_LEFT,
    PENALTIES,
    REJECTED,
    Int32Array,
    Int64Array,
    RowRecord,
    SamplingRows,
    Seat,
    StepDrafts,
    record_word,
)
from headway.runner.triton_edits import TritonEdits, seen_entries
from headway.runner.triton_filters import find_thresholds

RECORD_WORDS = RowRecord.itemsize // 4
_WORDS = tl.constexpr(RECORD_WORDS)
_SEED = tl.constexpr(record_word("seed"))
_INVERSE_TEMPERATURE = tl.constexpr(record_word("inverse_temperature"))

_NOTHING_LEFT = tl.constexpr(NOTHING_LEFT)
_LOGIT_IS_NAN = tl.constexpr(LOGIT_IS_NAN)
_LOGIT_IS_INFINITE = tl.constexpr(LOGIT_IS_INFINITE)
_REJECTED = tl.constexpr(REJECTED)
_ONE_OUTPUT = tl.constexpr(ONE_OUTPUT)

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
_NO_ID = tl.constexpr(2**31 - 1)

# Logits that a program loads at a time: 16 bytes of bfloat16 per thread.
PICK_TILE = 1024
# Programs that a step's choice is spread over: enough to fill a large device several times.
PICK_PROGRAMS = 2048
# The number of steps whose tokens the host may not have read yet: two in flight, and some to spare.
_NUM_UNREAD_STEPS = 8

_LN_2 = tl.constexpr(math.log(2))
_MOST_NOISE = tl.constexpr(23.0)  # -log of the smallest u is 22.9


class TritonSampling:
    """`SamplingKernels` on a device.

    `token_rows` int32 [max_num_seqs, max_model_len] holds the tokens of all rows, `lengths` int32 their numbers.
    `sample_rows` and `sample_positions` int32 are the fixed memory where a staged step has the rows and positions that
    it samples. `edit` and `pick` must be called with the same rows and positions, except for positions that only the
    device knows.
    """

    def __init__(
        self,
        rows: SamplingRows,
        *,
        token_rows: Tensor,
        lengths: Tensor,
        sample_rows: Tensor,
        sample_positions: Tensor,
    ) -> None:
        device = token_rows.device
        self._rows = rows
        self._device = device
        self._is_pinned = device.type == "cuda"
        self._token_rows = token_rows
        self._lengths = lengths
        self._sample_rows = sample_rows
        self._sample_positions = sample_positions
        self._table = torch.zeros((rows.max_num_seqs, RECORD_WORDS), dtype=torch.int32, device=device)
        self._edits = TritonEdits(
            token_rows=token_rows, table=self._table, vocab_size=rows.vocab_size, upload=self._upload
        )
        # The best score of each part of the vocabulary, and its id: lines × parts.
        shape = (len(sample_rows), triton.cdiv(rows.vocab_size, PICK_TILE))
        self._part_scores = torch.zeros(shape, device=device)
        self._part_ids = torch.zeros(shape, dtype=torch.int32, device=device)
        # Page-locked memory in which kernels write a step's tokens and the host reads them.
        unread = torch.zeros((_NUM_UNREAD_STEPS, len(sample_rows)), dtype=torch.int32, pin_memory=self._is_pinned)
        self._host_tokens = itertools.cycle(unread)

    def reading(self, *, sample_rows: Tensor, sample_positions: Tensor) -> TritonSampling:
        """A sampler over the same rows, for steps whose columns are in other memory."""
        other = copy.copy(self)
        other._sample_rows, other._sample_positions = sample_rows, sample_positions
        return other

    def seat(self, seats: Sequence[Seat]) -> None:
        """Send the records, and the seen tokens of rows with penalties, in one copy."""
        row_ids = np.asarray([seat.row for seat in seats], dtype=np.int32)
        words = self._rows.records[row_ids].view(np.int32).reshape(len(seats), RECORD_WORDS)
        penalised = [seat for seat in seats if seat.params.is_penalised]
        if not penalised:
            on_device, words_on_device = self._upload(row_ids, words)
        else:
            on_device, words_on_device, seen = self._upload(row_ids, words, seen_entries(penalised))
            self._edits.seat(on_device, seen)
        self._table.index_copy_(0, on_device.long(), words_on_device)

    def prepare(self, logits: Tensor, num_lines: int) -> Tensor:
        """Return the logits unchanged: the kernels read any float type."""
        return logits

    def edit(
        self, logits: Tensor, rows: Int64Array, positions: Int64Array, edits: StepEdits, *, keep_logits: bool
    ) -> Tensor:
        """Apply all edits, in a copy unless there are only masks."""
        row_ids, row_positions = self._sample_rows[: len(rows)], self._sample_positions[: len(rows)]
        return self._edits.apply(logits, row_ids=row_ids, positions=row_positions, edits=edits, keep_logits=keep_logits)

    def pick(
        self, logits: Tensor, rows: Int64Array, positions: Int64Array, *, used: int, drafts: StepDrafts | None = None
    ) -> tuple[Tensor, Tensor]:
        """Filter, choose a token for each row, and record it in the row."""
        if drafts is not None:
            token_ids = self._choose(logits, len(rows), used=used, drafts=drafts)
            return token_ids, self.download(token_ids)
        host_tokens = next(self._host_tokens)[: len(rows)]
        return self._choose(logits, len(rows), used=used, host_tokens=host_tokens), host_tokens

    def guess(self, logits: Tensor, rows: Int64Array, positions: Int64Array, *, used: int) -> None:
        """Filter and choose, without recording the tokens as seen."""
        tokens = self._choose(logits, len(rows), used=used)
        at = self._sample_rows[: len(rows)].long(), self._sample_positions[: len(rows)].long()
        self._token_rows.index_put_(at, tokens.clamp(min=0))

    def _choose(
        self,
        logits: Tensor,
        num_lines: int,
        *,
        used: int,
        drafts: StepDrafts | None = None,
        host_tokens: Tensor | None = None,
    ) -> Tensor:
        """Choose tokens. With `host_tokens`, they are also written there and recorded in the rows."""
        vocab_size = logits.shape[1]
        row_ids, row_positions = self._sample_rows[:num_lines], self._sample_positions[:num_lines]
        thresholds = find_thresholds(logits, row_ids=row_ids, table=self._table) if used & FILTERS else None
        seen = self._edits.seen if used & PENALTIES else None
        scores, ids, token_rows = self._part_scores, self._part_ids, self._token_rows
        max_parts = ids.shape[1]
        tiles_per_part = triton.cdiv(max_parts, min(max_parts, max(1, PICK_PROGRAMS // num_lines)))
        num_parts = triton.cdiv(max_parts, tiles_per_part)
        _pick_from_part_kernel[(num_lines, num_parts)](
            logits, logits.stride(0), vocab_size, row_ids, row_positions, self._table,
            scores if thresholds is None else thresholds, scores, ids, max_parts, tiles_per_part,
            HAS_THRESHOLDS=thresholds is not None, TILE=PICK_TILE, num_warps=4,
        )  # fmt: skip
        token_ids = torch.empty(num_lines, dtype=torch.int32, device=logits.device)
        _pick_from_parts_kernel[(num_lines,)](
            scores, ids, max_parts, num_parts, row_ids, row_positions, token_ids, host_tokens, self._lengths,
            token_rows, token_rows.stride(0), token_rows.shape[1], ids if seen is None else seen, vocab_size,
            HAS_SEEN=seen is not None, MAX_PARTS=triton.next_power_of_2(max_parts), num_warps=1,
        )  # fmt: skip
        if drafts is not None:
            self._verify(token_ids, row_ids, row_positions, drafts, seen, vocab_size)
        return token_ids

    def _verify(
        self,
        token_ids: Tensor,
        row_ids: Tensor,
        row_positions: Tensor,
        drafts: StepDrafts,
        seen: Tensor | None,
        vocab_size: int,
    ) -> None:
        """Reject the lines after a wrong draft, and record the other tokens in the rows."""
        num_requests, token_rows = len(drafts.num_lines), self._token_rows
        first_lines = np.cumsum(drafts.num_lines) - drafts.num_lines
        num_accepted = np.full(num_requests, -1) if drafts.num_accepted is None else drafts.num_accepted
        requests = self.upload(np.stack([first_lines, drafts.num_lines, num_accepted]).astype(np.int32))
        _verify_kernel[(num_requests,)](
            token_ids, row_ids, row_positions, requests, num_requests, self._lengths,
            token_rows, token_rows.stride(0), token_rows.shape[1], token_ids if seen is None else seen, vocab_size,
            HAS_SEEN=seen is not None, num_warps=1,
        )  # fmt: skip

    def upload(self, array: Int32Array) -> Tensor:
        """Copy to the device without waiting."""
        (on_device,) = self._upload(array)
        return on_device

    def download(self, tensor: Tensor) -> Tensor:
        """Copy to a host tensor, which holds the values once the device reaches this point."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._is_pinned)
        return host.copy_(tensor, non_blocking=True)

    def _upload(self, *arrays: Int32Array) -> list[Tensor]:
        """Send all arrays in one copy from page-locked memory, whose allocator keeps it until the copy is done."""
        sizes = [array.size for array in arrays]
        host = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=self._is_pinned)
        np.concatenate([array.ravel() for array in arrays], out=host.numpy())
        parts = host.to(self._device, non_blocking=True).split(sizes)
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


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
def noise_bits(key_low, key_high, ids):
    """A hash of key and id."""
    return _mix32(_mix32(ids.to(tl.uint32) + key_low) ^ key_high)


@triton.jit
def _uniform(bits):
    return (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32


@triton.jit
def _noise_bound(bits):
    """No less than the noise: -log(u), with a line below the logarithm between powers of two."""
    log2 = _uniform(bits).to(tl.int32, bitcast=True).to(tl.float32) * 1.1920928955078125e-07 - 127.0  # 2^-23
    return log2 * -_LN_2


@triton.jit
def gumbel_noise(bits):
    """-log(-log(1 - u)) with u in (0, 1) from the bits of a hash.

    Small u make large noise, which is what wins: there the inner logarithm is taken from its series, as 1 - u has lost
    the digits of u. Elsewhere 1 - u comes from the complement of the hash, which has all of its own.
    """
    u = _uniform(bits)
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


@triton.jit(do_not_specialize=["tiles_per_part"], do_not_specialize_on_alignment=["row_ids", "positions", "thresholds"])
def _pick_from_part_kernel(
    logits, line_stride, vocab_size, row_ids, positions, table,
    thresholds, part_scores, part_ids, part_stride, tiles_per_part,
    HAS_THRESHOLDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (line, part): the best score and its id in one part of the line; a score of NaN where a logit is NaN."""
    line = tl.program_id(0)
    part = tl.program_id(1)
    record = table + tl.load(row_ids + line).to(tl.int64) * _WORDS
    inverse_temperature = _float_field(record, _INVERSE_TEMPERATURE)
    position = tl.load(positions + line).to(tl.uint64)
    key_low, key_high = noise_key(_wide_field(record, _SEED), position)
    if HAS_THRESHOLDS:
        threshold = tl.load(thresholds + line)

    lanes = tl.arange(0, TILE)
    best = float("-inf")
    token = _NO_ID
    is_nan = tl.zeros([TILE], tl.int32)
    start = part * tiles_per_part * TILE
    end = tl.minimum(start + tiles_per_part * TILE, vocab_size)
    for first in range(start, end, TILE):
        ids = first + lanes
        scores = tl.load(logits + line.to(tl.int64) * line_stride + ids, mask=ids < end, other=float("-inf"))
        scores = scores.to(tl.float32)
        is_nan |= (scores != scores).to(tl.int32)
        if HAS_THRESHOLDS:
            scores = tl.where(scores >= threshold, scores, float("-inf"))
        if inverse_temperature > 0:
            scores *= inverse_temperature
            reached = best - 0.01 - 1e-5 * tl.abs(best)  # by bounds, which are rounded in other places
            if tl.max(scores, 0) + _MOST_NOISE > reached:
                bits = noise_bits(key_low, key_high, ids)
                if tl.max(scores + _noise_bound(bits), 0) > reached:
                    scores += gumbel_noise(bits)
                    highest = tl.max(scores, 0)
                    if highest > best:
                        best = highest
                        token = tl.min(tl.where(scores == highest, ids, _NO_ID), 0)
        else:
            highest = tl.max(scores, 0)
            if highest > best:
                best = highest
                token = tl.min(tl.where(scores == highest, ids, _NO_ID), 0)

    score = tl.where(tl.max(is_nan, 0) > 0, float("nan"), best)
    tl.store(part_scores + line * part_stride + part, score)
    tl.store(part_ids + line * part_stride + part, token)


@triton.jit(
    do_not_specialize=["num_parts"],
    do_not_specialize_on_alignment=["row_ids", "positions", "token_ids", "host_tokens"],
)
def _pick_from_parts_kernel(
    part_scores, part_ids, part_stride, num_parts, row_ids, positions, token_ids, host_tokens, lengths,
    token_rows, token_row_stride, max_model_len, seen, vocab_size, HAS_SEEN: tl.constexpr, MAX_PARTS: tl.constexpr,
):  # fmt: skip
    """Program (line): the best of the parts, or why there is none. With `host_tokens` all lines count: it is written
    there, too, and leaves its traces in the row."""
    line = tl.program_id(0)
    parts = tl.arange(0, MAX_PARTS)
    exists = parts < num_parts
    scores = tl.load(part_scores + line * part_stride + parts, mask=exists, other=float("-inf"))
    ids = tl.load(part_ids + line * part_stride + parts, mask=exists, other=_NO_ID)
    is_nan = tl.max((scores != scores).to(tl.int32), 0) > 0
    score = tl.max(tl.where(scores == scores, scores, float("-inf")), 0)
    token = tl.min(tl.where(scores == score, ids, _NO_ID), 0)
    token = tl.where(score == float("-inf"), _NOTHING_LEFT, token)
    token = tl.where(score == float("inf"), _LOGIT_IS_INFINITE, token)
    token = tl.where(is_nan, _LOGIT_IS_NAN, token)
    tl.store(token_ids + line, token)

    if host_tokens is not None:
        tl.store(host_tokens + line, token)
        row = tl.load(row_ids + line).to(tl.int64)
        position = tl.load(positions + line)
        chosen = tl.maximum(token, 0)  # a row without a token may run one more step, and must be able to
        tl.store(token_rows + row * token_row_stride + position, chosen, mask=position < max_model_len)
        tl.store(lengths + row, position + 1)
        if HAS_SEEN:
            entry = seen + row * vocab_size + chosen
            tl.store(entry, tl.load(entry) + _ONE_OUTPUT, mask=token >= 0)


@triton.jit(do_not_specialize=["num_requests"], do_not_specialize_on_alignment=["row_ids", "positions", "requests"])
def _verify_kernel(
    token_ids, row_ids, positions, requests, num_requests, lengths,
    token_rows, token_row_stride, max_model_len, seen, vocab_size, HAS_SEEN: tl.constexpr,
):  # fmt: skip
    """Program (request): its lines in order, as long as what was chosen is what was drafted, which is in the row.

    `requests` has the first line of each, the number of its lines, and how many drafts are to be accepted whatever they
    are; -1: as many as are right.
    """
    request = tl.program_id(0)
    first = tl.load(requests + request)
    num_lines = tl.load(requests + num_requests + request)
    num_accepted = tl.load(requests + 2 * num_requests + request)
    row = tl.load(row_ids + first).to(tl.int64)
    position = tl.load(positions + first)
    counts = position >= 0  # whether the line does
    length = position
    for offset in range(num_lines):
        place = token_rows + row * token_row_stride + position + offset
        inside = position + offset < max_model_len
        drafted = tl.load(place, mask=inside, other=-1)
        token = tl.load(token_ids + first + offset)
        is_forced = offset < num_accepted
        token = tl.where(is_forced, drafted, token)
        tl.store(token_ids + first + offset, tl.where(counts, token, _REJECTED))
        tl.store(place, tl.maximum(token, 0), mask=counts & inside)
        length += counts.to(tl.int32)
        if HAS_SEEN:
            tl.atomic_add(seen + row * vocab_size + tl.maximum(token, 0), _ONE_OUTPUT, mask=counts & (token >= 0))
        counts = counts & tl.where(num_accepted < 0, token == drafted, is_forced)
    tl.store(lengths + row, length)
