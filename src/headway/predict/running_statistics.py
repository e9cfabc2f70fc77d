"""A predictor that learns as it goes: how long were the answers to requests like this one?

Requests are put into buckets by what is cheap to know, from coarse to fine: all of them, those of about this prompt
length, of this user, with these first tokens, with these last tokens. The guess starts from the mean of the logarithm
of all lengths, and each level adds what its bucket has found the guess before it to be off by, shrunk towards zero
while the bucket has seen little:

    guess += bucket.offset * bucket.weight / (bucket.weight + SHRINKAGE)

Buckets are slots of fixed tables, found by hash; requests that fall together share one. A bucket's weight stops growing
at `MEMORY` requests, from when on older ones fade away, so that the guesses follow the traffic. A shift that is common
to all guesses makes their sum that of the lengths: these are log-normal only roughly.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from headway.predict.base import PromptView
from headway.predict.capped_length import expected_length
from headway.predict.features import HEAD_LENGTHS, KEY_BITS, TAIL_LENGTHS, PromptKeys, prompt_keys

SHRINKAGE = 8.0
MEMORY = 500.0
START_LENGTH = 128.0
"""The guess before anything has been seen."""
START_SPREAD = 1.0
"""Of the logarithm of lengths, before anything has been seen."""

_NUM_LEVELS = 3 + len(HEAD_LENGTHS) + len(TAIL_LENGTHS)
_SLOTS = 1 << KEY_BITS


class RunningStatistics:
    """Starts knowing nothing. The same requests in the same order give the same guesses."""

    name = "statistics"

    def __init__(self) -> None:
        self._offsets = [array("d", bytes(8 * _SLOTS)) for _ in range(_NUM_LEVELS)]
        self._weights = [array("d", bytes(8 * _SLOTS)) for _ in range(_NUM_LEVELS)]
        self._variance = START_SPREAD**2
        self._shift = 0.0
        self._mean_length = START_LENGTH
        self._num_seen = 0

    def predict(self, prompts: Sequence[PromptView]) -> list[float]:
        return [self.predict_keys(prompt_keys(prompt)) for prompt in prompts]

    def observe(self, prompt: PromptView, num_output_tokens: int) -> None:
        self.observe_keys(prompt_keys(prompt), num_output_tokens)

    def predict_keys(self, keys: PromptKeys) -> float:
        """As `predict`, for a prompt of which only the keys are left."""
        return self._expected(self._log_length(_slots(keys)), keys)

    def observe_keys(self, keys: PromptKeys, num_output_tokens: int) -> None:
        """As `observe`. An answer that was cut at `max_tokens` would have been at least that long: where that
        was expected of it anyway, there is nothing to learn."""
        slots = _slots(keys)
        guess = self._log_length(slots)
        actual = math.log(max(num_output_tokens, 1))
        if keys.max_tokens is not None and num_output_tokens >= keys.max_tokens and actual <= guess:
            return
        self._num_seen += 1
        pace = 1 / min(self._num_seen + SHRINKAGE, MEMORY)
        self._shift += pace * (num_output_tokens - self._expected(guess, keys)) / max(self._mean_length, 1.0)
        self._mean_length += pace * (num_output_tokens - self._mean_length)
        self._variance += pace * ((actual - guess) ** 2 - self._variance)
        self._learn(slots, actual)

    def _expected(self, log_length: float, keys: PromptKeys) -> float:
        return expected_length(log_length + self._shift, math.sqrt(self._variance), keys.max_tokens)

    def _log_length(self, slots: Sequence[int | None]) -> float:
        guess = math.log(START_LENGTH)
        for level, slot in enumerate(slots):
            if slot is not None:
                guess += self._correction(level, slot)
        return guess

    def _learn(self, slots: Sequence[int | None], actual: float) -> None:
        """Each level learns what those above it, which have just learnt too, leave unexplained."""
        guess = math.log(START_LENGTH)
        for level, slot in enumerate(slots):
            if slot is None:
                continue
            offsets, weights = self._offsets[level], self._weights[level]
            weights[slot] = min(weights[slot] + 1.0, MEMORY)
            offsets[slot] += (actual - guess - offsets[slot]) / weights[slot]
            guess += self._correction(level, slot)

    def _correction(self, level: int, slot: int) -> float:
        weight = self._weights[level][slot]
        return self._offsets[level][slot] * weight / (weight + SHRINKAGE) if weight else 0.0


def _slots(keys: PromptKeys) -> tuple[int | None, ...]:
    """The bucket on each level, from coarse to fine; None where the request does not say."""
    length_bucket = int(2 * math.log2(max(keys.num_prompt_tokens, 1)))
    return 0, length_bucket, keys.user, *keys.heads, *keys.tails
