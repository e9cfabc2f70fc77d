"""Chooses one token per row on the device, without the host ever waiting.

The next step is launched before this one's tokens are known, so nothing here may depend on a token's value on the host.
Requests sit in rows of permanent device arrays: their parameters, their tokens, what they have seen. They are written
when a request enters (one upload) and by the kernels as tokens are chosen. The host keeps what it can know by itself:
who sits where, which parts of sampling a row uses, and how many tokens it has. A step launches only the kernels that
its rows need; for greedy and plainly random rows those are the two of `pick_tokens`. The tokens travel to the host in a
copy that is read a step later, through `PendingSample`.

The meaning of parameters, the order of edits and the errors are those of the other sampler, runner/sampler.py. The draw
is another one (sampling_kernels.py), so the same seed gives other tokens there and here, and always the same ones here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headway.core import TokenLogprobs
from headway.runner.sampler import NO_TOKEN, SamplerOutput
from headway.runner.sampling_batch import (
    Feature,
    IntArray,
    check_end_tokens,
    check_params,
    end_token_ids,
    features_of,
)
from headway.runner.sampling_kernels import (
    IN_PROMPT,
    LOGIT_IS_INFINITE,
    LOGIT_IS_NAN,
    NOTHING_LEFT,
    ONE_OUTPUT,
    RECORD_WORDS,
    PickScratch,
    RowRecord,
    edit_logits,
    find_thresholds,
    penalise,
    pick_tokens,
)
from headway.sampling_params import SamplingParams

Words = npt.NDArray[np.int32]

# Lines whose log-softmax is held at one time: 64 lines of a 150k vocabulary are some 150 MB with what sorts them.
LOGPROB_LINES_AT_A_TIME = 64

_ENTRY_EDITS = int(Feature.LOGIT_BIAS | Feature.BAD_WORDS | Feature.MIN_TOKENS)
_PENALTIES, _MIN_TOKENS, _LOGPROBS = int(Feature.PENALTIES), int(Feature.MIN_TOKENS), int(Feature.LOGPROBS)
_EDITS = _ENTRY_EDITS | _PENALTIES
_FILTERS = int(Feature.TOP_K | Feature.TOP_P | Feature.MIN_P)

_ERRORS = {
    NOTHING_LEFT: "no token is left to choose from: bans rule out the whole vocabulary",
    LOGIT_IS_NAN: "the model gave a logit of nan",
    LOGIT_IS_INFINITE: "the model gave a logit of inf",
}


@dataclass(frozen=True, slots=True)
class Seat:
    """A request that enters: new, or coming back after preemption with the tokens it already has."""

    row: int
    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    default_seed: int
    """Used by a request without a seed of its own."""


class PendingSample:
    """A step's tokens on their way to the host."""

    def __init__(self, token_ids: Tensor, host_token_ids: Tensor, logprobs: _PendingLogprobs | None) -> None:
        self.token_ids = token_ids
        """On the device, int32, one per line; negative where no token could be chosen."""
        self._host_token_ids = host_token_ids
        self._logprobs = logprobs

    def result(self) -> SamplerOutput:
        """What was chosen. Valid once the device has done all that was launched up to the end of `sample`."""
        token_ids: list[int] = self._host_token_ids.tolist()
        errors = {place: _ERRORS[token] for place, token in enumerate(token_ids) if token < 0}
        for place in errors:
            token_ids[place] = NO_TOKEN
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
        if self._logprobs is not None:
            self._logprobs.write_to(logprobs, token_ids)
        return SamplerOutput(token_ids, logprobs, errors)


class GpuSampler:
    """Rows of requests, and the choice of a token for any of them.

    `token_rows` int32 [max_num_seqs, max_model_len] holds every row's tokens, prompt and output. The runner owns it;
    each chosen token is written to its position there, so that the next step can read it. A row for which no token
    could be chosen gets token 0: it may already be part of the next step, whose result for it is to be ignored.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        eos_token_ids: Sequence[int],
        token_rows: Tensor,
    ) -> None:
        self._vocab_size = vocab_size
        self._transfers = _Transfers(device)
        self._eos_token_ids = check_end_tokens(eos_token_ids, vocab_size)
        self._token_rows = token_rows
        self._table = torch.zeros((max_num_seqs, RECORD_WORDS), dtype=torch.int32, device=device)
        self._scratch = PickScratch.zeros(max_num_seqs, vocab_size, device)
        self._seen: Tensor | None = None
        self._taken = np.zeros(max_num_seqs, dtype=np.bool_)
        self._flags = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_output_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._min_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_logprobs = np.zeros(max_num_seqs, dtype=np.int64)
        self._edits: dict[int, _LogitEdits] = {}
        self._last_edits: _LogitEdits | None = None

    # ------------------------------------------------------------------------------------------------ who sits where

    @torch.inference_mode()
    def add(self, seats: Sequence[Seat]) -> None:
        """Put requests into free rows. If anything is wrong with one of them, all rows stay free."""
        if not seats:
            return
        for seat in seats:
            if self._taken[seat.row]:
                raise ValueError(f"row {seat.row} is taken")
            check_params(seat.params, self._vocab_size)
        try:
            self._write(seats)
        except Exception:
            for seat in seats:
                self._clear(seat.row)
            raise

    def _write(self, seats: Sequence[Seat]) -> None:
        records = np.concatenate([self._enter(seat) for seat in seats])
        row_ids, words, seen = self._transfers.upload(
            np.asarray([seat.row for seat in seats], dtype=np.int32),
            records.view(np.int32).reshape(len(seats), RECORD_WORDS),
            np.concatenate([_seen_entries(seat) for seat in seats], axis=1),
        )
        self._table.index_copy_(0, row_ids.long(), words)
        if any(seat.params.is_penalised for seat in seats):
            self._write_seen(row_ids.long(), seen)

    def remove(self, row: int) -> None:
        """Free the row. What is in flight for it stays valid."""
        if not self._taken[row]:
            raise ValueError(f"row {row} holds no request")
        self._clear(row)

    def _clear(self, row: int) -> None:
        self._taken[row] = False
        self._flags[row] = 0
        self._edits.pop(row, None)

    def _enter(self, seat: Seat) -> npt.NDArray[np.void]:
        """Note what the host needs to know of the request, and make its record for the device."""
        row, params = seat.row, seat.params
        features = features_of(params, self._vocab_size)
        blocked = end_token_ids(params, self._eos_token_ids)
        if len(blocked) and len(seat.output_token_ids) < params.min_tokens:
            features |= Feature.MIN_TOKENS
        self._taken[row] = True
        self._flags[row] = int(features)
        self._num_output_tokens[row] = len(seat.output_token_ids)
        self._min_tokens[row] = params.min_tokens
        self._num_logprobs[row] = params.logprobs or 0
        if features & _ENTRY_EDITS:
            self._edits[row] = self._edits_of(params, blocked)
        return _record(seat, features)

    def _edits_of(self, params: SamplingParams, blocked: IntArray) -> _LogitEdits:
        """All completions of a request enter one after the other, and share theirs."""
        last = self._last_edits
        if last is None or not last.is_for(params):
            last = self._last_edits = _LogitEdits(params, blocked)
        return last

    def _write_seen(self, row_ids: Tensor, entries: Tensor) -> None:
        """`entries` int32 [3, E]: row, token, what to write there."""
        if self._seen is None:
            shape = (len(self._flags), self._vocab_size)
            self._seen = torch.zeros(shape, dtype=torch.int32, device=row_ids.device)
        self._seen.index_fill_(0, row_ids, 0)
        self._seen.index_put_((entries[0].long(), entries[1].long()), entries[2])

    # ---------------------------------------------------------------------------------------------------- the choice

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: IntArray, row_ids: Tensor, positions: Tensor) -> PendingSample:
        """Choose a token for each of `rows`; `row_ids` are the same on the device.

        `logits` [at least R, V] has a line per row, in any float type; further lines are ignored, and nothing is
        written to it. `positions` int32 [R] on the device: where the new token goes in the row's tokens, which is also
        how many it has now. A position past the end of `token_rows` is not written.
        """
        num_lines = len(rows)
        if logits.shape[1] != self._vocab_size or len(logits) < num_lines:
            raise ValueError(f"logits of shape {tuple(logits.shape)} for {num_lines} rows of {self._vocab_size}")
        if len(row_ids) != num_lines or len(positions) != num_lines:
            raise ValueError(f"{num_lines} rows, but {len(row_ids)} row ids and {len(positions)} positions")
        if not num_lines:
            return PendingSample(row_ids, torch.empty(0, dtype=torch.int32), None)
        used = int(np.bitwise_or.reduce(self._flags[rows]))
        edited = self._edited(logits[:num_lines], rows, row_ids, positions, used) if used & _EDITS else logits
        token_ids = pick_tokens(
            edited,
            row_ids=row_ids,
            positions=positions,
            table=self._table,
            thresholds=find_thresholds(edited, row_ids=row_ids, table=self._table) if used & _FILTERS else None,
            token_rows=self._token_rows,
            seen=self._seen if used & _PENALTIES else None,
            scratch=self._scratch,
        )
        host_token_ids = self._transfers.download(token_ids)
        logprobs = self._logprobs(logits, rows, token_ids) if used & _LOGPROBS else None
        self._count_tokens(rows, used)
        return PendingSample(token_ids, host_token_ids, logprobs)

    def _count_tokens(self, rows: IntArray, used: int) -> None:
        self._num_output_tokens[rows] += 1
        if used & _MIN_TOKENS:
            reached = rows[self._num_output_tokens[rows] >= self._min_tokens[rows]]
            self._flags[reached] &= ~_MIN_TOKENS

    def _edited(self, logits: Tensor, rows: IntArray, row_ids: Tensor, positions: Tensor, used: int) -> Tensor:
        """A float32 copy of the logits with bans, biases and then penalties."""
        edited = logits.to(torch.float32, copy=True)
        if used & _ENTRY_EDITS:
            lines = np.flatnonzero(self._flags[rows] & _ENTRY_EDITS).tolist()
            entries, prefixes = _entries_in_force(
                [(line, self._edits[rows[line]], int(self._num_output_tokens[rows[line]])) for line in lines]
            )
            if entries.shape[1]:
                on_device, prefixes_on_device = self._transfers.upload(entries, prefixes)
                edit_logits(
                    edited,
                    row_ids=row_ids,
                    positions=positions,
                    token_rows=self._token_rows,
                    entries=on_device,
                    prefixes=prefixes_on_device,
                    longest_prefix=int(entries[-1].max()),
                )
        if used & _PENALTIES:
            assert self._seen is not None
            penalise(edited, row_ids=row_ids, table=self._table, seen=self._seen)
        return edited

    def _logprobs(self, logits: Tensor, rows: IntArray, token_ids: Tensor) -> _PendingLogprobs:
        lines = np.flatnonzero(self._flags[rows] & _LOGPROBS)
        num_top = self._num_logprobs[rows[lines]].tolist()
        (on_device,) = self._transfers.upload(lines.astype(np.int32))
        parts = [
            self._transfers.download(_logprob_words(logits[part], token_ids[part], max(num_top)))
            for part in on_device.long().split(LOGPROB_LINES_AT_A_TIME)
        ]
        return _PendingLogprobs(lines.tolist(), num_top, parts)


class _Transfers:
    """Copies between host and device that nobody waits for: page-locked memory on the host's side.

    The allocator of such memory gives it to nobody else until the copies that use it are done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"

    def upload(self, *arrays: Words) -> list[Tensor]:
        """All arrays in one copy."""
        sizes = [array.size for array in arrays]
        host = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=self._pinned)
        np.concatenate([array.ravel() for array in arrays], out=host.numpy())
        parts = host.to(self._device, non_blocking=True).split(sizes)
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]

    def download(self, tensor: Tensor) -> Tensor:
        """A host tensor that has the values once the device has come this far."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pinned)
        return host.copy_(tensor, non_blocking=True)


def _record(seat: Seat, features: Feature) -> npt.NDArray[np.void]:
    """The request's parameters as the kernels read them; what a greedy request does not use is left out."""
    params = seat.params
    record = np.zeros(1, dtype=RowRecord)
    record["seed"] = (seat.default_seed if params.seed is None else params.seed) % 2**64
    record["inverse_temperature"] = 1.0 / params.temperature if features & Feature.RANDOM else 0.0
    record["top_k"] = params.top_k if features & Feature.TOP_K else 0
    record["top_p"] = params.top_p if features & Feature.TOP_P else 1.0
    record["min_p_offset"] = params.temperature * math.log(params.min_p) if features & Feature.MIN_P else -math.inf
    record["repetition"] = params.repetition_penalty
    record["frequency"] = params.frequency_penalty
    record["presence"] = params.presence_penalty
    return record


def _seen_entries(seat: Seat) -> Words:
    """Row, token and entry of each distinct token that a penalised request has; int32 [3, E]."""
    if not seat.params.is_penalised:
        return np.zeros((3, 0), dtype=np.int32)
    prompt = np.unique(np.asarray(seat.prompt_token_ids, dtype=np.int32))
    output, counts = np.unique(np.asarray(seat.output_token_ids, dtype=np.int32), return_counts=True)
    tokens = np.union1d(prompt, output)
    entries = np.zeros((3, len(tokens)), dtype=np.int32)
    entries[0] = seat.row
    entries[1] = tokens
    entries[2, np.searchsorted(tokens, prompt)] += IN_PROMPT
    entries[2, np.searchsorted(tokens, output)] += (ONE_OUTPUT * counts).astype(np.int32)
    return entries


# -------------------------------------------------------------------------------------------- edits of single logits


class _LogitEdits:
    """What of a request changes single logits, whatever was chosen so far: bias, bad words, `min_tokens`.

    One column per edit: token, bits of the float32 to add, start and length of the tokens that must stand before it
    (a run of `prefixes`), and from which number of output tokens on it is no longer in force.
    """

    def __init__(self, params: SamplingParams, blocked: IntArray) -> None:
        self._params = params
        words = params.bad_word_token_ids or ()
        bias = params.logit_bias or {}
        lengths = [len(word) - 1 for word in words]
        starts = np.cumsum([0, *lengths])[: len(words)].tolist()
        self.prefixes = np.asarray([token for word in words for token in word[:-1]], dtype=np.int32)
        never = 2**31 - 1
        columns = [(token, value, 0, 0, never) for token, value in bias.items()]
        columns += [(word[-1], -math.inf, start, n, never) for word, start, n in zip(words, starts, lengths)]
        columns += [(token, -math.inf, 0, 0, params.min_tokens) for token in blocked.tolist()]
        tokens, values, *rest = zip(*columns, strict=True)
        self._columns = np.asarray([tokens, np.asarray(values, dtype=np.float32).view(np.int32), *rest], dtype=np.int32)

    def is_for(self, params: SamplingParams) -> bool:
        """Whether another completion's parameters, of the same request, ask for the same."""
        own = self._params
        return (
            own.bad_word_token_ids is params.bad_word_token_ids
            and own.logit_bias is params.logit_bias
            and own.extra_stop_token_ids is params.extra_stop_token_ids
            and (own.min_tokens, own.ignore_eos) == (params.min_tokens, params.ignore_eos)
        )

    def in_force(self, num_output_tokens: int) -> Words:
        """The first four rows of the columns that count now; a prefix must fit into the output."""
        lengths, until = self._columns[3], self._columns[4]
        return self._columns[:4, (lengths <= num_output_tokens) & (num_output_tokens < until)]


def _entries_in_force(edits: list[tuple[int, _LogitEdits, int]]) -> tuple[Words, Words]:
    """Entries and prefixes for `edit_logits`, from (line, its edits, its number of output tokens)."""
    entries, prefixes, num_prefix_tokens = [], [], 0
    for line, row_edits, num_output_tokens in edits:
        columns = row_edits.in_force(num_output_tokens)
        columns[2] += num_prefix_tokens
        entries.append(np.concatenate([np.full((1, columns.shape[1]), line, dtype=np.int32), columns]))
        prefixes.append(row_edits.prefixes)
        num_prefix_tokens += len(row_edits.prefixes)
    return np.concatenate(entries, axis=1), np.concatenate(prefixes)


# ---------------------------------------------------------------------------------------------------------- logprobs


def _logprob_words(logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """Per line: the chosen token's logprob and rank, `num_top` most likely ids, their logprobs; int32 [R, 2 + 2 T].

    Floats travel as their bits, so that one copy takes everything.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, token_ids.clamp(min=0).long().unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=1, keepdim=True, dtype=torch.int32) + 1
    top_ids = _most_likely(logprobs, num_top)
    top = logprobs.gather(1, top_ids)
    return torch.cat([chosen.view(torch.int32), ranks, top_ids.int(), top.view(torch.int32)], dim=1)


def _most_likely(logprobs: Tensor, count: int) -> Tensor:
    """Ids of the largest values of each line, equal ones by id.

    An order of integers that has the value above and the id below leaves no ties for a selection to break its own way.
    """
    bits = logprobs.view(torch.int32).long()
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(logprobs.shape[1], device=logprobs.device)
    return 0xFFFFFFFF - (((ordered << 32) + (0xFFFFFFFF - ids)).topk(count, dim=1).values & 0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class _PendingLogprobs:
    """Logprobs on their way to the host."""

    lines: list[int]
    num_top: list[int]
    parts: list[Tensor]

    def write_to(self, records: list[TokenLogprobs | None], token_ids: list[int]) -> None:
        """Fill in the lines that asked, and for which a token could be chosen."""
        words = torch.cat(self.parts)
        most = (words.shape[1] - 2) // 2
        ranks, ids = words[:, 1].tolist(), words[:, 2 : 2 + most].tolist()
        chosen = words[:, :1].contiguous().view(torch.float32).squeeze(1).tolist()
        top = words[:, 2 + most :].contiguous().view(torch.float32).tolist()
        for place, (line, num_top) in enumerate(zip(self.lines, self.num_top, strict=True)):
            if token_ids[line] != NO_TOKEN:
                records[line] = TokenLogprobs(
                    token_ids[line], chosen[place], ranks[place], ids[place][:num_top], top[place][:num_top]
                )
