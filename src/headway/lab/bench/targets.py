"""Whom a load is put on: a server somewhere, or the engine in this process. Either gives the same kind of outcome."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headway.lab.bench.batch_samples import BatchSample
from headway.lab.bench.datasets import Dataset, Draw
from headway.lab.bench.online_metrics import SHOWN_PERCENTILES, OnlineMetrics
from headway.lab.bench.rounds import Progress
from headway.lab.bench.served import ServedRequest
from headway.lab.bench.slo import Targets, own_targets
from headway.lab.bench.times import RequestTimeline


@dataclass(frozen=True)
class Outcome:
    """What came of a load."""

    metrics: OnlineMetrics
    timelines: Sequence[RequestTimeline]
    samples: Sequence[BatchSample] = ()
    errors: Sequence[str] = ()
    late_s: float = 0.0
    """How late requests were sent (99th percentile): what the load generator itself adds to latencies."""
    num_short: int = 0
    """Answers with another number of tokens than asked for."""


@dataclass(frozen=True)
class Judging:
    """How an outcome is summed up."""

    targets: Targets | None = None
    """For every request. `None`: those that requests bring along, if they do."""
    percents: Sequence[float] = SHOWN_PERCENTILES

    def metrics(
        self, work: Sequence[ServedRequest], timelines: Sequence[RequestTimeline], duration_s: float
    ) -> OnlineMetrics:
        """Of a run of this work."""
        targets = self.targets or own_targets([request.options for request in work])
        return OnlineMetrics.of(timelines, duration_s, targets=targets, percents=self.percents)


class Target(Protocol):
    """Something that answers requests."""

    name: str

    @property
    def machine(self) -> str:
        """For people."""
        ...

    def draw(self, dataset: Dataset, wanted: Draw) -> list[ServedRequest]:
        """Requests that it can take; vocabulary and tokenizer are its own."""
        ...

    def run(self, work: Sequence[ServedRequest], progress: Progress | None = None) -> Outcome:
        """Put a load on it and wait for all answers."""
        ...

    def close(self) -> None:
        """Give back what it holds; it is not used again."""
        ...


def alike(work: Sequence[ServedRequest], number: int) -> list[ServedRequest]:
    """Requests like the first ones, all at once; their contents are others, or the prefix cache would know the measured
    ones."""
    rng = random.Random("warm-up")
    return [_like(work[place % len(work)], rng) for place in range(number)]


def _like(request: ServedRequest, rng: random.Random) -> ServedRequest:
    """At once, of the same length, with other contents."""
    if isinstance(request.prompt, str):
        return ServedRequest(f"{rng.getrandbits(32):x} {request.prompt}", request.num_output_tokens)
    highest = max(request.prompt, default=0)
    return ServedRequest([rng.randint(0, highest) for _ in request.prompt], request.num_output_tokens)
