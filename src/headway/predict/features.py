"""Computes the features of a prompt that predictors use.

Features are computed from token ids, which are always known: counts of hashed tokens of the whole prompt, counts of
hashed tokens and pairs of its last message, the lengths of earlier messages, and a few hashes of its beginning and end.
If the text is known, cues from it are added; otherwise these are missing values. The hashes have no key and few values,
so a log does not spell out the prompt, and many prompts share each value.

    column  0 .. 3            length, max_tokens, temperature, share of distinct tokens
            ... + TURNS       number and lengths of the conversation's messages
            ... + CUES        cues of the text, NaN where there is none
            ... + GRAMS       log(1 + count) of each bucket: tokens of the prompt, tokens and pairs of its last message

A change to any number here makes another feature set: raise `FEATURES_VERSION`.

The messages of a conversation are found in token ids alone. Most templates open each message with one token and then
its role, and a prompt ends where an answer has been opened:

    <open> system ... <open> user ... <open> assistant ... <open> user ... <open> assistant

So the token that opens is among the first two (one may mark the beginning of all) and again among the last few, and the
role after its last place is the one that answers. A prompt where that does not hold is taken for one message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway.predict.base import PromptView
from headway.predict.text_cues import NUM_CUES, text_cues

OPENER_PLACES = 8
"""The most tokens with which a template opens an answer."""
TURN_NAMES = (
    "num_questions",
    "log_last_question",
    "log_first_question",
    "log_question_before",
    "mean_log_answer",
    "log_last_answer",
    "log_shortest_answer",
    "log_longest_answer",
)
NUM_TURNS = len(TURN_NAMES)

Ids = npt.NDArray[np.uint64]

FEATURES_VERSION = 2
BODY_COLUMNS = 512
MESSAGE_COLUMNS = 512
PAIR_COLUMNS = 512
GRAM_COLUMNS = BODY_COLUMNS + MESSAGE_COLUMNS + PAIR_COLUMNS
NUM_PLAIN = 4
CUES_START = NUM_PLAIN + NUM_TURNS
GRAMS_START = CUES_START + NUM_CUES
NUM_FEATURES = GRAMS_START + GRAM_COLUMNS

MOST_TOKENS = 1024
"""Of longer prompts the first and the last half of this many tokens are read, so that the cost is bounded."""
KEY_BITS = 16
HEAD_LENGTHS = (16, 32, 40, 48)
TAIL_LENGTHS = (8, 10, 14)

Floats = npt.NDArray[np.float32]
_Hashes = npt.NDArray[np.uint64]

_FIRST, _SECOND, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)
_FNV_START, _FNV_PRIME, _FNV_MASK = 0xCBF29CE484222325, 0x100000001B3, 2**64 - 1


@dataclass(frozen=True, slots=True)
class Turns:
    """The lengths of a conversation's messages in order, including the template's tokens."""

    last_start: int
    """Where the last message begins, and where it ends."""
    last_end: int
    questions: tuple[int, ...]
    """Messages of the role that wrote the last one, which is the last of them."""
    answers: tuple[int, ...]
    """Messages of the role that is to answer now."""

    def numbers(self) -> tuple[float, ...]:
        """One number per name of `TURN_NAMES`, 0 if there is none, rounded as in the log."""
        questions = [math.log1p(length) for length in self.questions]
        answers = [math.log1p(length) for length in self.answers] or [0.0]
        numbers = (
            float(len(questions)),
            questions[-1],
            questions[0],
            questions[-2] if len(questions) > 1 else 0.0,
            sum(answers) / len(answers),
            answers[-1],
            min(answers),
            max(answers),
        )
        return tuple(round(number, 4) for number in numbers)


def find_turns(ids: Ids) -> Turns:
    opener = _opener(ids)
    starts = [] if opener is None else np.flatnonzero(ids[:-1] == opener).tolist()
    if len(starts) < 2:
        return Turns(0, len(ids), (len(ids),), ())
    roles = ids[np.array(starts) + 1].tolist()
    lengths = np.diff(starts).tolist()
    return Turns(
        last_start=starts[-2],
        last_end=starts[-1],
        questions=tuple(length for length, role in zip(lengths, roles) if role == roles[-2]),
        answers=tuple(length for length, role in zip(lengths, roles[:-1]) if role == roles[-1]),
    )


def _opener(ids: Ids) -> int | None:
    end = ids[2:][-OPENER_PLACES:-1].tolist()
    return next((token for token in ids[:2].tolist() if token in end), None)


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """Hashes of what requests of one kind have in common; each below 2 ** KEY_BITS."""

    heads: tuple[int, ...]
    """Hashes of the first tokens, one for each of `HEAD_LENGTHS`."""
    tails: tuple[int, ...]
    """Hashes of the last tokens, one for each of `TAIL_LENGTHS`."""
    user: int | None
    num_prompt_tokens: int
    max_tokens: int | None


@dataclass(frozen=True, slots=True)
class PromptFeatures:
    """All that is kept of a prompt. To a predictor, two prompts with the same features are the same."""

    keys: PromptKeys
    temperature: float
    distinct_share: float
    turns: tuple[float, ...]
    """Of the conversation's messages, one number for each of `TURN_NAMES`."""
    grams: bytes
    """A count, at most 255, for each of `GRAM_COLUMNS` buckets."""
    cues: tuple[float, ...] | None


def prompt_keys(prompt: PromptView) -> PromptKeys:
    """The prompt's keys, computed in a time that does not depend on its length."""
    ids = prompt.prompt_token_ids
    return PromptKeys(
        heads=_prefix_hashes(ids[: HEAD_LENGTHS[-1]], HEAD_LENGTHS),
        tails=_prefix_hashes(ids[: -TAIL_LENGTHS[-1] - 1 : -1], TAIL_LENGTHS),
        user=None if prompt.user is None else _user_hash(prompt.user),
        num_prompt_tokens=len(ids),
        max_tokens=prompt.max_tokens,
    )


def prompt_features(prompt: PromptView) -> PromptFeatures:
    ids = _read_tokens(prompt.prompt_token_ids)
    turns = find_turns(ids)
    singles = ids * _FIRST
    message = singles[turns.last_start : turns.last_end]
    counts = (
        _bucket_counts(singles, BODY_COLUMNS),
        _bucket_counts(message, MESSAGE_COLUMNS),
        _bucket_counts(message[:-1] * _SECOND + message[1:], PAIR_COLUMNS),
    )
    return PromptFeatures(
        keys=prompt_keys(prompt),
        temperature=prompt.temperature,
        distinct_share=round(len(set(ids.tolist())) / max(len(ids), 1), 4),
        turns=turns.numbers(),
        grams=np.minimum(np.concatenate(counts), 255).astype(np.uint8).tobytes(),
        cues=None if prompt.text is None else text_cues(prompt.text),
    )


def feature_matrix(prompts: Sequence[PromptFeatures]) -> Floats:
    """A row of `NUM_FEATURES` numbers for each prompt."""
    matrix = np.empty((len(prompts), NUM_FEATURES), dtype=np.float32)
    for row, prompt in zip(matrix, prompts):
        keys = prompt.keys
        row[0] = math.log1p(keys.num_prompt_tokens)
        row[1] = math.nan if keys.max_tokens is None else math.log1p(keys.max_tokens)
        row[2] = prompt.temperature
        row[3] = prompt.distinct_share
        row[NUM_PLAIN:CUES_START] = prompt.turns
        row[CUES_START:GRAMS_START] = math.nan if prompt.cues is None else prompt.cues
        row[GRAMS_START:] = np.frombuffer(prompt.grams, dtype=np.uint8)
    grams = matrix[:, GRAMS_START:]
    np.log1p(grams, out=grams)
    return matrix


def _read_tokens(token_ids: Sequence[int]) -> _Hashes:
    if len(token_ids) > MOST_TOKENS:
        half = MOST_TOKENS // 2
        token_ids = [*token_ids[:half], *token_ids[-half:]]
    return np.array(token_ids, dtype=np.uint64)


def _bucket_counts(hashes: _Hashes, num_columns: int) -> npt.NDArray[np.intp]:
    """How many of these fall into each column."""
    mixed = (hashes ^ (hashes >> _SHIFT)) * _MIX
    return np.bincount((mixed >> _SHIFT).astype(np.intp) % num_columns, minlength=num_columns)


def _prefix_hashes(items: Sequence[int], lengths: Sequence[int]) -> tuple[int, ...]:
    """FNV-1a of the first items, as many as each of the rising lengths says, or all where there are fewer."""
    value, done, hashes = _FNV_START, 0, []
    for length in lengths:
        for item in items[done:length]:
            value = ((value ^ item) * _FNV_PRIME) & _FNV_MASK
        done = length
        hashes.append(_fold(value))
    return tuple(hashes)


def _user_hash(user: str) -> int:
    value = _FNV_START
    for byte in user.encode(errors="surrogatepass"):
        value = ((value ^ byte) * _FNV_PRIME) & _FNV_MASK
    return _fold(value)


def _fold(value: int) -> int:
    return (value ^ (value >> 32) ^ (value >> 17)) & ((1 << KEY_BITS) - 1)
