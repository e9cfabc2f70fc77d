"""Sampling on the CPU: the definition of `sampler.py` on float32 logits in host memory.

Rows that draw at random go through a native kernel, which computes lines in parallel. Without the native library numpy
does the same, up to the rounding of a logarithm. A step with only greedy rows uses numpy's argmax. Penalties touch only
tokens that a row has seen, so their memory grows with the request, not with the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.native.lib import NativeLibrary, mask_logits, sample_tokens
from headway.runner.logit_edits import ONE_OUTPUT, LineMasks, LogitEntries, StepEdits, seen_tokens
from headway.runner.sampler import (
    LOGIT_IS_INFINITE,
    LOGIT_IS_NAN,
    NOTHING_LEFT,
    PENALTIES,
    RANDOM,
    REJECTED,
    Int32Array,
    Int64Array,
    SamplingRows,
    Seat,
    StepDrafts,
)

Float32Array = NDArray[np.float32]
UInt32Array = NDArray[np.uint32]

# Noise lies between -log(33 log 2) and 33 log 2: the hash has 32 bits.
_LEAST_NOISE, _MOST_NOISE = -3.2, 22.9
_FAR = 6.0
# With more than _MANY near logits, the scores of the first _FIRST of them raise the bound for the others.
_MANY, _FIRST = 4096, 512


class CpuSampling:
    """`SamplingKernels` in host memory. `token_rows` int32 [max_num_seqs, max_model_len] has the tokens of all rows."""

    def __init__(self, rows: SamplingRows, token_rows: Int32Array, library: NativeLibrary | None) -> None:
        self._rows = rows
        self._token_rows = token_rows
        self._library = library
        self._seen: dict[int, _SeenTokens] = {}

    def seat(self, seats: Sequence[Seat]) -> None:
        """Count the tokens that each request has seen. The records are read in place from `SamplingRows`."""
        for seat in seats:
            self._seen.pop(seat.row, None)
            if seat.params.is_penalised:
                self._seen[seat.row] = _SeenTokens(*seen_tokens(seat.request))

    def prepare(self, logits: Tensor, num_lines: int) -> Tensor:
        """The lines of a step as float32 in host memory."""
        return logits[:num_lines].float().cpu()

    def edit(
        self, logits: Tensor, rows: Int64Array, positions: Int64Array, edits: StepEdits, *, keep_logits: bool
    ) -> Tensor:
        """Apply all edits, in place unless `keep_logits` is set."""
        edited = logits.clone() if keep_logits else logits
        if edits.masks is not None:
            self._mask(edited, edits.masks)
        if edits.entries is not None:
            self._edit(edited.numpy(), rows, positions, edits.entries)
        if edits.penalised:
            self._penalise(edited.numpy(), rows, positions, edits.line_offsets)
        return edited

    def pick(
        self, logits: Tensor, rows: Int64Array, positions: Int64Array, *, used: int, drafts: StepDrafts | None = None
    ) -> tuple[Tensor, Tensor]:
        """Filter, choose a token for each row, and record it in the row."""
        tokens = self._choose(logits, rows, positions, used)
        if drafts is not None:
            self._verify(tokens, rows, positions, drafts)
        fits = (positions < self._token_rows.shape[1]) & (tokens != REJECTED)
        self._token_rows[rows[fits], positions[fits]] = np.maximum(tokens[fits], 0)
        if used & PENALTIES:
            for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
                if token >= 0 and self._rows.flags[row] & PENALTIES:
                    self._seen[row].append(token)
        token_ids = torch.from_numpy(tokens)
        return token_ids, token_ids

    def guess(self, logits: Tensor, rows: Int64Array, positions: Int64Array, *, used: int) -> None:
        """Filter and choose, without recording the tokens as seen."""
        self._token_rows[rows, positions] = np.maximum(self._choose(logits, rows, positions, used), 0)

    def _choose(self, logits: Tensor, rows: Int64Array, positions: Int64Array, used: int) -> Int32Array:
        """A token or a negative code for each row."""
        if not used & RANDOM:
            return _greedy_tokens(logits.numpy())
        if self._library is not None:
            return sample_tokens(logits.contiguous(), rows, positions, self._rows.records, self._library)
        lines = zip(logits.numpy(), rows, positions, strict=True)
        tokens = [_sample_line(line, self._rows.records[row], int(position)) for line, row, position in lines]
        return np.array(tokens, dtype=np.int32)

    def upload(self, array: Int32Array) -> Tensor:
        """The same memory."""
        return torch.from_numpy(array)

    def download(self, tensor: Tensor) -> Tensor:
        """The same memory."""
        return tensor

    def _mask(self, logits: Tensor, masks: LineMasks) -> None:
        if self._library is not None and logits.is_contiguous():
            mask_logits(logits, masks.lines, masks.words, self._library)
            return
        for line, words in zip(masks.lines.tolist(), masks.words, strict=True):
            allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: logits.shape[1]].view(bool)
            logits.numpy()[line, ~allowed] = -np.inf

    def _edit(self, logits: Float32Array, rows: Int64Array, positions: Int64Array, entries: LogitEntries) -> None:
        lines, tokens, bits, starts, lengths = entries.columns
        values = bits.view(np.float32)
        firsts = positions[lines] - lengths  # not below 0: a prefix is not longer than the output
        applies = (lengths == 0) | (positions[lines] <= self._token_rows.shape[1])
        for step in range(int(lengths.max())):
            at = np.flatnonzero(applies & (step < lengths))
            present = self._token_rows[rows[lines[at]], firsts[at] + step]
            applies[at] = present == entries.prefixes[starts[at] + step]
        is_ban = values == -np.inf
        finite, bans = applies & ~is_ban, applies & is_ban
        logits[lines[finite], tokens[finite]] += values[finite]
        logits[lines[bans], tokens[bans]] = -np.inf

    def _verify(self, tokens: Int32Array, rows: Int64Array, positions: Int64Array, drafts: StepDrafts) -> None:
        """Reject the lines that follow a wrong draft."""
        start = 0
        for place, count in enumerate(drafts.num_lines.tolist()):
            drafted = self._token_rows[rows[start], positions[start] : positions[start] + count - 1]
            if drafts.num_accepted is None:
                wrong = np.flatnonzero(tokens[start : start + count - 1] != drafted)
                num_right = int(wrong[0]) if len(wrong) else count - 1
            else:
                num_right = int(drafts.num_accepted[place])
                tokens[start : start + num_right] = drafted[:num_right]
            tokens[start + num_right + 1 : start + count] = REJECTED
            start += count

    def _seen_at(self, row: int, position: int, offset: int) -> _SeenTokens:
        """The tokens a row has seen, including the drafted tokens before a position."""
        seen = self._seen[row]
        if offset:
            seen = seen.copy()
            for token in self._token_rows[row, position - offset : position].tolist():
                seen.append(token)
        return seen

    def _penalise(
        self, logits: Float32Array, rows: Int64Array, positions: Int64Array, line_offsets: Int64Array | None
    ) -> None:
        lines = np.flatnonzero(self._rows.flags[rows] & PENALTIES)
        if line_offsets is None:
            seen = [self._seen[row] for row in rows[lines].tolist()]
        else:
            columns = (rows[lines].tolist(), positions[lines].tolist(), line_offsets[lines].tolist())
            seen = [self._seen_at(*line) for line in zip(*columns, strict=True)]
        lengths = [len(state.ids) for state in seen]
        where = np.repeat(lines, lengths), np.concatenate([state.ids for state in seen])
        records = self._rows.records[np.repeat(rows[lines], lengths)]
        counts = (np.concatenate([state.entries for state in seen]) // ONE_OUTPUT).astype(np.float32)
        values, repetition = logits[where], records["repetition"]
        values = np.where(values > 0, values / repetition, values * repetition)
        values -= records["frequency"] * counts + np.where(counts > 0, records["presence"], np.float32(0))
        logits[where] = values


class _SeenTokens:
    """The distinct tokens of one request, each with its entry (see `IN_PROMPT`)."""

    def __init__(self, ids: Int32Array, entries: Int32Array) -> None:
        self._size = len(ids)
        self._ids = np.zeros(max(64, 2 * self._size), dtype=np.int32)
        self._entries = np.zeros_like(self._ids)
        self._ids[: self._size], self._entries[: self._size] = ids, entries
        self._place = {token: place for place, token in enumerate(ids.tolist())}

    def copy(self) -> _SeenTokens:
        return _SeenTokens(self.ids, self.entries)

    def append(self, token: int) -> None:
        """Count one more output token."""
        place = self._place.setdefault(token, self._size)
        if place == self._size:
            if self._size == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._entries = np.concatenate([self._entries, np.zeros_like(self._entries)])
            self._ids[place] = token
            self._size += 1
        self._entries[place] += ONE_OUTPUT

    @property
    def ids(self) -> Int32Array:
        return self._ids[: self._size]

    @property
    def entries(self) -> Int32Array:
        return self._entries[: self._size]


def _greedy_tokens(lines: Float32Array) -> Int32Array:
    """For each line, the lowest id with the largest logit, or an error code. argmax treats NaN as the largest value."""
    tokens = lines.argmax(axis=1)
    maxima = lines[np.arange(len(lines)), tokens]
    tokens = tokens.astype(np.int32)
    for line in np.flatnonzero(~np.isfinite(maxima)).tolist():
        tokens[line] = _code_of(float(maxima[line]))
    return tokens


def _code_of(maximum: float) -> int:
    """The error code for a line whose largest logit is not a finite number."""
    if maximum == -math.inf:
        return NOTHING_LEFT
    return LOGIT_IS_INFINITE if maximum == math.inf else LOGIT_IS_NAN


# ----------------------------------------------------------------------------------------------------- without native


def noise_key(seed: int, position: int) -> int:
    """A 64-bit hash of (seed, position)."""
    key = _mix64((seed + 0x9E3779B97F4A7C15) % 2**64)
    return _mix64((key + position * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) % 2**64)


def noise_bits(key: int, ids: Int64Array) -> UInt32Array:
    """A 32-bit hash of key and id."""
    words = ids.astype(np.uint32)
    words += np.uint32(key & 0xFFFFFFFF)
    _mix32(words)
    words ^= np.uint32(key >> 32)
    _mix32(words)
    return words


def gumbel_noise(bits: UInt32Array) -> Float32Array:
    """-log(-log(1 - u)), with u = bits / 2^32, in the float32 arithmetic of the other kernels."""
    unit, half = np.float32(2.0**-32), np.float32(0.5)
    u = (bits.astype(np.float32) + half) * unit
    rest = ((~bits).astype(np.float32) + half) * unit
    exponential = np.where(u < np.float32(2.0**-8), u * (1 + half * u), -np.log(rest))
    return -np.log(exponential)


def _mix64(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)


def _mix32(words: UInt32Array) -> None:
    """In place."""
    words ^= words >> np.uint32(16)
    words *= np.uint32(0x7FEB352D)
    words ^= words >> np.uint32(15)
    words *= np.uint32(0x846CA68B)
    words ^= words >> np.uint32(16)


def _sample_line(line: Float32Array, record: np.void, position: int) -> int:
    """A token, or a code, for one row."""
    highest = line.max()
    if not np.isfinite(highest):
        return _code_of(float(highest))
    inverse_temperature = record["inverse_temperature"]
    if inverse_temperature == 0.0:
        return int(line.argmax())
    scaled, most = line * inverse_temperature, float(highest * inverse_temperature)
    if most == math.inf:
        return LOGIT_IS_INFINITE
    reached = most + _LEAST_NOISE  # the highest logit scores no less
    can_win = scaled >= reached - _MOST_NOISE
    threshold = _threshold(line, highest, record)
    if threshold > -math.inf:
        can_win &= line >= threshold
    if 2 * np.count_nonzero(can_win) > len(line):
        ids = np.arange(len(line))
    else:
        ids = np.flatnonzero(can_win)
        scaled, can_win = scaled[ids], can_win[ids]
    bits = noise_bits(noise_key(int(record["seed"]), position), ids)
    # Noise is less than -log(u), so a logit far below the bound can win only with a small u.
    is_near = scaled >= reached - _FAR
    if np.count_nonzero(is_near) > _MANY:
        first = np.flatnonzero(can_win[:_FIRST])
        scores = scaled[first] + gumbel_noise(bits[first])
        reached = max(reached, float(scores.max(initial=-math.inf)) - 0.01 - 1e-6 * abs(most))  # less for rounding
        is_near = scaled >= reached - _FAR
    may_win = can_win & (is_near | (bits <= _bits_below(-_FAR)))
    if reached > most:
        may_win &= bits <= _bits_below(most - reached)
    places = np.flatnonzero(may_win)
    return int(ids[places[(scaled[places] + gumbel_noise(bits[places])).argmax()]])


def _bits_below(log_u: float) -> np.uint32:
    """The largest hash bits that a u below exp(log_u) can have."""
    return np.uint32(min(math.ceil(math.exp(log_u) * 2**32), 2**32 - 1))


def _threshold(line: Float32Array, highest: np.float32, record: np.void) -> np.float32:
    """The lowest logit that min_p, top_k and top_p keep."""
    cut = highest + record["min_p_offset"]
    top_k, top_p = int(record["top_k"]), float(record["top_p"])
    if top_k:
        cut = max(cut, np.partition(line, len(line) - top_k)[len(line) - top_k])
    if top_p < 1.0:
        kept = line[line >= cut]
        weights = np.exp((kept - highest) * record["inverse_temperature"])
        total = float(weights.sum(dtype=np.float64))
        # Weights of at most (1 - top_p) of the mean sum to at most (1 - top_p) of the total, so those above reach
        # top_p: only they need sorting.
        possible = np.sort(kept[weights > (1.0 - top_p) * total / len(kept) * 0.999])[::-1]
        reached = np.cumsum(np.exp((possible - highest) * record["inverse_temperature"]), dtype=np.float64)
        cut = possible[min(int(reached.searchsorted(top_p * total)), len(possible) - 1)]
    return cut
