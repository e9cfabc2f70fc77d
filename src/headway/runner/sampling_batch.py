"""The sampling side of the running batch: what each row's request asks for, and what it needs to remember.

A row is a place in the batch that one request holds while it runs. Numeric parameters lie in arrays indexed by row, so
a step picks those of its rows in one go; what only some requests need (tokens seen, biases, bad words) hangs on the row
that needs it. `features(rows)` tells which parts of sampling the rows use at all, so that the others cost nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headway.errors import InvalidRequestError
from headway.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int64]


class Feature(enum.IntFlag):
    """Parts of sampling that a row may use. A greedy row without extras has none."""

    RANDOM = enum.auto()
    TOP_K = enum.auto()
    TOP_P = enum.auto()
    MIN_P = enum.auto()
    PENALTIES = enum.auto()
    LOGIT_BIAS = enum.auto()
    BAD_WORDS = enum.auto()
    MIN_TOKENS = enum.auto()
    LOGPROBS = enum.auto()


_CHANGED_BY_TOKENS = int(Feature.PENALTIES | Feature.BAD_WORDS | Feature.MIN_TOKENS)
_MIN_TOKENS = int(Feature.MIN_TOKENS)


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise if a request asks for tokens that do not exist, or for bad words nobody has turned into tokens."""
    if params.bad_words and params.bad_word_token_ids is None:
        raise InvalidRequestError("bad_words need a tokenizer to become tokens, and there is none", "bad_words")
    params.validate_for_vocabulary(vocab_size)


def check_end_tokens(eos_token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """The model's end tokens, which are written to as they are: each must be one of its tokens."""
    if any(not 0 <= token_id < vocab_size for token_id in eos_token_ids):
        raise ValueError(f"end tokens {tuple(eos_token_ids)} for a vocabulary of {vocab_size}")
    return tuple(eos_token_ids)


def features_of(params: SamplingParams, vocab_size: int) -> Feature:
    """What a request uses at every step: all but MIN_TOKENS, which depends on how many tokens it has."""
    flags = Feature(0)
    if not params.greedy:
        flags |= Feature.RANDOM
        if 0 < params.top_k < vocab_size:
            flags |= Feature.TOP_K
        if params.top_p < 1.0:
            flags |= Feature.TOP_P
        if params.min_p > 0.0:
            flags |= Feature.MIN_P
    if params.is_penalised:
        flags |= Feature.PENALTIES
    if params.logit_bias:
        flags |= Feature.LOGIT_BIAS
    if params.bad_word_token_ids:
        flags |= Feature.BAD_WORDS
    if params.logprobs is not None:
        flags |= Feature.LOGPROBS
    return flags


def end_token_ids(params: SamplingParams, eos_token_ids: Sequence[int]) -> IntArray:
    """The tokens that may not be chosen before `min_tokens`: those that end the output."""
    own_ends = () if params.ignore_eos else eos_token_ids
    return np.unique(np.asarray([*own_ends, *params.extra_stop_token_ids], dtype=np.int64))


class BadWords:
    """Which tokens must not follow, by the tokens before them: looked up, however many words there are."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        last_by_prefix: dict[tuple[int, ...], list[int]] = {}
        for word in words:
            last_by_prefix.setdefault(tuple(word[:-1]), []).append(word[-1])
        self._always = np.asarray(last_by_prefix.pop((), []), dtype=np.int64)
        self._last_by_prefix = {prefix: np.asarray(last, np.int64) for prefix, last in last_by_prefix.items()}
        self._prefix_lengths = sorted({len(prefix) for prefix in last_by_prefix})
        self.longest_prefix = self._prefix_lengths[-1] if last_by_prefix else 0
        """How many of the last tokens have to be known."""

    def banned(self, tail: Sequence[int]) -> IntArray:
        """The last tokens of words whose other tokens are the last ones of the output, which ends with `tail`."""
        parts = [self._always]
        for length in self._prefix_lengths:
            if length > len(tail):
                break
            found = self._last_by_prefix.get(tuple(tail[-length:]))
            if found is not None:
                parts.append(found)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class SeenTokens:
    """The distinct tokens of one request, each with how often the output has it (0: in the prompt only).

    Penalties touch only tokens seen before, so this is all they need: its size is that of the request, not of the
    vocabulary.
    """

    def __init__(self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> None:
        distinct = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        self._size = len(distinct)
        self._ids = np.zeros(max(64, 2 * self._size), dtype=np.int64)
        self._ids[: self._size] = distinct
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._place = {token: place for place, token in enumerate(distinct.tolist())}
        for token in output_token_ids:
            self.append(token)

    def append(self, token: int) -> None:
        """Count one more output token."""
        place = self._place.setdefault(token, self._size)
        if place == self._size:
            if self._size == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token
            self._size += 1
        self._counts[place] += 1

    @property
    def ids(self) -> IntArray:
        """The distinct tokens, in order of appearance."""
        return self._ids[: self._size]

    @property
    def output_counts(self) -> npt.NDArray[np.float32]:
        """How often the output has each of `ids`."""
        return self._counts[: self._size]


class SamplingBatch:
    """Parameters and state of up to `max_num_seqs` rows.

    `eos_token_ids` are the model's own end tokens, kept out of the choice until a request's `min_tokens` are reached.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, *, eos_token_ids: Sequence[int] = ()) -> None:
        self.max_num_seqs = max_num_seqs
        self.vocab_size = vocab_size
        self._eos_token_ids = check_end_tokens(eos_token_ids, vocab_size)
        self.flags = np.zeros(max_num_seqs, dtype=np.int64)
        self.temperature = np.ones(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_p = np.ones(max_num_seqs, dtype=np.float64)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.repetition_penalty = np.ones(max_num_seqs, dtype=np.float32)
        self.presence_penalty = np.zeros(max_num_seqs, dtype=np.float32)
        self.frequency_penalty = np.zeros(max_num_seqs, dtype=np.float32)
        self.seed = np.zeros(max_num_seqs, dtype=np.uint64)
        self.num_output_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_logprobs = np.zeros(max_num_seqs, dtype=np.int64)
        self.params: list[SamplingParams | None] = [None] * max_num_seqs
        self.seen: list[SeenTokens | None] = [None] * max_num_seqs
        self.bad_words: list[BadWords | None] = [None] * max_num_seqs
        self._last_bad_words: tuple[tuple[tuple[int, ...], ...], BadWords] | None = None
        self.bias: list[tuple[IntArray, npt.NDArray[np.float32]] | None] = [None] * max_num_seqs
        self.output_tail: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self.blocked_ids: list[IntArray | None] = [None] * max_num_seqs

    def add(
        self,
        row: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        default_seed: int,
    ) -> None:
        """Put a request into a free row: new, or coming back after preemption with the tokens it already has.

        `default_seed` is used by a request without a seed of its own; the engine draws it once per request. If anything
        is wrong with the request, the row stays free.
        """
        if self.params[row] is not None:
            raise ValueError(f"row {row} is taken")
        try:
            self._enter(row, params, prompt_token_ids, output_token_ids, default_seed)
        except Exception:
            self._clear(row)
            raise

    def _enter(
        self,
        row: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        default_seed: int,
    ) -> None:
        check_params(params, self.vocab_size)
        flags = features_of(params, self.vocab_size)
        self.params[row] = params
        self.num_output_tokens[row] = len(output_token_ids)
        self.num_logprobs[row] = params.logprobs or 0
        if flags & Feature.RANDOM:
            self.temperature[row] = params.temperature
            self.seed[row] = (default_seed if params.seed is None else params.seed) % 2**64
            self.top_k[row] = params.top_k if flags & Feature.TOP_K else 0
            self.top_p[row] = params.top_p
            self.min_p[row] = params.min_p
        if flags & Feature.PENALTIES:
            self.repetition_penalty[row] = params.repetition_penalty
            self.presence_penalty[row] = params.presence_penalty
            self.frequency_penalty[row] = params.frequency_penalty
            self.seen[row] = SeenTokens(prompt_token_ids, output_token_ids)
        if flags & Feature.LOGIT_BIAS:
            assert params.logit_bias is not None
            ids, values = list(params.logit_bias), list(params.logit_bias.values())
            self.bias[row] = (np.asarray(ids, dtype=np.int64), np.asarray(values, dtype=np.float32))
        if flags & Feature.BAD_WORDS:
            words = self.bad_words[row] = self._bad_words_of(params)
            self.output_tail[row] = list(output_token_ids[-words.longest_prefix :]) if words.longest_prefix else []
        if len(output_token_ids) < params.min_tokens:
            blocked = end_token_ids(params, self._eos_token_ids)
            if len(blocked):
                flags |= Feature.MIN_TOKENS
                self.blocked_ids[row] = blocked
        self.flags[row] = int(flags)

    def _bad_words_of(self, params: SamplingParams) -> BadWords:
        """All completions of a request enter one after the other, and share theirs."""
        words = params.bad_word_token_ids or ()
        if self._last_bad_words is None or self._last_bad_words[0] is not words:
            self._last_bad_words = (words, BadWords(words))
        return self._last_bad_words[1]

    def append_token(self, row: int, token: int) -> None:
        """Record that the row's request has one more output token."""
        self.num_output_tokens[row] += 1
        flags = int(self.flags[row])
        if not flags & _CHANGED_BY_TOKENS:
            return
        seen, params = self.seen[row], self.params[row]
        assert params is not None
        if seen is not None:
            seen.append(token)
        words = self.bad_words[row]
        if words is not None:
            tail = self.output_tail[row]
            tail.append(token)
            del tail[: max(0, len(tail) - words.longest_prefix)]
        if flags & _MIN_TOKENS and self.num_output_tokens[row] >= params.min_tokens:
            self.flags[row] = flags & ~_MIN_TOKENS

    def remove(self, row: int) -> None:
        """Free the row."""
        self._check_taken(row)
        self._clear(row)

    def _clear(self, row: int) -> None:
        self.params[row] = None
        self.seen[row] = None
        self.bad_words[row] = None
        self.bias[row] = None
        self.blocked_ids[row] = None
        self.output_tail[row] = []
        self.flags[row] = 0

    def features(self, rows: IntArray) -> Feature:
        """All parts of sampling that any of these rows uses."""
        return Feature(int(np.bitwise_or.reduce(self.flags[rows]))) if len(rows) else Feature(0)

    def positions_with(self, rows: IntArray, feature: Feature) -> IntArray:
        """Which places in `rows` hold a row that uses `feature`."""
        return np.flatnonzero(self.flags[rows] & int(feature))

    def _check_taken(self, row: int) -> None:
        if self.params[row] is None:
            raise ValueError(f"row {row} holds no request")
