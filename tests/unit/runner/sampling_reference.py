"""Sampling with Gumbel noise by brute force: numpy, float64, one row and one token at a time."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.errors import InvalidRequestError
from headway.sampling_params import SamplingParams

Floats = npt.NDArray[np.float64]

# Scores and sums this close may come out in the other order in float32.
SCORE_SLACK, SUM_SLACK = 2e-5, 2e-6


@dataclass
class Request:
    """SamplingParams fields, and the tokens so far."""

    fields: dict[str, Any]
    prompt: list[int] = field(default_factory=lambda: [1])
    output: list[int] = field(default_factory=list)
    default_seed: int = 0
    bad: list[list[int]] | None = None

    @property
    def params(self) -> SamplingParams:
        params = SamplingParams(max_tokens=None, **self.fields)
        return params if self.bad is None else params.with_bad_word_token_ids(self.bad)

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)

    def copy(self) -> Request:
        """The request as it is now: a step appends to `output`."""
        return replace(self, output=list(self.output))


def _mix64(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)


def _mix32(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    low = np.uint64(2**32 - 1)
    words = ((words ^ (words >> np.uint64(16))) * np.uint64(0x7FEB352D)) & low
    words = ((words ^ (words >> np.uint64(15))) * np.uint64(0x846CA68B)) & low
    return words ^ (words >> np.uint64(16))


def noise_key(seed: int, position: int) -> int:
    key = _mix64((seed + 0x9E3779B97F4A7C15) % 2**64)
    return _mix64((key + position * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) % 2**64)


def noise_of_key(key: int, ids: npt.NDArray[np.int64]) -> Floats:
    low, high = np.uint64(key % 2**32), np.uint64(key >> 32)
    bits = _mix32(_mix32((ids.astype(np.uint64) + low) & np.uint64(2**32 - 1)) ^ high)
    return -np.log(-np.log1p(-(bits.astype(np.float64) + 0.5) / 2.0**32))


def noise(seed: int, position: int, vocab_size: int) -> Floats:
    return noise_of_key(noise_key(seed, position), np.arange(vocab_size))


def edited(logits: Floats, request: Request, eos: list[int]) -> Floats:
    out, output = logits.copy(), request.output
    params = request.params
    if len(output) < params.min_tokens:
        out[[*([] if params.ignore_eos else eos), *params.extra_stop_token_ids]] = -np.inf
    for word in request.bad or []:
        before = word[:-1]
        if len(output) >= len(before) and output[len(output) - len(before) :] == before:
            out[word[-1]] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        out[token] += bias
    for token in set(request.prompt) | set(output):
        scale = params.repetition_penalty
        out[token] = out[token] / scale if out[token] > 0 else out[token] * scale
    for token in set(output):
        out[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return out


def kept(logits: Floats, params: SamplingParams, top_p_shift: float = 0.0) -> npt.NDArray[np.bool_]:
    """What min_p, top_k and top_p leave."""
    with np.errstate(divide="ignore"):
        keep = logits >= logits.max() + params.temperature * np.log(params.min_p)
    if 0 < params.top_k < len(logits):
        keep &= logits >= np.sort(logits)[-params.top_k]
    if params.top_p < 1.0:
        ordered = np.sort(np.where(keep, logits, -np.inf))[::-1]
        cumulative = np.cumsum(np.exp((ordered - logits.max()) / params.temperature))
        last = int(np.searchsorted(cumulative, (params.top_p + top_p_shift) * cumulative[-1]))
        keep &= logits >= ordered[min(last, len(ordered) - 1)]
    return keep


def expected_tokens(logits: Floats, request: Request, eos: list[int]) -> set[int]:
    """The token to be chosen; more than one where rounding decides."""
    params = request.params
    changed = edited(logits.astype(np.float64), request, eos)
    if params.greedy:
        return {int(changed.argmax())}
    seed = request.default_seed if params.seed is None else params.seed
    scores = changed / params.temperature + noise(seed % 2**64, request.position, len(changed))
    found: set[int] = set()
    for shift in (-SUM_SLACK, 0.0, SUM_SLACK):
        left = np.where(kept(changed, params, shift), scores, -np.inf)
        found |= set(np.flatnonzero(left >= left.max() - SCORE_SLACK * max(1.0, abs(left.max()) / 16)).tolist())
    return found


EXTREMES: list[Any] = [
    *(5e-324, 2.3e-308, 1e-300, 1e-46, 1e-45, 1.2e-38, 1e-30, 1e-16, 1e-7, 9.9e-6, 1e-5, 1e-3, 0.0099, 0.01, 0.5),
    *(1 - 2**-53, 1 - 1e-9, 1, 1 + 2**-52, 2, 2.0001, 10, 99.9, 100, 101, 65504, 1e30, 1e38, 3.4e38, 3.5e38, 1e300),
    *(float("inf"), float("nan"), 0.0, -0.0, 10**30, 10**400, 2**31, 2**63, 2**64, True, False, "1", None),
]


def accepted_extremes() -> list[dict[str, Any]]:
    """Fields of `SamplingParams`, each with one value at the edge of what float32 can take, or far beyond, that is not
    refused; some beside others that make it matter."""
    cases: list[dict[str, Any]] = []
    names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "top_k")
    for name in (*names, "seed", "logit_bias"):
        for value in EXTREMES:
            for signed in (value, -value) if isinstance(value, int | float) else (value,):
                field = {5: signed} if name == "logit_bias" else signed
                for others in ({}, {"temperature": 1e-5}, {"temperature": 100.0, "top_p": 0.5, "min_p": 1e-9}):
                    case = {"temperature": 0.7, **others, name: field}
                    with contextlib.suppress(InvalidRequestError):
                        SamplingParams(**case)
                        cases.append(case)
    return cases
