"""When requests come: all at once, at random, or as recorded in a trace.

A rate counts requests per second. If requests follow others (the turns of a conversation), only the first is an
arrival, and the rate of arrivals is lower accordingly. Gaps are drawn for a rate of one and then stretched, so that one
seed gives the same pattern at every rate.

A trace has a request in each row. Its columns determine which of these kinds of file it is:

    arrival_s, input_tokens, output_tokens                   CSV or JSON Lines; any of the three may be left out
    timestamp (ms), input_length, output_length, hash_ids    JSON Lines, as Mooncake's traces
    TIMESTAMP (a date and a time), ContextTokens, GeneratedTokens        CSV, as Azure's traces
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from headway.errors import ConfigError
from headway_lab.workload.input_files import (
    MOST,
    MOST_SECONDS,
    MOST_TOKENS,
    DataFile,
    FileVersion,
    OptionsTable,
    Row,
    field_of,
    number_of,
)
from headway_lab.workload.rates import RATES

MOONCAKE_BLOCK_TOKENS = 512
"""The tokens for which a hash id of such a trace stands."""

_LEAST_CV = 1e-6
"""Gaps with a smaller coefficient of variation are all equal."""
_MOST_CV = 1e3

KINDS = ("at_once", "poisson", "gamma", "trace")


@dataclass(frozen=True)
class TraceRow:
    """One recorded request; None for what the file does not have."""

    arrival_s: float | None
    num_input_tokens: int | None
    num_output_tokens: int | None
    block_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Trace:
    """A file of rows, and the order in which they are used."""

    file: DataFile
    is_shuffled: bool = False

    def read(self) -> list[TraceRow]:
        """Read all rows, in order of arrival if that is known."""
        return list(_sorted_rows(self.file, self.file.version()))

    def take(self, count: int, rng: random.Random) -> list[TraceRow]:
        """The next `count` rows. After its end the file begins again with other block ids, so that no block is shared
        with the time before."""
        rows = self.read()
        if self.is_shuffled:
            rng.shuffle(rows)
        highest = max((max(row.block_ids) for row in rows if row.block_ids), default=0)
        return [_again(rows[place % len(rows)], place // len(rows) * (highest + 1)) for place in range(count)]


def read_trace(table: OptionsTable, folders: tuple[Path, ...]) -> Trace:
    """Read the table `[trace]`."""
    table.only("file", "order")
    is_shuffled = table.choice("order", ("file", "random"), "file") == "random"
    return Trace(DataFile(table.text("file"), folders), is_shuffled)


@functools.lru_cache(maxsize=4)
def _sorted_rows(file: DataFile, version: FileVersion) -> Sequence[TraceRow]:
    """The rows in order. A file is read once for as long as it does not change, since a search for a rate draws from it
    many times."""
    rows = [_parse(row, file, line) for line, row in file.rows()]
    if not rows:
        raise ConfigError(f"The data file '{file.name}' has no rows.")
    return sorted(rows, key=lambda row: row.arrival_s or 0.0)


def _again(row: TraceRow, added: int) -> TraceRow:
    if not added or row.block_ids is None:
        return row
    moved = tuple(block_id + added for block_id in row.block_ids)
    return TraceRow(row.arrival_s, row.num_input_tokens, row.num_output_tokens, moved)


def _parse(row: Row, file: DataFile, line: int) -> TraceRow:
    if "hash_ids" in row or "timestamp" in row:
        return _parse_mooncake(row, file, line)
    if "ContextTokens" in row or "GeneratedTokens" in row:
        return _parse_azure(row, file, line)
    known = [name for name in ("arrival_s", "input_tokens", "output_tokens") if name in row]
    if not known:
        has = ", ".join(str(key) for key in row if key is not None) or "nothing"
        raise file.fail(line, f"none of arrival_s, input_tokens and output_tokens is there; it has {has}")
    arrival_s = number_of(row, "arrival_s", file=file, line=line) if "arrival_s" in known else None
    num_in, num_out = (
        _length(row, name, file, line) if name in known else None for name in ("input_tokens", "output_tokens")
    )
    return TraceRow(arrival_s, num_in, num_out)


def _parse_mooncake(row: Row, file: DataFile, line: int) -> TraceRow:
    ids = field_of(row, "hash_ids", file=file, line=line)
    if not isinstance(ids, list) or not ids or not all(type(block) is int and block >= 0 for block in ids):
        raise file.fail(line, "hash_ids must be a list of whole numbers, none negative, at least one")
    arrival_ms = number_of(row, "timestamp", file=file, line=line, most=1e3 * MOST)
    num_in, num_out = (_length(row, name, file, line) for name in ("input_length", "output_length"))
    return TraceRow(arrival_ms / 1e3, num_in, num_out, tuple(ids))


def _parse_azure(row: Row, file: DataFile, line: int) -> TraceRow:
    text = str(field_of(row, "TIMESTAMP", file=file, line=line))
    try:
        at = datetime.fromisoformat(text.strip())
    except ValueError:
        raise file.fail(
            line, f"TIMESTAMP must be a date and a time such as 2023-11-16 18:17:03.98, not '{text}'"
        ) from None
    num_in, num_out = (_length(row, name, file, line) for name in ("ContextTokens", "GeneratedTokens"))
    return TraceRow((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp(), num_in, num_out)


def _length(row: Row, name: str, file: DataFile, line: int) -> int:
    return max(1, round(number_of(row, name, file=file, line=line, most=MOST_TOKENS)))


class Arrivals(Protocol):
    def times(self, count: int, rng: random.Random, *, rate: float | None, per_arrival: float) -> list[float]:
        """The times of `count` arrivals from 0 on, in order. `rate` overrides the workload's own; each arrival brings
        `per_arrival` requests."""


@dataclass(frozen=True)
class AtOnce:
    """All requests are there from the start. With a rate from outside, arrivals are Poisson instead."""

    def times(self, count: int, rng: random.Random, *, rate: float | None, per_arrival: float) -> list[float]:
        return [0.0] * count if rate is None else Gamma(rate).times(count, rng, rate=None, per_arrival=per_arrival)


@dataclass(frozen=True)
class Gamma:
    """Independent gaps. With a coefficient of variation of 1 they are exponential (Poisson); above it, bursts."""

    rate: float
    cv: float = 1.0

    def times(self, count: int, rng: random.Random, *, rate: float | None, per_arrival: float) -> list[float]:
        mean_s = per_arrival / (rate or self.rate)
        gaps = [self._gap(rng) * mean_s for _ in range(count - 1)]
        return list(itertools.accumulate(gaps, initial=0.0))[:count]

    def _gap(self, rng: random.Random) -> float:
        if self.cv < _LEAST_CV:
            return 1.0
        return rng.gammavariate(1 / self.cv**2, self.cv**2)


@dataclass(frozen=True)
class Recorded:
    """The times of a trace, with the first at 0. After its end it begins again."""

    trace: Trace
    speedup: float = 1.0
    rate: float | None = None
    """The mean rate to which the times are stretched."""

    def times(self, count: int, rng: random.Random, *, rate: float | None, per_arrival: float) -> list[float]:
        recorded = [row.arrival_s for row in self.trace.read() if row.arrival_s is not None]
        if not recorded:
            raise ConfigError(f"The data file '{self.trace.file.name}' has no arrival times: choose other arrivals.")
        period = _period(recorded)
        times = [
            recorded[place % len(recorded)] - recorded[0] + place // len(recorded) * period for place in range(count)
        ]
        wanted = rate or self.rate
        if wanted is None or not times[-1]:
            return [time / self.speedup for time in times]
        factor = (count - 1) * per_arrival / wanted / times[-1]
        return [time * factor for time in times]


def _period(recorded: list[float]) -> float:
    """The time from the first arrival to that of the trace's repetition, which comes one mean gap after the last."""
    span = recorded[-1] - recorded[0]
    return span + span / max(1, len(recorded) - 1)


def read_arrivals(table: OptionsTable, trace: Trace | None, folders: tuple[Path, ...]) -> Arrivals:
    """Read the table `[arrivals]`."""
    kind = table.choice("kind", KINDS)
    if kind == "at_once":
        table.only("kind")
        return AtOnce()
    if kind == "poisson":
        return Gamma(table.only("kind", "rate").number("rate", most=RATES.most))
    if kind == "gamma":
        table.only("kind", "rate", "cv")
        return Gamma(table.number("rate", most=RATES.most), table.number("cv", is_above=False, most=_MOST_CV))
    table.only("kind", "file", "speedup", "rate")
    if "speedup" in table and "rate" in table:
        table.fail("either 'speedup' or 'rate' stretches a trace, not both")
    source = Trace(DataFile(table.text("file"), folders)) if "file" in table else trace
    if source is None:
        table.fail("arrivals of a trace need its 'file', here or in a table [trace]")
    if source.is_shuffled:
        table.fail("rows in random order (trace.order) have no times to arrive at")
    rate = table.number("rate", most=RATES.most) if "rate" in table else None
    return Recorded(source, table.number("speedup", 1.0), rate)


def check_rate(rate: float | None) -> float | None:
    """Check a rate from outside; None if there is none."""
    if rate is not None and not (0 < rate <= RATES.most or rate == math.inf):
        raise ConfigError(
            f"A rate must be above 0 requests/s and at most {RATES.most:,.0f}, or infinite; not {rate:,.10g}."
        )
    return rate


def check_times(times: Sequence[float]) -> None:
    """`ConfigError` for times of arrival that are too far apart to be simulated to the microsecond."""
    if not all(0.0 <= time <= MOST_SECONDS for time in times):
        raise ConfigError(
            f"The last request would come {max(times):.3g} s after the first, and {MOST_SECONDS:,.0f} s (31 years) is "
            "the most: take a higher rate, or fewer requests."
        )
