"""The traffic of a calibration: waves of requests in which steps of every kind occur.

    crowd     many short prompts at once, then steps that only decode, with ever fewer rows
    stream    prompts of all lengths arrive while others generate, few or many: chunks beside decodes
    long      one or two long prompts, alone or beside a few that generate
    deep      few or many long prompts, then steps that only decode and read much of the cache

Prompts are as long as the machine can compute in a second or two, so that slow machines see many waves too. Fast ones
generate for longer: a device has to be busy for some steps until the host runs ahead of it as it does under load.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

KINDS = ("crowd", "stream", "deep", "stream", "crowd", "long", "deep")
_PATIENT_TOKENS, _MOST_PATIENCE = 2_000, 6
_DEEP_TOKENS = 512  # of each prompt of a deep wave, at least, where there are many


@dataclass(frozen=True)
class PlannedRequest:
    """One request of a wave; `at_step`: the step of the wave before which it arrives."""

    num_prompt_tokens: int
    num_output_tokens: int
    at_step: int


Wave = list[PlannedRequest]


@dataclass(frozen=True)
class WaveLimits:
    """What a wave may ask for."""

    max_num_seqs: int
    max_model_len: int
    num_cache_tokens: int
    num_prompt_tokens: int
    """So many can be computed in about a second."""

    @property
    def patience(self) -> int:
        """How many times as many tokens are generated as where steps take long."""
        return min(max(self.num_prompt_tokens // _PATIENT_TOKENS, 1), _MOST_PATIENCE)


def waves(limits: WaveLimits, rng: random.Random) -> Iterator[Wave]:
    """One of each kind after the other, forever."""
    make = {"crowd": _crowd, "stream": _stream, "long": _long, "deep": _deep}
    while True:
        for kind in KINDS:
            yield _fitting(make[kind](limits, rng), limits)


def _crowd(limits: WaveLimits, rng: random.Random) -> Wave:
    num_rows = _log_uniform(rng, 1, limits.max_num_seqs)
    longest = max(limits.num_prompt_tokens // num_rows, 2)
    return [
        PlannedRequest(rng.randint(1, min(longest, 64)), limits.patience * rng.randint(3, 10), 0)
        for _ in range(num_rows)
    ]


def _stream(limits: WaveLimits, rng: random.Random) -> Wave:
    gap = rng.choice((0.3, 1, 2))
    room = limits.num_prompt_tokens
    wave: Wave = []
    if rng.random() < 0.5:
        num_rows = _log_uniform(rng, 1, max(limits.max_num_seqs // 2, 1))
        wave = [PlannedRequest(rng.randint(1, 16), limits.patience * rng.randint(8, 16), 0) for _ in range(num_rows)]
    for place in range(limits.max_num_seqs - len(wave)):
        num_in = _log_uniform(rng, 2, max(limits.num_prompt_tokens // 2, 16))
        wave.append(PlannedRequest(num_in, limits.patience * rng.randint(4, 16), int(place * gap)))
        room -= num_in
        if room <= 0:
            break
    return wave


def _long(limits: WaveLimits, rng: random.Random) -> Wave:
    longest = 2 * limits.num_prompt_tokens
    few = [PlannedRequest(rng.randint(2, 32), 12, 0) for _ in range(rng.choice((0, 2, 6)))]
    return [*few, PlannedRequest(rng.randint(max(longest // 3, 1), longest), 3, 2 if few else 0)]


def _deep(limits: WaveLimits, rng: random.Random) -> Wave:
    num_tokens = 2 * limits.num_prompt_tokens
    most_rows = max(min(num_tokens // _DEEP_TOKENS, limits.max_num_seqs), 4)
    num_rows = rng.choice((1, 2, 4, _log_uniform(rng, 4, most_rows), most_rows))
    longest = max(num_tokens // num_rows, 2)
    return [
        PlannedRequest(rng.randint(max(longest // 3, 1), longest), limits.patience * 24, place // 4)
        for place in range(num_rows)
    ]


def _fitting(wave: Wave, limits: WaveLimits) -> Wave:
    """No request longer than the model takes, and no more of them than the batch and the cache hold."""
    kept: Wave = []
    room = limits.num_cache_tokens
    for request in wave[: limits.max_num_seqs]:
        num_out = min(request.num_output_tokens, max(limits.max_model_len // 4, 1))
        num_in = max(min(request.num_prompt_tokens, limits.max_model_len - num_out), 1)
        room -= num_in + num_out
        if room < 0 and kept:
            break
        kept.append(PlannedRequest(num_in, num_out, request.at_step))
    return kept


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return max(low, min(high, round(math.exp(rng.uniform(math.log(low), math.log(max(high, low)))))))
