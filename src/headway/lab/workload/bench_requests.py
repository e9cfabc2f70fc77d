"""The work of a benchmark: which prompts, how many tokens out, and when each request arrives.

Work is drawn from a seeded generator in a fixed order (each prompt's length and then its ids, prompt by prompt, and
after all prompts the output lengths), so that any engine that draws the same way does the same work.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.core.request_options import DEFAULT_OPTIONS, RequestOptions
from headway.errors import ConfigError

HIGHEST_TOKEN_ID = 10_000
"""Prompt ids are drawn from 0 to this, both included, or below the vocabulary if that is smaller."""

TRACE_COLUMNS = ("arrival_s", "input_tokens", "output_tokens")


@dataclass(frozen=True)
class LengthRange:
    """A number of tokens, drawn uniformly; both ends are included."""

    low: int
    high: int

    @classmethod
    def exactly(cls, length: int) -> LengthRange:
        """Always the same length."""
        return cls(length, length)

    @classmethod
    def around(cls, length: int, ratio: float) -> LengthRange:
        """From `length * (1 - ratio)` to `length * (1 + ratio)`, and at least one token."""
        return cls(max(1, int(length * (1 - ratio))), max(1, int(length * (1 + ratio))))

    def draw(self, rng: random.Random) -> int:
        """A length. Without a choice nothing is drawn."""
        return self.low if self.low == self.high else rng.randint(self.low, self.high)

    def clamp(self, length: int) -> int:
        """The nearest length inside."""
        return min(max(length, self.low), self.high)

    def __str__(self) -> str:
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,}–{self.high:,}"


@dataclass(frozen=True)
class BenchRequest:
    """One request of the work."""

    prompt_token_ids: Sequence[int]
    num_output_tokens: int
    """For each of its choices."""
    num_choices: int = 1
    arrival_s: float = 0.0
    """After the start of the round. Of one that follows another: not before this."""
    options: RequestOptions = DEFAULT_OPTIONS
    """How it is to be scheduled."""
    after: int | None = None
    """Index of the request that has to end first: the turn before in a conversation."""
    think_s: float = 0.0
    """From that end until this one is sent."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


Work = Sequence[BenchRequest]


@dataclass(frozen=True)
class TraceLimits:
    """Which part of a trace is replayed, and how."""

    num_requests: int = 1_000
    speedup: float = 2.5
    """Arrival times are divided by this."""
    input_len: LengthRange = LengthRange(1, 7_000)
    output_len: LengthRange = LengthRange(2, 1_000)


def highest_token_id(vocab_size: int) -> int:
    """The largest id that prompts of this vocabulary are drawn from."""
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
    """Random prompts with the lengths and arrivals of a recorded trace: a CSV file with the `TRACE_COLUMNS`."""
    rows = _read_trace(path, limits.num_requests)
    return [
        BenchRequest(
            _draw_ids(rng, limits.input_len.clamp(row.num_input_tokens), vocab_size),
            limits.output_len.clamp(row.num_output_tokens),
            arrival_s=row.arrival_s / limits.speedup,
        )
        for row in rows
    ]


def describe(work: Work) -> str:
    """The size of the work in a line."""
    num_out = sum(request.num_output_tokens * request.num_choices for request in work)
    plural = "s" if len(work) != 1 else ""
    return f"{len(work):,} request{plural}, {sum(r.num_prompt_tokens for r in work):,} tokens in, {num_out:,} out"


def _draw_ids(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    highest = highest_token_id(vocab_size)
    return [rng.randint(0, highest) for _ in range(count)]


@dataclass(frozen=True)
class _TraceRow:
    arrival_s: float
    num_input_tokens: int
    num_output_tokens: int


def _read_trace(path: str, num_rows: int) -> list[_TraceRow]:
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in TRACE_COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise ConfigError(f"The trace '{path}' lacks the column {', '.join(missing)}.")
            rows = [_parse_row(row, path, reader.line_num) for row, _ in zip(reader, range(num_rows))]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"Cannot read the trace '{path}': {reason}.") from error
    if not rows:
        raise ConfigError(f"The trace '{path}' has no rows.")
    return sorted(rows, key=lambda row: row.arrival_s)


def _parse_row(row: dict[str, str], path: str, line: int) -> _TraceRow:
    arrival, num_in, num_out = (row[name] for name in TRACE_COLUMNS)
    try:
        return _TraceRow(float(arrival), int(num_in), int(num_out))
    except (TypeError, ValueError):
        raise ConfigError(f"The trace '{path}' has a row that is not three numbers: line {line}.") from None
