"""One candidate, simulated: its options, what came of it, and how good that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.lab.bench.online_metrics import OnlineMetrics
from headway.lab.sim.setup import set_up
from headway.lab.sim.simulate import simulate
from headway.lab.tune.objective import Goal, Score
from headway.lab.tune.space import Space
from headway.lab.workload.requests import BenchRequest


@dataclass(frozen=True)
class Trial:
    """Options and their score."""

    options: Mapping[str, Any]
    metrics: OnlineMetrics
    score: Score
    num_requests: int
    """Of the work's; fewer are tried first."""


@dataclass(frozen=True)
class Tuned:
    """What a search found."""

    default: Trial
    chosen: Trial
    """The best, with as many options as by default as that allows."""
    trials: Sequence[Trial]
    """All that were tried with the whole work, the best first; the default is among them."""
    num_simulated: int
    """Simulations, those of a part of the work included."""

    @property
    def best(self) -> Trial:
        """The default, unless another one is clearly better."""
        return self.chosen if self.chosen.score.is_better_than(self.default.score) else self.default

    @property
    def is_default_best(self) -> bool:
        """Whether there is nothing to recommend."""
        return self.best is self.default

    @property
    def distinct(self) -> list[Trial]:
        """The best first, without those whose options did the same to the last request as fewer of them did."""
        kept = [self.chosen]
        for trial in self.trials:
            if all(trial.metrics != other.metrics for other in kept):
                kept.append(trial)
        return kept

    @property
    def front(self) -> list[Trial]:
        """Trials that no other beats in both throughput and P99 of the time between tokens, by throughput."""
        front: list[Trial] = []
        for trial in sorted(self.trials, key=lambda t: (-t.metrics.output_tok_s, _p99(t))):
            if not front or _p99(trial) < _p99(front[-1]):
                front.append(trial)
        return front[::-1]


def simulate_trial(
    space: Space, goal: Goal, options: Mapping[str, Any], work: Sequence[BenchRequest], *, seed: int | None = 0
) -> Trial:
    """The same seed for all: they are compared under the same luck."""
    setup = set_up(space.calibration, {**space.fixed, **options})
    result = simulate(work, setup.machine, setup.scheduler, setup.cache, seed=seed)
    metrics = OnlineMetrics.of(result.timelines, result.duration_s)
    return Trial(dict(options), metrics, goal.score(result.timelines, metrics), len(work))


def _p99(trial: Trial) -> float:
    return trial.metrics.itl.percentiles[99]
