"""The highest rate of requests at which replicas keep their promises, by a few simulations.

The tail is the largest promised latency as a multiple of its bound, and it grows with the rate. Two rates whose tails
are near 1 are enough to say where it crosses 1: between them its logarithm is taken to be a line in that of the rate.
No rate above the capacity counts, since a short run there keeps promises that a longer one breaks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headway.core.step_work import StepWork
from headway_lab.sim.setup import set_up
from headway_lab.sim.sim_comparison import capacity
from headway_lab.size.deployment import Deployment
from headway_lab.tune import Goal, Space, Trial
from headway_lab.tune.tune_search import simulate_trial
from headway_lab.workload.bench_requests import BenchRequest


@dataclass(frozen=True)
class _Steps:
    """How the next rate is chosen."""

    least: float = 1.12
    most: float = 2.0
    """The next rate that is tried is at least, and at most, so many times the one before, or as much lower."""
    near: float = 0.02
    """Rates that differ by less than this share need no further simulation."""
    least_tail: float = 1e-3
    most_tail: float = 1e3
    """Tails beyond these say nothing more."""
    apart_s: float = 1e4
    """Seconds between requests that have a replica to themselves."""


_STEPS = _Steps()
ROUTER = "prefix-aware"

Changes = Mapping[str, Any]


@dataclass(frozen=True)
class Load:
    """Requests of one kind, which can be drawn at any rate."""

    draw: Callable[[int, float], list[BenchRequest]]
    """(number, requests a second) → the requests"""
    promises: Sequence[str]
    """Objectives in the form of `--slo`; none: those of the work's classes."""

    def goal(self, work: Sequence[BenchRequest]) -> Goal:
        return Goal.of(self.promises, work)


@dataclass(frozen=True)
class Promised:
    """A load on one kind of replica."""

    load: Load
    deployment: Deployment
    changes: Changes = field(default_factory=dict)
    """Options of the engine that differ from the calibrated ones."""

    def with_changes(self, changes: Changes) -> Promised:
        return replace(self, changes=dict(changes))

    def space(self, work: Sequence[BenchRequest], num_replicas: int = 1) -> Space:
        """What tune searches here."""
        deployment = self.deployment
        return Space.of(
            deployment.calibration,
            work,
            deployment.simulated_options,
            num_replicas=num_replicas,
            routers=(ROUTER,),
            link=deployment.link,
            price_per_hour=1.0,  # so that the time of steps is divided between prompts and answers
        )

    def trial(self, rate: float, number: int, num_replicas: int = 1) -> Trial:
        """Simulate so many requests at this rate, on all replicas together."""
        work = self.load.draw(number, rate)
        space = self.space(work, num_replicas)
        return simulate_trial(space, self.load.goal(work), {**space.default, **self.changes}, work)

    def alone(self, number: int) -> Trial:
        """Simulate requests that have a replica to themselves, one after the other."""
        work = [
            replace(request, arrival_s=_STEPS.apart_s * place, after=None, think_s=0.0)
            for place, request in enumerate(self.load.draw(number, 1.0))
        ]
        space = self.space(work)
        return simulate_trial(space, self.load.goal(work), {**space.default, **self.changes}, work, seed=None)

    def capacity(self, number: int) -> float:
        """Requests a second that one replica serves with full batches."""
        deployment = self.deployment
        options = {**deployment.simulated_options, **self.changes}
        return capacity(self.load.draw(number, 1.0), deployment.calibration, options, link=deployment.link)

    def service_s(self, number: int) -> float:
        """Seconds of a full batch that a request takes for itself, by the cost model alone."""
        return _service_s(self.load.draw(number, 1.0), self.deployment, self.changes)


@dataclass(frozen=True)
class Highest:
    """The highest rate that keeps the promises."""

    rate: float
    """0: none that was tried."""
    trials: Sequence[tuple[float, Trial]]
    """What was simulated, by rate."""
    ceiling: float
    """The capacity."""

    @property
    def breaking(self) -> Trial | None:
        """The trial at the lowest rate that missed; `None` if the capacity was reached with all promises kept."""
        missed = [(rate, trial) for rate, trial in self.trials if not trial.score.is_kept]
        return min(missed, key=lambda pair: pair[0])[1] if missed else None


def highest_rate(
    simulate: Callable[[float], Trial],
    *,
    guess: float,
    ceiling: float,
    num_trials: int,
    known: Sequence[tuple[float, Trial]] = (),
) -> Highest:
    """Search from `guess` on, longer while no rate keeps the promises. `known`: trials at rates that were simulated
    before."""
    trials = list(known)
    rate = min(guess, ceiling)
    while len(trials) < len(known) + (num_trials if _kept(trials) else 3 * num_trials):
        if any(abs(rate / tried - 1.0) < _STEPS.near for tried, _ in trials):
            break
        trials.append((rate, simulate(rate)))
        rate = min(_next_rate(trials), ceiling)
    trials.sort(key=lambda pair: pair[0])
    return Highest(_crossing(trials, ceiling), trials, ceiling)


def _kept(trials: Sequence[tuple[float, Trial]]) -> list[tuple[float, Trial]]:
    return [(rate, trial) for rate, trial in trials if trial.score.is_kept]


def _next_rate(trials: Sequence[tuple[float, Trial]]) -> float:
    """Where the tail is expected to be 1."""
    kept = max(_kept(trials), key=lambda pair: pair[0], default=None)
    missed = min(((r, t) for r, t in trials if not t.score.is_kept), key=lambda pair: pair[0], default=None)
    if kept is not None and missed is not None:
        return _between(kept, missed)
    last, direction = (kept, 1.0) if kept is not None else (missed, -1.0)
    assert last is not None
    ordered = sorted(trials, key=lambda pair: abs(math.log(_tail(pair[1]))))
    distance, slope = abs(math.log(_tail(last[1]))), 2.0  # until two rates say how steep it is
    if len(ordered) > 1:
        (first_rate, first), (second_rate, second) = ordered[:2]
        found = math.log(_tail(first) / _tail(second)) / math.log(first_rate / second_rate)
        slope = found if found > 0 else slope
    step = min(max(math.exp(min(distance / slope, 1.0)) * 1.02, _STEPS.least), _STEPS.most)
    return float(last[0] * step**direction)


def _crossing(trials: Sequence[tuple[float, Trial]], ceiling: float) -> float:
    """The rate at which the tail becomes 1, if it does below the capacity."""
    kept = _kept(trials)
    if not kept:
        return 0.0
    missed = [(rate, trial) for rate, trial in trials if not trial.score.is_kept and rate > kept[0][0]]
    if not missed:
        return kept[-1][0]
    lowest = missed[0]
    below = [pair for pair in kept if pair[0] < lowest[0]]
    return min(_between(below[-1], lowest), ceiling)


def _between(kept: tuple[float, Trial], missed: tuple[float, Trial]) -> float:
    low, high = math.log(_tail(kept[1])), math.log(_tail(missed[1]))
    share = -low / (high - low) if high > low else 0.5
    return float(kept[0] * (missed[0] / kept[0]) ** min(max(share, 0.05), 0.95))


def _tail(trial: Trial) -> float:
    return min(max(trial.score.tail, _STEPS.least_tail), _STEPS.most_tail)


def _service_s(work: Sequence[BenchRequest], deployment: Deployment, changes: Changes) -> float:
    setup = set_up(deployment.calibration, {**deployment.simulated_options, **changes}, link=deployment.link)
    machine, cost = setup.machine, setup.machine.cost
    mean_in = sum(request.num_prompt_tokens for request in work) / len(work)
    mean_out = sum(request.num_output_tokens for request in work) / len(work)
    context = mean_in + mean_out / 2
    room = machine.num_blocks * machine.block_size
    rows = int(max(1, min(setup.scheduler.max_num_seqs, room // (context + machine.block_size / 2))))
    chunk = max(min(setup.scheduler.max_num_batched_tokens, 2048), 1)
    decode = StepWork(rows, rows, rows, int(rows * context))
    mixed = StepWork(rows + chunk, rows + 1, rows + 1, int(rows * context), 1, chunk * min(mean_in, chunk) / 2)
    decode_s, mixed_s = (cost.seconds(step) + machine.ranks.seconds(step, machine.link) for step in (decode, mixed))
    return mean_out * decode_s / rows + mean_in * (mixed_s - decode_s) / chunk
