"""When requests come.

A rate counts requests per second. Where a request brings others after it (the turns of a conversation), only its first
is an arrival, and arrivals are so much rarer that the rate comes out. Gaps are drawn for a rate of one and then
stretched, so that one seed gives the same pattern at every rate.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headway.errors import ConfigError
from headway.lab.workload.data_file import DataFile
from headway.lab.workload.options_table import OptionsTable
from headway.lab.workload.trace_rows import Trace

KINDS = ("at_once", "poisson", "gamma", "trace")


class Arrivals(Protocol):
    """A kind of traffic."""

    def times(self, count: int, rng: random.Random, *, rate: float | None, per_arrival: float) -> list[float]:
        """So many times from 0 on, in order. `rate` overrides the workload's own; each arrival brings `per_arrival`
        requests."""


@dataclass(frozen=True)
class AtOnce:
    """All are there from the start. With a rate from outside: as Poisson."""

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
        if self.cv == 0:
            return 1.0
        return rng.gammavariate(1 / self.cv**2, self.cv**2)


@dataclass(frozen=True)
class Recorded:
    """The times of a trace, the first one at 0. Past its end it begins again."""

    trace: Trace
    speedup: float = 1.0
    rate: float | None = None
    """Stretched to this mean rate instead."""

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
    """From its first arrival to that of its repetition: one mean gap after its last."""
    span = recorded[-1] - recorded[0]
    return span + span / max(1, len(recorded) - 1)


def read_arrivals(table: OptionsTable, trace: Trace | None, folders: tuple[Path, ...]) -> Arrivals:
    """From the table `[arrivals]`."""
    kind = table.choice("kind", KINDS)
    if kind == "at_once":
        table.only("kind")
        return AtOnce()
    if kind == "poisson":
        return Gamma(table.only("kind", "rate").number("rate"))
    if kind == "gamma":
        table.only("kind", "rate", "cv")
        return Gamma(table.number("rate"), table.number("cv", is_above=False))
    table.only("kind", "file", "speedup", "rate")
    if "speedup" in table and "rate" in table:
        table.fail("either 'speedup' or 'rate' stretches a trace, not both")
    source = Trace(DataFile(table.text("file"), folders)) if "file" in table else trace
    if source is None:
        table.fail("arrivals of a trace need its 'file', here or in a table [trace]")
    if source.is_shuffled:
        table.fail("rows in random order (trace.order) have no times to arrive at")
    return Recorded(source, table.number("speedup", 1.0), table.number("rate") if "rate" in table else None)


def check_rate(rate: float | None) -> float | None:
    """A rate from outside; None where there is none."""
    if rate is not None and not (rate > 0 and not math.isnan(rate)):
        raise ConfigError(f"A rate must be above 0 requests/s, not {rate:g}.")
    return rate
