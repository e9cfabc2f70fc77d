"""What changes logits before a token is chosen: edits of single logits, and penalties for tokens that a row has seen.

This is the host's side, the same for every device. A step in which no row asks for edits runs none of it. The kernels'
`edit` receives a `StepEdits`, which also carries anything else that changes logits, such as a mask of allowed tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.core.scheduler_output import NewRequest
from headway.sampling_params import SamplingParams

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

# A row's entry for a token that it has seen: bit 0 says "in the prompt", the bits above count it in the output.
IN_PROMPT, ONE_OUTPUT = 1, 2

_NEVER = 2**31 - 1
_OWN_TO_A_COMPLETION = frozenset({"n", "best_of", "seed", "logprobs"})
_COMMON_TO_COMPLETIONS = tuple(
    field.name for field in dataclasses.fields(SamplingParams) if field.name not in _OWN_TO_A_COMPLETION
)


class LogitEdit(NamedTuple):
    """A number that is added to one token's logit while the edit is in force."""

    token_id: int
    value: float
    """-inf rules the token out. No two finite edits of a request may name the same token."""
    after: tuple[int, ...] = ()
    """The edit is in force where the output ends with these tokens."""
    until: int = _NEVER
    """The edit is in force while there are fewer output tokens than this."""


def logit_edits(params: SamplingParams, eos_token_ids: Sequence[int]) -> Iterator[LogitEdit]:
    """The edits of every parameter that bans or biases single tokens."""
    for token_id, bias in (params.logit_bias or {}).items():
        yield LogitEdit(token_id, bias)
    for word in params.bad_word_token_ids or ():
        yield LogitEdit(word[-1], -math.inf, after=tuple(word[:-1]))
    if params.min_tokens:
        ends = {*(() if params.ignore_eos else eos_token_ids), *params.extra_stop_token_ids}
        for token_id in sorted(ends):
            yield LogitEdit(token_id, -math.inf, until=params.min_tokens)


@dataclass(frozen=True, slots=True)
class LogitEntries:
    """The edits of single logits in a step, as the kernels take them."""

    columns: Int32Array
    """[5, E]: line, token, the bits of the float32 to add, and the start and length of a run in `prefixes`. An entry
    takes effect if the row's tokens before its position end with that run; an empty run always matches."""
    prefixes: Int32Array


@dataclass(frozen=True, slots=True)
class LineMasks:
    """The tokens that guided rows of a step may choose."""

    lines: Int32Array
    words: Int32Array
    """[lines, W]: bit i of word w allows token 32 w + i. There is at least one bit for each token of the vocabulary."""


@dataclass(frozen=True, slots=True)
class StepEdits:
    """Everything that changes a step's logits before a token is chosen: masks, entries and penalties, in this order."""

    entries: LogitEntries | None
    penalised: bool
    """Whether any row has penalties."""
    masks: LineMasks | None = None
    """Applied first: a token that they rule out stays ruled out."""
    line_offsets: NDArray[np.int64] | None = None
    """For each line, how many drafted tokens precede the token it chooses. None: no line has any."""


class RowEdits:
    """The edits of one request; its completions share them."""

    def __init__(self, params: SamplingParams, edits: Sequence[LogitEdit]) -> None:
        self._params = params
        lengths = [len(edit.after) for edit in edits]
        starts = np.cumsum([0, *lengths])[: len(edits)]
        self.prefixes = np.asarray([token for edit in edits for token in edit.after], dtype=np.int32)
        self._columns = np.empty((5, len(edits)), dtype=np.int32)
        self._columns[0] = [edit.token_id for edit in edits]
        self._columns[1] = np.asarray([edit.value for edit in edits], dtype=np.float32).view(np.int32)
        self._columns[2:4] = starts, lengths
        self._columns[4] = [edit.until for edit in edits]
        self._always = not max(lengths) and int(self._columns[4].min()) == _NEVER
        self.until = int(self._columns[4].max())
        """The number of output tokens from which no edit is in force."""

    def is_for(self, params: SamplingParams) -> bool:
        """Whether these are the parameters of another completion of the same request."""
        pairs = ((getattr(self._params, name), getattr(params, name)) for name in _COMMON_TO_COMPLETIONS)
        return all(own is other or own == other for own, other in pairs)

    def in_force(self, num_output_tokens: int) -> Int32Array:
        """Token, value, start and length of the edits in force now. A prefix longer than the output is left out."""
        if self._always:
            return self._columns[:4]
        lengths, until = self._columns[3], self._columns[4]
        return self._columns[:4, (lengths <= num_output_tokens) & (num_output_tokens < until)]


class EditTable:
    """The edits of all rows. `eos_token_ids` are the model's own end tokens, which `min_tokens` rules out."""

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._edits: dict[int, RowEdits] = {}
        self._last: RowEdits | None = None

    def of(self, params: SamplingParams) -> RowEdits | None:
        """The edits of a request. Its completions enter one after the other and share them."""
        if self._last is not None and self._last.is_for(params):
            return self._last
        edits = [*logit_edits(params, self._eos_token_ids)]
        if not edits:
            return None
        self._last = RowEdits(params, edits)
        return self._last

    def seat(self, row: int, edits: RowEdits) -> None:
        self._edits[row] = edits

    def clear(self, row: int) -> None:
        self._edits.pop(row, None)

    def entries(self, rows: Int64Array, lines: list[int], num_output_tokens: list[int]) -> LogitEntries | None:
        """The edits for `lines` of a step, where line i belongs to `rows[i]`. `None` if none is in force."""
        edits = [self._edits[rows[line]] for line in lines]
        parts = [own.in_force(count) for own, count in zip(edits, num_output_tokens, strict=True)]
        sizes = [part.shape[1] for part in parts]
        columns = np.empty((5, sum(sizes)), dtype=np.int32)
        if not columns.shape[1]:
            return None
        columns[0] = np.repeat(lines, sizes)
        np.concatenate(parts, axis=1, out=columns[1:])
        starts = np.cumsum([0, *(len(own.prefixes) for own in edits)])
        columns[3] += np.repeat(starts[:-1], sizes).astype(np.int32)
        return LogitEntries(columns, np.concatenate([own.prefixes for own in edits]))


def seen_tokens(request: NewRequest) -> tuple[Int32Array, Int32Array]:
    """The distinct tokens of a request and the entry of each (see `IN_PROMPT`), which is all that penalties need."""
    prompt = np.unique(np.asarray(request.prompt_token_ids, dtype=np.int32))
    output, counts = np.unique(np.asarray(request.output_token_ids, dtype=np.int32), return_counts=True)
    tokens = np.union1d(prompt, output)
    entries = np.zeros(len(tokens), dtype=np.int32)
    entries[np.searchsorted(tokens, prompt)] += IN_PROMPT
    entries[np.searchsorted(tokens, output)] += (ONE_OUTPUT * counts).astype(np.int32)
    return tokens, entries
