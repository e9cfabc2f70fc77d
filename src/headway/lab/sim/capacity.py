"""How much a machine can serve at most, and whether a load is more than that.

A run of some hundred requests does not tell by itself: its last answers take their time whatever the load. So the same
requests are simulated once more, all at once and as often as fills the batch several times over, and what is served
while the batch is full is the capacity.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headway.lab.bench.online_metrics import OnlineMetrics
from headway.lab.bench.times import percentile
from headway.lab.sim.calibration import Calibration
from headway.lab.sim.setup import set_up
from headway.lab.sim.simulate import simulate
from headway.lab.workload.requests import BenchRequest, Work

_FULL_BATCHES = 4
_KEEPS_UP = 0.95
"""A run that serves this part of what comes needs no closer look."""


@dataclass(frozen=True)
class Overload:
    """A load beyond capacity."""

    offered: float
    """Requests that came each second."""
    served: float
    """Of the whole run."""
    capacity: float
    """What a full batch serves."""

    def __str__(self) -> str:
        return f"{self.offered:.3g}/s offered, {self.served:.3g}/s served (about {self.capacity:.3g}/s can be)"


BEYOND = "The longer a load beyond capacity lasts, the longer its requests wait: latencies tell the length of the run."


def overload(metrics: OnlineMetrics, capacity_of_all: Callable[[], float]) -> Overload | None:
    """If requests came faster than they can be served. Who kept up is not asked for the capacity."""
    offered = metrics.offered_s
    if offered is None or metrics.requests_s >= _KEEPS_UP * offered:
        return None
    most = capacity_of_all()
    return Overload(offered, metrics.requests_s, most) if offered > most else None


def capacity(work: Work, calibration: Calibration, options: Mapping[str, Any]) -> float:
    """Requests each second that one machine serves while its batch is full, in order of arrival: an order that lets
    short ones go first would only show that these are quick."""
    setup = set_up(calibration, {**options, "scheduling_policy": "fcfs"})
    num_seqs = setup.scheduler.limits.max_num_seqs
    crowd = _crowd(work, max(_FULL_BATCHES * num_seqs, len(work)))
    timelines = simulate(crowd, setup.machine, setup.scheduler, setup.cache).timelines
    begun = [timeline.token_times_s[0] for timeline in timelines]
    from_s, to_s = percentile(begun, 25), max(begun)  # the batch has filled; the last one has got its place
    ended = [timeline.token_times_s[-1] for timeline in timelines]
    num_ended = sum(from_s < end_s <= to_s for end_s in ended)
    return num_ended / (to_s - from_s) if num_ended and to_s > from_s else len(timelines) / max(ended)


def _crowd(work: Work, number: int) -> list[BenchRequest]:
    """So many of these requests, all at once, again and again from the first; each round has its own prefixes."""
    crowd = []
    for place, request in enumerate(itertools.islice(itertools.cycle(work), number)):
        salt = f"{place // len(work)}/{request.options.cache_salt or ''}"
        options = dataclasses.replace(request.options, cache_salt=salt)
        crowd.append(dataclasses.replace(request, arrival_s=0.0, think_s=0.0, after=None, options=options))
    return crowd
