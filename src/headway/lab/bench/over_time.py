"""A run over time: how many requests came and were on their way, and how many tokens came each second."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from headway.lab.bench.times import RequestTimeline

NUM_BUCKETS = 50
"""Of a curve of rates, about."""


@dataclass(frozen=True)
class Curve:
    """Values at times, in seconds after the start of the run."""

    xs: Sequence[float]
    ys: Sequence[float]

    @property
    def peak(self) -> float:
        return max(self.ys, default=0.0)


def in_flight(timelines: Sequence[RequestTimeline]) -> Curve:
    """Requests that had arrived and not ended; it changes at the times given. One that never began or ended is not in
    it."""
    changes: Counter[float] = Counter()
    for timeline in timelines:
        end_s = timeline.end_s
        if end_s is not None:
            changes[timeline.arrival_s] += 1
            changes[end_s] -= 1
    xs, ys, count = [], [], 0
    for at_s in sorted(changes):
        count += changes[at_s]
        xs.append(at_s)
        ys.append(float(count))
    return Curve(xs, ys)


def offered_rate(timelines: Sequence[RequestTimeline]) -> float | None:
    """Requests a second from the first arrival to the last; `None` if all were there at once."""
    arrivals = [timeline.arrival_s for timeline in timelines]
    span_s = max(arrivals, default=0.0) - min(arrivals, default=0.0)
    return (len(arrivals) - 1) / span_s if span_s > 0 else None


def token_rate(timelines: Sequence[RequestTimeline], bucket_s: float) -> Curve:
    """Output tokens a second, over buckets of so many seconds; each stands at its middle."""
    tokens: defaultdict[int, float] = defaultdict(float)
    for timeline in timelines:
        weight = timeline.tokens_per_event
        for at_s in timeline.token_times_s:
            tokens[int(at_s / bucket_s)] += weight
    buckets = range(max(tokens, default=-1) + 1)
    rates = [tokens.get(bucket, 0.0) / bucket_s for bucket in buckets]
    return Curve([(bucket + 0.5) * bucket_s for bucket in buckets], rates)


def bucket_for(duration_s: float) -> float:
    """A round length of buckets that makes a readable curve of so long a run: 1, 2 or 5 times a power of ten."""
    least_s = max(duration_s / NUM_BUCKETS, 1e-6)
    power = 10.0 ** math.floor(math.log10(least_s))
    return power * next(factor for factor in (1, 2, 5, 10) if factor * power >= least_s * (1 - 1e-9))
