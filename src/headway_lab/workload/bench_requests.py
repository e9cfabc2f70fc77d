"""The work of a benchmark: which prompts, how many tokens out, and when each request arrives.

Work is drawn from a seeded generator in a fixed order (each prompt's length and then its ids, prompt by prompt, and
after all prompts the output lengths), so that any engine that draws the same way does the same work.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.core.request_options import DEFAULT_OPTIONS, RequestOptions
from headway.errors import ConfigError
from headway_lab.workload.arrivals import Trace, check_times
from headway_lab.workload.input_files import DataFile

HIGHEST_TOKEN_ID = 10_000
"""Prompt ids are drawn from 0 to this, inclusive, or below the vocabulary's size if that is smaller."""


@dataclass(frozen=True)
class LengthRange:
    """A number of tokens, drawn uniformly; both ends are included."""

    low: int
    high: int

    @classmethod
    def exactly(cls, length: int) -> LengthRange:
        """A range that has only this length."""
        return cls(length, length)

    @classmethod
    def around(cls, length: int, ratio: float) -> LengthRange:
        """The range from `length * (1 - ratio)` to `length * (1 + ratio)`, with at least one token."""
        return cls(max(1, int(length * (1 - ratio))), max(1, int(length * (1 + ratio))))

    def draw(self, rng: random.Random) -> int:
        """Draw a length. If there is only one, the generator is not used."""
        return self.low if self.low == self.high else rng.randint(self.low, self.high)

    def clamp(self, length: int) -> int:
        """The nearest length in the range."""
        return min(max(length, self.low), self.high)

    def __str__(self) -> str:
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,}–{self.high:,}"


@dataclass(frozen=True)
class BenchRequest:
    """One request of the work."""

    prompt_token_ids: Sequence[int]
    num_output_tokens: int
    """The number of output tokens of each of its choices."""
    num_choices: int = 1
    arrival_s: float = 0.0
    """Seconds after the start of the round. A request that follows another is not sent before this time."""
    options: RequestOptions = DEFAULT_OPTIONS
    """The options of its scheduling."""
    after: int | None = None
    """Index of the request that has to end first: the turn before in a conversation."""
    think_s: float = 0.0
    """Seconds from that end until this request is sent."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


Work = Sequence[BenchRequest]


@dataclass(frozen=True)
class TraceLimits:
    """The part of a trace that is replayed, and how."""

    num_requests: int = 1_000
    speedup: float = 2.5
    """Arrival times are divided by this."""
    input_len: LengthRange = LengthRange(1, 7_000)
    output_len: LengthRange = LengthRange(2, 1_000)


def highest_token_id(vocab_size: int) -> int:
    """The largest id that prompts may have with this vocabulary."""
    return min(HIGHEST_TOKEN_ID, vocab_size - 1)


def draw_work(
    rng: random.Random,
    num_requests: int,
    *,
    input_len: LengthRange,
    output_len: LengthRange,
    vocab_size: int,
    num_choices: int = 1,
) -> list[BenchRequest]:
    """Random prompts, all there from the start."""
    prompts = [_draw_ids(rng, input_len.draw(rng), vocab_size) for _ in range(num_requests)]
    return [BenchRequest(prompt, output_len.draw(rng), num_choices) for prompt in prompts]


def trace_work(path: str, rng: random.Random, *, vocab_size: int, limits: TraceLimits) -> list[BenchRequest]:
    """Random prompts with the lengths and arrivals of a recorded trace, from its first request on."""
    file = DataFile(path)
    if not Path(path).expanduser().is_file():
        raise ConfigError(f"Cannot read the trace '{path}': there is no such file.")
    rows = Trace(file).read()[: limits.num_requests]
    work = []
    for row in rows:
        if row.arrival_s is None or row.num_input_tokens is None or row.num_output_tokens is None:
            raise ConfigError(f"The trace '{path}' lacks times of arrival, input tokens or output tokens.")
        prompt = _draw_ids(rng, limits.input_len.clamp(row.num_input_tokens), vocab_size)
        num_out = limits.output_len.clamp(row.num_output_tokens)
        arrival_s = (row.arrival_s - (rows[0].arrival_s or 0.0)) / limits.speedup
        work.append(BenchRequest(prompt, num_out, arrival_s=arrival_s))
    check_times([request.arrival_s for request in work])
    return work


def describe(work: Work) -> str:
    """The size of the work as a line of text."""
    num_out = sum(request.num_output_tokens * request.num_choices for request in work)
    plural = "s" if len(work) != 1 else ""
    return f"{len(work):,} request{plural}, {sum(r.num_prompt_tokens for r in work):,} tokens in, {num_out:,} out"


def _draw_ids(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    highest = highest_token_id(vocab_size)
    return [rng.randint(0, highest) for _ in range(count)]
