"""The highest rate of requests that still meets its objectives.

A rate that meets them is doubled until one does not (or the first is halved until one does), and the gap between the
two is then halved, in ratio, until it is small. This assumes that every rate below one that meets the objectives meets
them too. With random arrivals that is only nearly true, so every probe is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headway_lab.bench.online_metrics import Objective, OnlineMetrics, missed

Measure = Callable[[float], OnlineMetrics]
"""Requests a second → the metrics of a run at this rate."""


@dataclass(frozen=True)
class Probe:
    """A rate that was tried."""

    rate: float
    metrics: OnlineMetrics
    missed: Sequence[Objective]

    @property
    def is_met(self) -> bool:
        """Whether the objectives are met. A lost request is a miss, even if the latencies of the others meet theirs."""
        return not self.missed and self.metrics.num_lost == 0


@dataclass(frozen=True)
class Limits:
    """Limits of the rates, the time and the precision of a search."""

    start: float = 1.0
    lowest: float = 0.01
    highest: float = 10_000.0
    precision: float = 0.05
    """The search ends when the lowest rate that misses is at most this part above the highest that meets."""
    max_probes: int = 20
    max_seconds: float = math.inf
    """No probe begins whose expected end is later than this."""


@dataclass(frozen=True)
class Capacity:
    """What the search found."""

    rate: float | None
    """The highest rate that met the objectives; `None` if none did."""
    first_miss: float | None
    """The lowest rate that did not meet them; `None` if all did."""
    probes: Sequence[Probe]
    is_cut: bool = False
    """Whether time or probes ran out before the answer was as exact as wanted."""

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
    seconds_at: Callable[[float], float] = lambda rate: 0.0,
    elapsed_s: Callable[[], float] = lambda: 0.0,
) -> Capacity:
    """Search for the capacity. `on_probe` is called with every probe as it ends. If time is limited, `seconds_at` gives
    the expected seconds of a probe at a rate, and `elapsed_s` the time used so far."""
    search = _Search(measure, objectives, limits or Limits(), on_probe, seconds_at, elapsed_s)
    search.bracket()
    search.narrow()
    return Capacity(search.low, search.high, search.probes, search.is_cut)


class _Search:
    def __init__(
        self,
        measure: Measure,
        objectives: Sequence[Objective],
        limits: Limits,
        on_probe: Callable[[Probe], object],
        seconds_at: Callable[[float], float],
        elapsed_s: Callable[[], float],
    ) -> None:
        self.low: float | None = None
        self.high: float | None = None
        self.probes: list[Probe] = []
        self.is_cut = False
        self._measure = measure
        self._objectives = objectives
        self._limits = limits
        self._on_probe = on_probe
        self._seconds_at = seconds_at
        self._elapsed_s = elapsed_s

    def bracket(self) -> None:
        """Find a rate that meets, and one that does not."""
        limits = self._limits
        rate = min(max(limits.start, limits.lowest), limits.highest)
        while self._may_try(rate):
            self._try(rate)
            if self.low is not None and self.high is not None:
                return
            if (rate == limits.highest and self.high is None) or (rate == limits.lowest and self.low is None):
                return
            rate = min(rate * 2, limits.highest) if self.high is None else max(rate / 2, limits.lowest)

    def narrow(self) -> None:
        """Halve the gap between the two."""
        while self.low is not None and self.high is not None:
            rate = math.sqrt(self.low * self.high)
            if self.high / self.low <= 1 + self._limits.precision or not self._may_try(rate):
                return
            self._try(rate)

    def _may_try(self, rate: float) -> bool:
        """Whether there is time for a probe at this rate. The first probe is always allowed, since there is no answer
        without it."""
        limits = self._limits
        has_time = not self.probes or self._elapsed_s() + self._seconds_at(rate) <= limits.max_seconds
        self.is_cut = len(self.probes) >= limits.max_probes or not has_time
        return not self.is_cut

    def _try(self, rate: float) -> None:
        metrics = self._measure(rate)
        probe = Probe(rate, metrics, missed(self._objectives, metrics.as_json()))
        self.probes.append(probe)
        if probe.is_met:
            self.low = rate
        else:
            self.high = rate
        self._on_probe(probe)
