"""The goal of tuning: goodput, which is the rate of requests that kept their promises, and among equals shorter tails.

Promises are bounds on keys of a result, such as p99_itl_ms=50 or p99_ttft_ms=1000. They bound a single request's time
to first token, its mean time per token, or the 99th percentile of the gaps between its own tokens. If none are given,
the promises of the workload's classes count, as in `headway sim`. A request that gets all of them is good. Without any
promises every request is good, and goodput is throughput.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from headway.errors import ConfigError
from headway_lab.bench.online_metrics import Objective, OnlineMetrics, parse_objective
from headway_lab.bench.slo_targets import Targets, attainment, own_targets, targets_note
from headway_lab.bench.timelines import RequestTimeline, percentile
from headway_lab.workload.bench_requests import BenchRequest

SAME_GOODPUT = 0.005
"""Goodputs that differ by less than this share are equal: if all requests are in time, their number per second means
nothing."""
SHORTER_TAIL = 0.02
"""Tails that differ by less than this share are equal."""

_KEY = re.compile(r"(?P<what>mean|median|max|p(?P<percent>\d+(\.\d+)?))_(?P<name>ttft|tpot|itl|e2el)_ms")


@dataclass(frozen=True)
class Goal:
    """What requests are promised."""

    objectives: Sequence[Objective] = ()
    """Promises to every request."""
    targets: Sequence[Targets] | None = None
    """The targets of each request, in the order of the work, if there are no objectives."""
    told: str = ""
    """The targets as text for people."""

    @staticmethod
    def of(texts: Sequence[str], work: Sequence[BenchRequest]) -> Goal:
        """A goal of the given promises, or else of those that the work's classes make."""
        if texts:
            return Goal.parse(texts)
        options = [request.options for request in work]
        targets = own_targets(options)
        return Goal() if targets is None else Goal(targets=targets, told=targets_note(None, options))

    @staticmethod
    def parse(texts: Sequence[str]) -> Goal:
        """Read `KEY=BOUND`s; `ConfigError` for a key that cannot be promised to a request."""
        objectives = [parse_objective(text) for text in texts]
        for objective in objectives:
            if _KEY.fullmatch(objective.key) is None:
                raise ConfigError(
                    f"--slo {objective.key}: what is promised is a latency, such as p99_itl_ms, p99_ttft_ms, "
                    "mean_tpot_ms or p95_e2el_ms."
                )
        return Goal(objectives)

    def is_good(self, timeline: RequestTimeline) -> bool:
        """Whether a request got everything that is promised to every request."""
        return timeline.is_complete and all(_kept(timeline, objective) for objective in self.objectives)

    def score(self, timelines: Sequence[RequestTimeline], metrics: OnlineMetrics) -> Score:
        """The score of a run of the work, or of its beginning."""
        if self.targets is not None:
            return self._score_by_class(timelines, self.targets[: len(timelines)], metrics)
        num_good = sum(self.is_good(timeline) for timeline in timelines)
        result = metrics.as_json()
        tails = [(result.get(o.key) or math.inf) / o.bound for o in self.objectives]
        tail = max(tails) if tails else metrics.itl.percentiles[99]
        missed = sum(not objective.is_met(result) for objective in self.objectives)
        return Score(num_good / metrics.duration_s, num_good / max(len(timelines), 1), tail, missed)

    @property
    def is_empty(self) -> bool:
        """Whether there are no promises."""
        return not self.objectives and self.targets is None

    def missed_by(self, score: Score, metrics: OnlineMetrics) -> str:
        """A text on the promises that a run of the work missed, and by how much; empty if it kept all."""
        if self.targets is not None:
            missed = f"the P99 of requests' largest latency is {score.tail:.3g} times its target"
            return "" if score.is_kept else missed
        result = metrics.as_json()
        values = {o: result.get(o.key) for o in self.objectives if not o.is_met(result)}
        return ", ".join(
            f"{objective.key} is not there" if value is None else _times(objective, value)
            for objective, value in values.items()
        )

    def _score_by_class(
        self, timelines: Sequence[RequestTimeline], targets: Sequence[Targets], metrics: OnlineMetrics
    ) -> Score:
        met = attainment(timelines, targets)
        worst = [own.worst(timeline) for timeline, own in zip(timelines, targets, strict=True)]
        tail = percentile([ratio for ratio in worst if ratio is not None], 99)
        return Score(met.num_met / metrics.duration_s, met.share, tail, int(tail > 1))

    def __str__(self) -> str:
        if self.targets is not None:
            return self.told
        promised = ", ".join(map(str, self.objectives))
        if promised:
            return f"Targets, of every request (--slo): {promised}."
        return "No targets: neither does the work promise any, nor does --slo. As many requests a second as possible."


@dataclass(frozen=True)
class Score:
    goodput: float
    """Good requests each second."""
    good_share: float
    tail: float
    """The largest promised key, as a multiple of its bound. If classes have the promises, the 99th percentile of each
    request's own such multiple; without promises, that of the time between tokens, in milliseconds."""
    num_missed: int = 0
    """Promised keys whose value over all requests is above the bound."""
    is_at_limit: bool = False
    """Whether the load was the highest that keeps the promises. The tail is at its bound then, and says nothing."""

    @property
    def is_kept(self) -> bool:
        """Whether all promised keys are within their bounds."""
        return self.num_missed == 0

    def is_better_than(self, other: Score) -> bool:
        """Whether the goodput is better by more than `SAME_GOODPUT`, or is about equal and the tail shorter by more
        than `SHORTER_TAIL`."""
        if self.goodput > (1 + SAME_GOODPUT) * other.goodput:
            return True
        if self.is_at_limit:
            return False
        return self.goodput >= (1 - SAME_GOODPUT) * other.goodput and self.tail < (1 - SHORTER_TAIL) * other.tail


def _times(objective: Objective, value: float) -> str:
    return f"{objective.key} is {value:,.4g}, {value / objective.bound:.3g} times its bound of {objective.bound:,.4g}"


def _kept(timeline: RequestTimeline, objective: Objective) -> bool:
    found = _KEY.fullmatch(objective.key)
    assert found is not None
    if found["name"] == "ttft":
        value_s: float | None = timeline.ttft_s
    elif found["name"] == "e2el":
        value_s = timeline.e2e_s
    elif found["name"] == "tpot" or found["what"] == "mean":
        value_s = timeline.tpot_s
    else:
        value_s = _gap(timeline, found["what"], found["percent"])
    return value_s is None or 1e3 * value_s <= objective.bound


def _gap(timeline: RequestTimeline, what: str, percent: str | None) -> float | None:
    gaps = timeline.itls_s
    if not gaps:
        return None
    if what == "max":
        return max(gaps)
    return percentile(gaps, 50.0 if percent is None else float(percent))
