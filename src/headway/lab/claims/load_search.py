"""How much a place can take: all at once, or under a bound on latency."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from headway.lab.bench.capacity_search import Capacity, Limits, find_capacity
from headway.lab.bench.online_metrics import Objective, OnlineMetrics
from headway.lab.claims.context import Context
from headway.lab.claims.place import Run
from headway.lab.claims.works import Drawn

NORMALISED = "median_normalised_ms"
"""Median over requests of the time from arrival to the last token, over the number of tokens."""


@dataclass(frozen=True)
class NormalisedMetrics(OnlineMetrics):
    """With the latency that the Orca paper compares by."""

    normalised_ms: float = 0.0

    @classmethod
    def of_run(cls, run: Run) -> NormalisedMetrics:
        """Sum up a run."""
        usual = {item.name: getattr(run.metrics, item.name) for item in fields(OnlineMetrics)}
        return cls(**usual, normalised_ms=1e3 * statistics.median(run.per_token_s))

    def as_json(self) -> dict[str, float | None]:
        """The usual keys and that one."""
        return {**super().as_json(), NORMALISED: self.normalised_ms}


@dataclass(frozen=True)
class Span:
    """How long requests arrive at each rate that is tried, and how many there are at least and at most."""

    seconds: float
    least: int
    most: int

    def count(self, rate: float) -> int:
        """At this rate."""
        return int(min(max(rate * self.seconds, self.least), self.most))


def saturation(context: Context, label: str, drawn: Drawn, **options: Any) -> float:
    """Requests a second when all of them are there at once."""
    return context.run(f"{label}, all at once", drawn.at_once(), **options).requests_s


def capacity_of(
    context: Context,
    label: str,
    drawn: Drawn,
    objectives: Sequence[Objective],
    *,
    start: float,
    span: Span,
    **options: Any,
) -> Capacity:
    """The highest rate that meets the objectives."""

    def measure(rate: float) -> OnlineMetrics:
        work = drawn.at_rate(rate, span.count(rate))
        return NormalisedMetrics.of_run(context.run(f"{label}, {rate:.3g} requests/s", work, **options))

    precision = 0.1 if context.is_quick else 0.05
    limits = Limits(start=start, lowest=start / 256, highest=start * 64, precision=precision, max_probes=14)
    return find_capacity(measure, objectives, limits=limits)
