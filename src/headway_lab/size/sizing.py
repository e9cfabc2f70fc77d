"""How many replicas a load needs, with which options, and how much more it could grow.

one alone     a replica per request: what even no load keeps is impossible on this device
highest       the highest rate that one replica keeps the promises at (`rates.py`)
options       tune's search a little above that rate; its answer has to raise the rate
replicas      the load over that rate, then simulated: more replicas until the promises are kept
headroom      the highest rate of these replicas together
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headway.errors import ConfigError
from headway.progress import Meter
from headway_lab.bench.online_metrics import Objective
from headway_lab.sim.setup import check_work
from headway_lab.sim.simulate import MOST_REPLICAS
from headway_lab.size.deployment import Deployment, Target, fitting
from headway_lab.size.rates import Highest, Load, Promised, highest_rate
from headway_lab.tune import SearchLimits, Trial, search


@dataclass(frozen=True)
class Effort:
    """How much is simulated."""

    num_requests: int = 1000
    """Of each simulation of one replica."""
    num_trials: int = 4
    """Simulations of the search for options; 0: none."""
    num_lone: int = 50
    """Requests that are simulated alone, each with a replica to itself."""
    most_simulated: int = 4
    """A fleet of more replicas is simulated as this many, with their share of the load."""
    first_guess: float = 0.8
    """Of the capacity, the first rate that is tried."""
    pressed: float = 1.08
    """Options are searched at this multiple of the highest rate, where the default options miss."""
    worth: float = 1.02
    """Options have to raise the highest rate by this factor."""
    more_per_replica: float = 0.5
    """Requests of a simulation for each further replica, as a share of those of one."""
    looser: float = 2.0
    """How much looser the promise is made that breaks first."""
    num_faster: int = 2
    """Faster devices that are compared."""

    @property
    def num_compared(self) -> int:
        """Requests where two deployments are compared, which have the same requests."""
        return max(2 * self.num_requests // 5, min(self.num_requests, 100))

    def num_requests_of(self, num_replicas: int) -> int:
        """Requests of a simulation of several replicas."""
        return round(self.num_requests * (1 + self.more_per_replica * (num_replicas - 1)))


@dataclass(frozen=True)
class Sizing:
    """An answer."""

    promised: Promised
    """With the options to start with."""
    num_replicas: int
    rate: float
    trial: Trial
    """The load on these replicas."""
    num_simulated: int
    """The replicas in this trial."""
    highest: Highest
    """Of the simulated replicas together."""

    @property
    def deployment(self) -> Deployment:
        return self.promised.deployment

    @property
    def num_devices(self) -> int:
        return self.num_replicas * self.deployment.num_devices

    @property
    def highest_rate(self) -> float:
        """The highest rate of all replicas together that keeps the promises."""
        return max(self.highest.rate / self.num_simulated * self.num_replicas, self.rate)

    @property
    def headroom(self) -> float:
        """By how much the load may grow, as a share of it."""
        return self.highest_rate / self.rate - 1.0


def size(
    target: Target, load: Load, rate: float, *, given_ranks: int | None, effort: Effort, progress: Meter | None = None
) -> Sizing:
    """The fewest devices on which the load keeps its promises. `ConfigError` if there are none."""
    deployment = _capable(fitting(target, given_ranks), load, effort)
    promised = Promised(load, deployment)
    one = _highest_of_one(promised, effort)
    promised, one = _with_options(promised, one, effort, progress)
    if not one.rate:
        raise ConfigError(
            f"One replica on {deployment.num_devices} × {deployment.device_name} keeps the promises for a request "
            f"alone, but at no rate that was tried, down to {one.trials[0][0]:.3g} requests/s: "
            f"{_missed(one.trials[0][1], load)}."
        )
    if rate / one.ceiling > MOST_REPLICAS:
        raise ConfigError(
            f"--rate {rate:g}: that takes about {math.ceil(rate / one.rate):,} replicas at {one.rate:.3g} requests/s "
            f"each, and at most {MOST_REPLICAS} are planned. Give a lower rate, and multiply."
        )
    return _replicas(promised, one, rate, effort)


def _capable(found: Sequence[Deployment], load: Load, effort: Effort) -> Deployment:
    """The first deployment on which a request alone gets what is promised."""
    least: tuple[Deployment, Trial] | None = None
    for deployment in found:
        promised = Promised(load, deployment)
        work = load.draw(effort.num_lone, 1.0)
        check_work(work, promised.space(work).set_up(promised.space(work).default).machine)
        trial = promised.alone(effort.num_lone)
        if trial.score.is_kept:
            return deployment
        if least is None or trial.score.tail < least[1].score.tail:
            least = deployment, trial
    assert least is not None
    deployment, trial = least
    devices = f"{deployment.num_devices} × {deployment.device_name}"
    raise ConfigError(
        f"Impossible for {deployment.target.model} on {devices}, even for one request alone: {_missed(trial, load)}. "
        "Promise no less than that, or take a faster device."
    )


def _missed(trial: Trial, load: Load) -> str:
    goal = load.goal(load.draw(trial.num_requests, 1.0))
    return goal.missed_by(trial.score, trial.metrics)


def _highest_of_one(promised: Promised, effort: Effort) -> Highest:
    ceiling = promised.capacity(effort.num_requests)
    return highest_rate(
        lambda rate: promised.trial(rate, effort.num_requests),
        guess=effort.first_guess * ceiling,
        ceiling=ceiling,
        num_trials=3,
    )


def _with_options(promised: Promised, one: Highest, effort: Effort, progress: Meter | None) -> tuple[Promised, Highest]:
    """The options that keep the promises at the highest rate."""
    if not effort.num_trials or not one.rate:
        return promised, one
    rate = min(effort.pressed * one.rate, one.ceiling)
    work = promised.load.draw(effort.num_compared, rate)
    space = promised.space(work)
    limits = SearchLimits(effort.num_trials)
    tuned = search(space, promised.load.goal(work), work, limits=limits, progress=progress)
    if tuned.is_default_best:
        return promised, one
    better = promised.with_changes(space.changes(tuned.best.options))
    ceiling = one.ceiling * max(promised.service_s(effort.num_compared) / better.service_s(effort.num_compared), 1.0)
    found = highest_rate(
        lambda tried: better.trial(tried, effort.num_requests), guess=rate, ceiling=ceiling, num_trials=2
    )
    return (better, found) if found.rate > effort.worth * one.rate else (promised, one)


def _replicas(promised: Promised, one: Highest, rate: float, effort: Effort) -> Sizing:
    number = max(math.ceil(rate / (1.05 * one.rate)), math.ceil(rate / one.ceiling))
    while True:
        if number > MOST_REPLICAS:
            raise ConfigError(
                f"--rate {rate:g}: {MOST_REPLICAS} replicas are not enough, and more are not planned. Give a lower "
                "rate, and multiply."
            )
        simulated = min(number, effort.most_simulated)
        share = rate * simulated / number
        num_requests = effort.num_requests_of(simulated)
        trial = promised.trial(share, num_requests, simulated)
        if trial.score.is_kept:
            break
        number += max(1, number // 10)
    if number == 1:
        known = [*one.trials, (rate, trial)]
        highest = Highest(one.rate, sorted(known, key=lambda pair: pair[0]), one.ceiling)
    else:
        highest = highest_rate(
            lambda tried: promised.trial(tried, num_requests, simulated),
            guess=max(simulated * one.rate, 1.02 * share),
            ceiling=simulated * one.ceiling,
            num_trials=2,
            known=[(share, trial)],
        )
    return Sizing(promised, number, rate, trial, simulated, highest)


def breaking_objective(sizing: Sizing) -> tuple[Objective, float] | None:
    """The promise that breaks first as the load grows, with the value that it then has. `None` if the capacity is
    reached before any breaks, or if classes have the promises."""
    trial = sizing.highest.breaking
    goal = sizing.promised.load.goal(sizing.promised.load.draw(sizing.trial.num_requests, 1.0))
    if trial is None or not goal.objectives:
        return None
    result = trial.metrics.as_json()
    ratios = {one: (result.get(one.key) or math.inf) / one.bound for one in goal.objectives}
    worst = max(ratios, key=lambda one: ratios[one])
    return worst, ratios[worst] * worst.bound
