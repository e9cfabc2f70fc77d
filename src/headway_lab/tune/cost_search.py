"""The search for the cheapest options: those with which a machine takes the highest load while all promises are kept.

A device costs the same whether it is full or not. So at a fixed load, options change what a token costs only by the
number of devices (`tune_search.fewest` finds that), and on one machine the load decides. Here each candidate is given
the load of the best one so far and a little more:

    default          its highest load, by doubling steps on a grid of rates and then bisection
    candidates       neighbours of the best, formats first, then options drawn at random: one simulation at the next
                     rate of the grid shows that most of them are not better; from one that is, the climb goes on
    simplification   options of the best that do not matter go back to their defaults

A load is kept if the promises are, over all requests, and if it is not beyond capacity. Rates are 1% apart. The work is
the same at every rate; only the times of arrival are stretched.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.errors import ConfigError
from headway_lab.bench.online_metrics import OnlineMetrics
from headway_lab.sim.sim_comparison import overload
from headway_lab.tune.search_space import Space
from headway_lab.tune.tune_goal import Goal
from headway_lab.tune.tune_search import SearchLimits, Trial, Tuned, simulate_trial
from headway_lab.workload.bench_requests import BenchRequest
from headway_lab.workload.rates import RATES

UNIT_RATE = 1.0
"""The rate at which work is drawn, to be stretched to others."""


@dataclass(frozen=True)
class RateGrid:
    """The rates that are tried."""

    step: float = 1.01
    """The ratio of neighbouring rates."""
    first_share: float = 0.7
    """The first rate is this part of the machine's capacity."""
    least_share: float = 1e-3
    """Rates below this part of the first are not tried: one request at a time is all that is left there."""
    draws_per_trial: int = 20
    """Random options are drawn at most so often: in a small space most have been tried."""


_GRID = RateGrid()


@dataclass(frozen=True)
class Load:
    """Work that can arrive at any rate."""

    work: Sequence[BenchRequest]
    rate: float
    """The requests each second as they are in `work`."""

    def at(self, rate: float) -> list[BenchRequest]:
        """The same requests at another rate. The time that a user takes between two turns stays."""
        factor = self.rate / rate
        return [dataclasses.replace(one, arrival_s=factor * one.arrival_s) for one in self.work]


class CostSearch:
    """Finds the highest load of options, and the options with the highest."""

    def __init__(
        self,
        space: Space,
        goal: Goal,
        load: Load,
        limits: SearchLimits,
        on_simulated: Callable[[int], object] = lambda num_simulated: None,
    ) -> None:
        """`on_simulated` is called with the number of simulations so far, at most that of `limits`."""
        if len(load.work) < 2:
            raise ConfigError("The highest load of a single request is not known: take more --requests, at least 100.")
        self._space, self._goal, self._load, self._limits = space, goal, load, limits
        self._on_simulated = on_simulated
        self._capacities: dict[tuple[Any, ...], float] = {}
        self._known: dict[tuple[Any, ...], Trial | None] = {}  # by options and the number of the rate
        self._first = _GRID.first_share * self._capacity(space.default)
        self._lowest = math.ceil(math.log(_GRID.least_share, _GRID.step))
        self.num_simulated = 0
        self._tried = {tuple(space.default.items())}
        self.found: list[Trial] = []
        """Trials at their highest loads, in the order in which they were found."""

    def run(self) -> Tuned:
        """Search, and return the default and the best, each at its highest load. `ConfigError` if no options keep the
        promises at any load."""
        default = self.highest(self._space.default)
        if default is not None:
            self.found.append(default)
            self._climb()
        self._draw()
        if not self.found:
            raise ConfigError(self._nothing())
        chosen = self._simplify(self.found[-1])
        trials = sorted({id(one): one for one in [chosen, *self.found]}.values(), key=lambda one: -(one.rate or 0.0))
        return Tuned(default or self._refused(), chosen, trials, self.num_simulated)

    def highest(self, options: Mapping[str, Any], *, above: int | None = None) -> Trial | None:
        """The trial at the highest load with which these options keep the promises; `None` if they do at no load. With
        `above`, `None` also if they do not at the rate of this number, from which the search goes up."""
        kept = self._kept(options, above or 0)
        low, high = above or 0, None
        if kept is None:
            if above is not None:
                return None
            low, kept, high = self._down(options)
            if kept is None:
                return None
        stride = 1
        while high is None or high - low > 1:
            place = low + stride if high is None else (low + high) // 2
            trial = self._kept(options, place)
            if trial is None:
                high = place
            else:
                low, kept = place, trial
            stride *= 2
        return kept

    def _down(self, options: Mapping[str, Any]) -> tuple[int, Trial | None, int]:
        """The first lower rate that is kept, its trial, and the last that is not."""
        high, stride = 0, 4
        while high > self._lowest:
            low = max(high - stride, self._lowest)
            if (trial := self._kept(options, low)) is not None:
                return low, trial, high
            high, stride = low, 2 * stride
        return high, None, high

    def _draw(self) -> None:
        """Try options drawn at random until the budget is used up, and climb from those that are better."""
        rng = random.Random(self._limits.seed)
        for _ in range(_GRID.draws_per_trial * self._limits.num_trials):
            if self._is_over:
                return
            if self._challenge(self._space.draw(rng)):
                self._climb()

    def _climb(self) -> None:
        """Change one option of the best at a time, until nothing helps or the budget is used up."""
        while True:
            for options in self._space.neighbours(self.found[-1].options):
                if self._is_over:
                    return
                if self._challenge(options):
                    break  # go on from there
            else:
                return

    @property
    def _is_over(self) -> bool:
        return self.num_simulated >= self._limits.num_trials

    def _challenge(self, options: Mapping[str, Any]) -> bool:
        """Whether these options take a higher load than the best so far, and make more tokens a second of it; if so,
        they are the best. Options that did not are not tried again: the best takes no lower load later."""
        key = tuple(options.items())
        if key in self._tried:
            return False
        self._tried.add(key)
        above = self._lowest if not self.found else self._place_of(self.found[-1]) + 1
        trial = self.highest(options, above=above)
        if trial is None or (self.found and trial.metrics.output_tok_s <= self.found[-1].metrics.output_tok_s):
            return False
        self.found.append(trial)
        return True

    def _simplify(self, best: Trial) -> Trial:
        """The best, with each option at its default that does not contribute."""
        for name in self._space.changes(best.options):
            options = {**best.options, name: self._space.default[name]}
            if self._space.is_valid(options):
                best = self._kept(options, self._place_of(best)) or best
        return best

    def _kept(self, options: Mapping[str, Any], place: int) -> Trial | None:
        """The trial at a rate of the grid; `None` if it misses a promise, or if the load is beyond capacity."""
        key = (*options.values(), place)
        if key not in self._known:
            self._known[key] = None
            if (rate := self._rate(place)) <= RATES.most:
                trial = self._at(options, rate)
                is_kept = trial.score.is_kept and overload(trial.metrics, lambda: self._capacity(options)) is None
                self._known[key] = trial if is_kept else None
        return self._known[key]

    def _at(self, options: Mapping[str, Any], rate: float) -> Trial:
        self.num_simulated += 1
        trial = simulate_trial(self._space, self._goal, options, self._load.at(rate))
        self._on_simulated(min(self.num_simulated, self._limits.num_trials))
        score = dataclasses.replace(trial.score, is_at_limit=True)
        return dataclasses.replace(trial, score=score, rate=rate)

    def _refused(self) -> Trial:
        """A trial of the default at the lowest load, if it keeps the promises at none."""
        trial = self._at(self._space.default, self._rate(self._lowest))
        score = dataclasses.replace(trial.score, goodput=0.0)
        return dataclasses.replace(trial, score=score, rate=None, metrics=_without_prices(trial.metrics))

    def _nothing(self) -> str:
        trial = self._refused()
        missed = self._goal.missed_by(trial.score, trial.metrics)
        return (
            f"No options keep the promises at any load. By default, at {self._rate(self._lowest):.3g} requests/s, "
            f"{missed or 'they are kept, but not for long'}. Allow more, or take a faster machine."
        )

    def _rate(self, place: int) -> float:
        return float(self._first * _GRID.step**place)

    def _place_of(self, trial: Trial) -> int:
        """The number of a trial's rate on the grid."""
        assert trial.rate is not None
        return round(math.log(trial.rate / self._first, _GRID.step))

    def _capacity(self, options: Mapping[str, Any]) -> float:
        key = tuple(options.values())
        if key not in self._capacities:
            self._capacities[key] = self._space.capacity(options, self._load.work)
        return self._capacities[key]


def _without_prices(metrics: OnlineMetrics) -> OnlineMetrics:
    return dataclasses.replace(metrics, prices=None)
