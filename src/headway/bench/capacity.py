"""The highest rate of requests that still meets its objectives.

A rate that meets them is doubled until one does not (or the first is halved until one does), and the gap between the
two is then halved, in ratio, until it is small. This supposes that what a rate meets, every lower one meets too; where
chance has a say that is true only nearly, so every probe is kept for people to look at.

Who measures is none of this module's business: a probe is any function from a rate to metrics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headway.bench.objectives import Objective, missed
from headway.bench.online_metrics import OnlineMetrics

Measure = Callable[[float], OnlineMetrics]
"""Requests a second → what came of them."""


@dataclass(frozen=True)
class Probe:
    """One rate, tried."""

    rate: float
    metrics: OnlineMetrics
    missed: Sequence[Objective]

    @property
    def is_met(self) -> bool:
        """Requests that were lost are a miss, whatever the latencies of the others."""
        return not self.missed and self.metrics.num_lost == 0


@dataclass(frozen=True)
class Limits:
    """How far, how long and how exactly to search."""

    start: float = 1.0
    lowest: float = 0.01
    highest: float = 10_000.0
    precision: float = 0.05
    """The search ends when the lowest rate that misses is at most this part above the highest that meets."""
    max_probes: int = 20


@dataclass(frozen=True)
class Capacity:
    """What the search found."""

    rate: float | None
    """The highest rate that met the objectives; `None` if none did."""
    first_miss: float | None
    """The lowest that did not; `None` if all did."""
    probes: Sequence[Probe]

    @property
    def best(self) -> Probe | None:
        """The probe at that rate."""
        return next((probe for probe in self.probes if probe.is_met and probe.rate == self.rate), None)


def find_capacity(
    measure: Measure,
    objectives: Sequence[Objective],
    *,
    limits: Limits | None = None,
    on_probe: Callable[[Probe], object] = lambda probe: None,
) -> Capacity:
    """Search. `on_probe` hears of every probe as it ends."""
    search = _Search(measure, objectives, limits or Limits(), on_probe)
    search.bracket()
    search.narrow()
    return Capacity(search.low, search.high, search.probes)


class _Search:
    def __init__(
        self,
        measure: Measure,
        objectives: Sequence[Objective],
        limits: Limits,
        on_probe: Callable[[Probe], object],
    ) -> None:
        self.low: float | None = None
        self.high: float | None = None
        self.probes: list[Probe] = []
        self._measure = measure
        self._objectives = objectives
        self._limits = limits
        self._on_probe = on_probe

    def bracket(self) -> None:
        """Find a rate that meets, and one that does not."""
        limits = self._limits
        rate = min(max(limits.start, limits.lowest), limits.highest)
        while self._may_go_on:
            self._try(rate)
            if self.low is not None and self.high is not None:
                return
            if (rate == limits.highest and self.high is None) or (rate == limits.lowest and self.low is None):
                return
            rate = min(rate * 2, limits.highest) if self.high is None else max(rate / 2, limits.lowest)

    def narrow(self) -> None:
        """Halve the gap between the two."""
        while self.low is not None and self.high is not None and self._may_go_on:
            if self.high / self.low <= 1 + self._limits.precision:
                return
            self._try(math.sqrt(self.low * self.high))

    @property
    def _may_go_on(self) -> bool:
        return len(self.probes) < self._limits.max_probes

    def _try(self, rate: float) -> None:
        metrics = self._measure(rate)
        probe = Probe(rate, metrics, missed(self._objectives, metrics.as_json()))
        self.probes.append(probe)
        if probe.is_met:
            self.low = rate
        else:
            self.high = rate
        self._on_probe(probe)
