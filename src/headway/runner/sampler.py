"""Chooses one token per row from a step's logits: the host's side, the same for every device.

The definition, which `cpu_sampling.py` and `triton_sampling.py` implement:

    logprobs     from the model's untouched logits
    masks        rule out the tokens that a guided request's grammar does not allow
    edits        bias, bad words and `min_tokens`: a number is added to single logits; -inf rules the token out
    penalties    repetition scales the logits of tokens in prompt or output away from "likely"; frequency and presence
                 subtract for tokens in the output
    filters      min_p, then top_k, then top_p: the lowest logit that is kept; equal ones are kept together
    pick         argmax of logit / temperature + g over the kept ids, equal scores to the lowest id; greedy without g

g is Gumbel noise: u is a 32-bit hash of (seed, position of the new token, token id), g = -log(-log(1 - u)). That is a
draw from the softmax without state, sums or order, so a request's tokens depend on its seed and its own logits alone:
not on its row, the batch, preemption, overlap or the device.

A row that verifies drafts has one line for each draft and one more. Every line is sampled as if the drafts before it
were the row's tokens, with the noise of its own position. Where the chosen token differs from the draft, the lines
after it are rejected. So the output does not depend on the drafts.

A parameter that bans or biases single tokens becomes edits in `logit_edits.py`. A number that the kernels read is a
field of `RowRecord`, filled in by `_record`. A part of sampling that costs time gets a `Feature`, so that steps which
do not use it do not pay for it.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.scheduler_output import NewRequest, TokenLogprobs
from headway.errors import InvalidRequestError
from headway.runner.logit_edits import EditTable, LineMasks, StepEdits
from headway.runner.token_logprobs import LINES_AT_A_TIME, PendingLogprobs, logprob_words
from headway.sampling_params import SamplingParams

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

RowRecord = np.dtype(
    [
        ("seed", "<u8"),
        ("top_p", "<f8"),
        ("inverse_temperature", "<f4"),  # 0: greedy
        ("top_k", "<i4"),  # 0: all
        ("min_p_offset", "<f4"),  # temperature × log(min_p), from the largest logit down to the lowest kept; -inf: all
        ("repetition", "<f4"),
        ("frequency", "<f4"),
        ("presence", "<f4"),
    ]
)
"""A row's sampling parameters, as the kernels read them. The native kernel declares the same fields as a struct."""


def record_word(name: str) -> int:
    """Where a field of the record starts, in 32-bit words."""
    assert RowRecord.fields is not None
    return RowRecord.fields[name][1] // 4


# Codes returned in place of a token that could not be chosen; the native kernel uses the same numbers.
NOTHING_LEFT, LOGIT_IS_NAN, LOGIT_IS_INFINITE = -1, -2, -3
REJECTED = -4
"""The code of a line that follows a wrong draft."""
_ERRORS = {
    NOTHING_LEFT: "no token is left to choose from: bans and masks rule out the whole vocabulary",
    LOGIT_IS_NAN: "the model gave a logit of nan",
    LOGIT_IS_INFINITE: "the model gave a logit of inf",
}
NO_TOKEN = -1


class Feature(enum.IntFlag):
    """Parts of sampling that a row may use. A greedy row without other parameters uses none."""

    RANDOM = enum.auto()
    FILTERS = enum.auto()
    EDITS = enum.auto()
    PENALTIES = enum.auto()
    LOGPROBS = enum.auto()


# As plain numbers: an IntFlag costs microseconds wherever a step combines it.
RANDOM, FILTERS, EDITS = int(Feature.RANDOM), int(Feature.FILTERS), int(Feature.EDITS)
PENALTIES, LOGPROBS = int(Feature.PENALTIES), int(Feature.LOGPROBS)


@dataclass(frozen=True, slots=True)
class Seat:
    """A request that enters: new, or coming back after preemption with the tokens it already has."""

    row: int
    request: NewRequest
    params: SamplingParams
    default_seed: int
    """Used by a request without a seed of its own."""


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """The drafts that a step verifies."""

    num_lines: Int64Array
    """How many lines each sampling request has: one, plus one for each of its drafted tokens."""
    rows: Int64Array
    positions: Int64Array
    token_ids: Int64Array
    """All drafted tokens; the fields before give the rows and positions where they go."""
    num_accepted: Int64Array | None = None
    """Synthetic acceptance, for benchmarks: how many of each request's drafts to accept, whatever would be chosen."""

    @property
    def places(self) -> Int64Array:
        """The index of each drafted token among its request's drafts."""
        num_drafts = self.num_lines - 1
        return np.arange(len(self.rows)) - np.repeat(np.cumsum(num_drafts) - num_drafts, num_drafts)

    @property
    def line_offsets(self) -> Int64Array:
        """For each line, how many drafted tokens precede the token that it chooses."""
        starts = np.cumsum(self.num_lines) - self.num_lines
        return np.arange(int(self.num_lines.sum())) - np.repeat(starts, self.num_lines)


class SamplingRows:
    """The host's sampling state of each row: its parameters, the features it uses, and how many tokens it has."""

    def __init__(self, max_num_seqs: int, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> None:
        if any(not 0 <= token_id < vocab_size for token_id in eos_token_ids):
            raise ValueError(f"end tokens {tuple(eos_token_ids)} for a vocabulary of {vocab_size}")
        self.max_num_seqs = max_num_seqs
        self.vocab_size = vocab_size
        self.records = np.zeros(max_num_seqs, dtype=RowRecord)
        self.flags: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_output_tokens: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_logprobs: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        self._logprob_token_ids: dict[int, tuple[int, ...]] = {}
        self._edited_until: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        self._edits = EditTable(eos_token_ids)

    def seat(self, seat: Seat) -> None:
        """Record a request's parameters. Raises, before recording anything, if they are not valid for the model."""
        row, params, num_output_tokens = seat.row, seat.params, len(seat.request.output_token_ids)
        if params.bad_words and params.bad_word_token_ids is None:
            raise InvalidRequestError("bad_words need a tokenizer to become tokens, and there is none", "bad_words")
        params.validate_for_vocabulary(self.vocab_size)
        record, flags = _record(seat, self.vocab_size)
        edits = self._edits.of(params)
        if edits is not None and num_output_tokens < edits.until:
            flags |= EDITS
            self._edits.seat(row, edits)
            self._edited_until[row] = edits.until
        self.records[row] = record
        self.flags[row] = flags
        self._num_output_tokens[row] = num_output_tokens
        self._num_logprobs[row] = 0 if params.logprob_token_ids is not None else params.logprobs or 0
        self._logprob_token_ids.pop(row, None)
        if params.logprob_token_ids is not None:
            self._logprob_token_ids[row] = tuple(params.logprob_token_ids)

    def clear(self, row: int) -> None:
        """Forget a request. Steps in flight for its row stay valid."""
        self.flags[row] = 0
        self._logprob_token_ids.pop(row, None)
        self._edits.clear(row)

    def used_by(self, rows: Int64Array) -> int:
        """All features that any of these rows uses."""
        return int(np.bitwise_or.reduce(self.flags[rows]))

    def edits(
        self, rows: Int64Array, used: int, masks: LineMasks | None, line_offsets: Int64Array | None = None
    ) -> StepEdits:
        """The edits of a step whose i-th line belongs to `rows[i]` and follows `line_offsets[i]` drafted tokens."""
        entries = None
        if used & EDITS:
            lines = np.flatnonzero(self.flags[rows] & EDITS)
            num_output_tokens = self._num_output_tokens[rows[lines]]
            if line_offsets is not None:
                num_output_tokens = num_output_tokens + line_offsets[lines]
            entries = self._edits.entries(rows, lines.tolist(), num_output_tokens.tolist())
        return StepEdits(entries, penalised=bool(used & PENALTIES), masks=masks, line_offsets=line_offsets)

    def wanted_logprobs(self, rows: Int64Array) -> tuple[Int64Array, list[int]]:
        """The lines that ask for logprobs, and for each how many most likely tokens to report."""
        lines = np.flatnonzero(self.flags[rows] & LOGPROBS)
        return lines, self._num_logprobs[rows[lines]].tolist()

    def named_tokens(self, rows: Int64Array) -> list[tuple[int, ...]] | None:
        """For each row, the tokens whose logprobs it asks for by id. None if no row does."""
        if not self._logprob_token_ids:
            return None
        named = [self._logprob_token_ids.get(row, ()) for row in rows.tolist()]
        return named if any(named) else None

    def count_tokens(self, rows: Int64Array, used: int, *, repeated: bool = False) -> None:
        """Count one more output token for each of these rows. With `repeated`, a row may appear several times and each
        appearance counts."""
        if repeated:
            np.add.at(self._num_output_tokens, rows, 1)
        else:
            self._num_output_tokens[rows] += 1
        if used & EDITS:
            self.flags[rows[self._num_output_tokens[rows] >= self._edited_until[rows]]] &= ~EDITS


def _record(seat: Seat, vocab_size: int) -> tuple[tuple[float, ...], int]:
    """The values of a row's `RowRecord`, and the features it uses except edits. A greedy request uses no filters."""
    params = seat.params
    flags = PENALTIES if params.is_penalised else 0
    if params.logprobs is not None:
        flags |= LOGPROBS
    inverse_temperature, top_k, top_p, min_p_offset = 0.0, 0, 1.0, -math.inf
    if not params.greedy:
        inverse_temperature, top_p = 1.0 / params.temperature, params.top_p
        top_k = params.top_k if 0 < params.top_k < vocab_size else 0
        min_p_offset = params.temperature * math.log(params.min_p) if params.min_p > 0.0 else -math.inf
        flags |= RANDOM | (FILTERS if top_k or top_p < 1.0 or params.min_p > 0.0 else 0)
    seed = (seat.default_seed if params.seed is None else params.seed) % 2**64
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    return (seed, top_p, inverse_temperature, top_k, min_p_offset, *penalties), flags


class SamplingKernels(Protocol):
    """One implementation of the definition, on the device where the rows' tokens and seen tokens lie."""

    def seat(self, seats: Sequence[Seat]) -> None:
        """Take over the rows' records from `SamplingRows`, and the tokens that the requests have seen."""
        ...

    def prepare(self, logits: Tensor, num_lines: int) -> Tensor:
        """At least the first `num_lines` lines of the logits, in the memory and dtype that the kernels read."""
        ...

    def edit(
        self, logits: Tensor, rows: Int64Array, positions: Int64Array, edits: StepEdits, *, keep_logits: bool
    ) -> Tensor:
        """Float32 logits with all edits. With `keep_logits`, `logits` stay as they are."""
        ...

    def pick(
        self, logits: Tensor, rows: Int64Array, positions: Int64Array, *, used: int, drafts: StepDrafts | None = None
    ) -> tuple[Tensor, Tensor]:
        """Filter, then choose a token or a negative code for each row, from the first R lines. Returns int32 [R] on the
        device and a copy on the host, which is valid once the device reaches this point, and for a few more steps.

        The token is written to its position in the row's tokens, unless that is past their end, and counted as seen. A
        row without a token gets token 0: it may already be part of the next step, and must be able to run it. With
        drafts, which are in the rows, lines after a wrong draft are `REJECTED` and change nothing.
        """
        ...

    def guess(self, logits: Tensor, rows: Int64Array, positions: Int64Array, *, used: int) -> None:
        """Make the choice that `pick` makes, but write it only to its position in the row's tokens."""
        ...

    def upload(self, array: Int32Array) -> Tensor:
        """Copy to the logits' device without waiting."""
        ...

    def download(self, tensor: Tensor) -> Tensor:
        """Copy to a host tensor, which holds the values once the device reaches this point."""
        ...


class Sampler:
    """Chooses tokens for any rows of a batch. On a GPU it launches the kernels that the rows need, without waiting."""

    def __init__(self, rows: SamplingRows, kernels: SamplingKernels) -> None:
        self._rows = rows
        self._kernels = kernels

    def seat(self, seats: Sequence[Seat]) -> None:
        """Admit requests that `SamplingRows` has recorded."""
        self._kernels.seat(seats)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernel that verifies drafts, so that the first step with drafts does not wait for it."""
        logits = self._kernels.upload(np.zeros((2, self._rows.vocab_size), dtype=np.int32)).to(dtype)
        first, rows = np.zeros(1, dtype=np.int64), np.zeros(2, dtype=np.int64)
        drafts = StepDrafts(num_lines=first + 2, rows=first, positions=first, token_ids=first)
        self._kernels.pick(logits, rows, np.arange(2), used=0, drafts=drafts)

    def sample(
        self,
        logits: Tensor,
        rows: Int64Array,
        positions: Int64Array,
        masks: LineMasks | None = None,
        drafts: StepDrafts | None = None,
    ) -> PendingSample:
        """Choose a token for each of `rows`; `logits` are consumed.

        `logits` [at least R, V] has a line per row, in any float type; further lines are ignored. `positions` is where
        the new token goes in the row's tokens, which is also how many tokens the row has now.
        """
        num_lines = len(rows)
        if logits.shape[1] != self._rows.vocab_size or len(logits) < num_lines:
            raise ValueError(f"logits of shape {tuple(logits.shape)} for {num_lines} rows of {self._rows.vocab_size}")
        if len(positions) != num_lines:
            raise ValueError(f"{num_lines} rows, but {len(positions)} positions")
        if not num_lines:
            return PendingSample(torch.empty(0, dtype=torch.int32), None)
        used = self._rows.used_by(rows)
        edited = logits = self._kernels.prepare(logits, num_lines)
        if masks is not None or used & (EDITS | PENALTIES):
            edits = self._rows.edits(rows, used, masks, None if drafts is None else drafts.line_offsets)
            edited = self._kernels.edit(logits[:num_lines], rows, positions, edits, keep_logits=bool(used & LOGPROBS))
        token_ids, host_token_ids = self._kernels.pick(edited, rows, positions, used=used, drafts=drafts)
        logprobs = self._logprobs(logits, rows, token_ids) if used & LOGPROBS else None
        if drafts is None:
            self._rows.count_tokens(rows, used)
            return PendingSample(host_token_ids, logprobs)
        alone = np.repeat(drafts.num_lines, drafts.num_lines) == 1
        self._rows.count_tokens(rows[alone], used)
        count = functools.partial(self._count_accepted, rows, used, ~alone)
        return PendingSample(host_token_ids, logprobs, drafts.num_lines.tolist(), count)

    def guess(self, logits: Tensor, rows: Int64Array, positions: Int64Array, num_before: int) -> None:
        """Write the token that `sample` would choose, after `num_before` drafts that are already in the rows."""
        used = self._rows.used_by(rows) & ~LOGPROBS
        edited = self._kernels.prepare(logits, len(rows))
        if used & (EDITS | PENALTIES):
            edits = self._rows.edits(rows, used, None, np.full(len(rows), num_before))
            edited = self._kernels.edit(edited[: len(rows)], rows, positions, edits, keep_logits=False)
        self._kernels.guess(edited, rows, positions, used=used)

    def _count_accepted(self, rows: Int64Array, used: int, verified: NDArray[np.bool_], token_ids: Tensor) -> None:
        """Count accepted tokens for rows whose edits depend on it. No step with such a row is launched before."""
        self._rows.count_tokens(rows[verified & (token_ids.numpy() >= 0)], used, repeated=True)

    def _logprobs(self, logits: Tensor, rows: Int64Array, token_ids: Tensor) -> PendingLogprobs:
        lines, num_top = self._rows.wanted_logprobs(rows)
        most = max(num_top)
        on_device = self._kernels.upload(lines.astype(np.int32)).long()
        named = self._rows.named_tokens(rows[lines])
        named_parts: Sequence[Tensor | None] = [None] * -(-len(lines) // LINES_AT_A_TIME)
        if named is not None:
            named_parts = self._kernels.upload(_padded(named)).split(LINES_AT_A_TIME)
        parts = [
            self._kernels.download(logprob_words(logits[part], token_ids[part], most, named_part))
            for part, named_part in zip(on_device.split(LINES_AT_A_TIME), named_parts, strict=True)
        ]
        return PendingLogprobs(lines.tolist(), num_top, parts, named)


def _padded(lines: list[tuple[int, ...]]) -> Int32Array:
    """The lines, padded with token 0 to the length of the longest."""
    padded: Int32Array = np.zeros((len(lines), max(map(len, lines))), dtype=np.int32)
    for place, line in enumerate(lines):
        padded[place, : len(line)] = line
    return padded


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One entry per sampled row, in the order given."""

    token_ids: list[int]
    """The chosen token; `NO_TOKEN` where the row failed."""
    logprobs: list[TokenLogprobs | None]
    """One entry per row; `None` for rows that did not ask for logprobs."""
    errors: dict[int, str] = field(default_factory=dict)
    """For the rows that failed: their index → why no token could be chosen."""


@dataclass(frozen=True, slots=True)
class PendingSample:
    """A step's tokens on their way to the host."""

    host_token_ids: Tensor
    logprobs: PendingLogprobs | None
    num_lines: list[int] | None = None
    """How many lines each row has, if rows verify drafts."""
    count: Callable[[Tensor], None] | None = None
    """Called with the tokens once they are known, if they decide how many tokens rows get."""

    def result(self) -> SamplerOutput:
        """The chosen tokens. Valid once the device has finished everything launched up to the end of `sample`."""
        if self.count is not None:
            self.count(self.host_token_ids)
        token_ids: list[int] = self.host_token_ids.tolist()
        errors = {place: _ERRORS[token] for place, token in enumerate(token_ids) if token < 0 and token != REJECTED}
        for place in errors:
            token_ids[place] = NO_TOKEN
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
        if self.logprobs is not None:
            for line, record in self.logprobs.result(token_ids):
                logprobs[line] = None if line in errors else record
        return SamplerOutput(token_ids, logprobs, errors)
