"""The tuner's search: many candidates on a part of the work, the better ones on all of it, then steps from the best.

    successive halving    candidates drawn at random on half of the work, the best third of them on all of it; on less
                          than half, a queue has not built up, and the best options then are not the best later
    coordinate search     from the best so far: every option a step up or down, as long as that helps
    simplification        options of the best that do not matter go back to their defaults

Options that are given on the command line stay as they are. Values are limited to what the calibration can predict:
steps at most twice as large as the measured ones. The block size is not searched: steps were measured with one size,
and how another changes their time is not known. Everything is drawn with a seed, so a search can be repeated.

The number of replicas that is enough is found by bisection, which assumes that more are no worse. It runs first with
the default options, then below that number with a whole search at each, since fewer replicas may do with better
options. If roles are searched, the replicas of each number may all do both, or be divided in every way.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway_lab.bench.online_metrics import OnlineMetrics
from headway_lab.bench.pricing import Pricing
from headway_lab.sim.sim_comparison import Overload, overload
from headway_lab.sim.simulate import simulate
from headway_lab.tune.search_space import Space, roles_in
from headway_lab.tune.tune_goal import SAME_GOODPUT, Goal, Score
from headway_lab.workload.bench_requests import BenchRequest

if TYPE_CHECKING:
    from headway.progress import Meter

_SHARES = (0.5, 1.0)
_KEPT = 1 / 3
_HALVING_SHARE = 0.7  # of the budget; the rest is for the coordinate search
_LEAST_REQUESTS = 50


@dataclass(frozen=True)
class Trial:
    options: Mapping[str, Any]
    metrics: OnlineMetrics
    score: Score
    num_requests: int
    """Requests of the whole work; first trials have fewer."""
    rate: float | None = None
    """The requests each second that were offered; `None`: the work's own."""


@dataclass(frozen=True)
class Tuned:
    default: Trial
    chosen: Trial
    """The best trial, with as many options as possible at their defaults."""
    trials: Sequence[Trial]
    """All trials of the whole work, the best first, the default included."""
    num_simulated: int
    """The number of simulations, those of a part of the work included."""

    @property
    def best(self) -> Trial:
        """The default, unless another trial is clearly better."""
        return self.chosen if self.chosen.score.is_better_than(self.default.score) else self.default

    @property
    def is_default_best(self) -> bool:
        """Whether the default is the best, so that there is nothing to recommend."""
        return self.best is self.default

    @property
    def distinct(self) -> list[Trial]:
        """The trials, best first, without those that did the same to every request as one with fewer changed
        options."""
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
    """Simulate with these options. All trials have the same seed, so they are compared under the same conditions."""
    setup = space.set_up(options)
    result = simulate(
        work,
        setup.machine,
        setup.scheduler,
        setup.cache,
        num_replicas=space.num_replicas,
        router=options.get("router", "round-robin"),
        roles=roles_in(options),
        seed=seed,
    )
    metrics = OnlineMetrics.of(result.timelines, result.duration_s)
    if space.price_per_hour is not None:
        share = result.token_time.prompt_share
        metrics = metrics.priced(Pricing(space.price_per_hour, space.num_devices, share))
    return Trial(dict(options), metrics, goal.score(result.timelines, metrics), len(work))


def _p99(trial: Trial) -> float:
    return trial.metrics.itl.percentiles[99]


@dataclass(frozen=True)
class SearchLimits:
    """How long to search."""

    num_trials: int = 40
    """Simulations of the whole work; one of a part of it counts as that part."""
    seed: int = 0


def search(
    space: Space,
    goal: Goal,
    work: Sequence[BenchRequest],
    *,
    limits: SearchLimits | None = None,
    progress: Meter | None = None,
) -> Tuned:
    """Find the options that serve this work best."""
    run = _Search(space, goal, work, limits or SearchLimits(), progress)
    default = run.whole(space.default)
    run.halve()
    run.climb()
    chosen = run.simplify()
    return Tuned(default, chosen, run.ranked(), run.num_simulated)


class _Search:
    def __init__(
        self,
        space: Space,
        goal: Goal,
        work: Sequence[BenchRequest],
        limits: SearchLimits,
        progress: Meter | None,
    ) -> None:
        self._space, self._goal, self._work, self._limits, self._progress = space, goal, work, limits, progress
        self._used = 0.0
        self.num_simulated = 0
        self.trials: dict[tuple[Any, ...], Trial] = {}  # of the whole work, by their options

    def whole(self, options: Mapping[str, Any]) -> Trial:
        """Simulate all requests with these options. The same options are simulated once."""
        key = tuple(options.values())
        if key not in self.trials:
            self.trials[key] = self._try(options, len(self._work))
        return self.trials[key]

    def halve(self) -> None:
        """Draw candidates at random, and simulate ever fewer of them with ever more requests."""
        rng = random.Random(self._limits.seed)
        counts = [self._count(share) for share in _SHARES]
        # n candidates cost n × (first share + a third of the second)
        each = sum(_KEPT**level * count / len(self._work) for level, count in enumerate(counts))
        num_candidates = max(int(_HALVING_SHARE * self._limits.num_trials / each), 1)
        candidates: list[dict[str, Any]] = []
        for _ in range(20 * num_candidates):
            drawn = self._space.draw(rng)
            if drawn not in candidates and drawn != self._space.default:
                candidates.append(drawn)
            if len(candidates) == num_candidates:
                break
        for level, count in enumerate(counts):
            if count == len(self._work) or level == len(counts) - 1:
                for options in candidates:
                    self.whole(options)
                return
            tried = sorted((self._try(options, count) for options in candidates), key=_by_goodput)
            candidates = [dict(trial.options) for trial in tried[: max(int(_KEPT * len(tried)), 1)]]

    def climb(self) -> None:
        """Change one option at a time, from the best trial so far, until nothing helps or the budget is used up. If
        budget is left, continue from the next best."""
        explored: set[tuple[Any, ...]] = set()
        while self._used < self._limits.num_trials:
            start = next((trial for trial in self.ranked() if tuple(trial.options.values()) not in explored), None)
            if start is None:
                return
            explored.add(tuple(start.options.values()))
            for options in self._space.neighbours(start.options):
                if self._used >= self._limits.num_trials:
                    return
                if self.whole(options).score.is_better_than(start.score):
                    break  # go on from there

    def simplify(self) -> Trial:
        """The best trial, with each option at its default that does not contribute. These few simulations exceed the
        budget."""
        best = self.ranked()[0]
        for name in self._space.changes(best.options):
            options = {**best.options, name: self._space.default[name]}
            if self._space.is_valid(options):
                simpler = self.whole(options)
                if not best.score.is_better_than(simpler.score):
                    best = simpler
        return best

    def ranked(self) -> list[Trial]:
        """The trials of the whole work, the best first: among those with about the highest goodput the one with the
        shortest tail, and among equals the one closest to the default."""
        enough = (1 - SAME_GOODPUT) * max(trial.score.goodput for trial in self.trials.values())

        def key(trial: Trial) -> tuple[float, float, int]:
            goodput = enough if trial.score.goodput >= enough else trial.score.goodput
            return -goodput, trial.score.tail, len(self._space.changes(trial.options))

        return sorted(self.trials.values(), key=key)

    def _count(self, share: float) -> int:
        return min(max(int(share * len(self._work)), _LEAST_REQUESTS), len(self._work))

    def _try(self, options: Mapping[str, Any], num_requests: int) -> Trial:
        trial = simulate_trial(self._space, self._goal, options, self._work[:num_requests])
        self._used += num_requests / len(self._work)
        self.num_simulated += 1
        if self._progress is not None:
            self._progress.at(min(self._used, float(self._limits.num_trials)))
        return trial


def _by_goodput(trial: Trial) -> tuple[float, float]:
    return -trial.score.goodput, trial.score.tail


@dataclass(frozen=True)
class Sized:
    """A number of replicas, with the best options that were found for it."""

    space: Space
    trial: Trial
    overload: Overload | None = None
    """Set if the load is above their capacity: a longer run would break promises that a short one keeps."""

    @property
    def num_replicas(self) -> int:
        return self.space.num_replicas

    @property
    def num_devices(self) -> int:
        """The devices of all ranks of all replicas."""
        return self.space.num_devices

    @property
    def is_enough(self) -> bool:
        return self.trial.score.is_kept and self.overload is None


@dataclass(frozen=True)
class Fleet:
    """How many replicas keep the goal."""

    enough: Sized | None
    """The fewest replicas that keep it; `None` if no number does."""
    tried: Sequence[Sized]
    """The numbers that were tried, in order."""
    num_simulated: int

    @property
    def too_few(self) -> Sized | None:
        """The next smaller number, or the largest if no number is enough; `None` if there is no smaller one."""
        most = None if self.enough is None else self.enough.num_replicas
        fewer = [one for one in self.tried if most is None or one.num_replicas < most]
        return fewer[-1] if fewer else None


def fewest(
    spaces: Sequence[Space],
    goal: Goal,
    work: Sequence[BenchRequest],
    *,
    limits: SearchLimits | None = None,
    progress: Meter | None = None,
) -> Fleet:
    """Find the fewest replicas that keep the goal. `spaces` has one space for each number of replicas, in order."""
    run = _Sizing(spaces, goal, work, limits or SearchLimits(), progress)
    by_default = bisect.bisect_left(range(len(spaces)), True, key=run.is_enough_by_default)
    found = bisect.bisect_left(range(by_default), True, key=run.is_enough_tuned)
    tried = [run.best[place] for place in sorted(run.best)]
    return Fleet(run.best[found] if found < len(spaces) else None, tried, run.num_simulated)


def fewest_devices(fleets: Sequence[Fleet]) -> int:
    """The place of the fleet that is enough with the fewest devices, among equals the one with the shortest tail; the
    first fleet if none is enough. The fleets differ in their ranks."""

    def key(place: int) -> tuple[float, float]:
        enough = fleets[place].enough
        return (math.inf, 0.0) if enough is None else (enough.num_devices, enough.trial.score.tail)

    return min(range(len(fleets)), key=key)


def cheapest(fleets: Sequence[Fleet]) -> int:
    """The place of the fleet that is enough at the lowest price; the first fleet if none is enough. All fleets have
    prices."""

    def key(place: int) -> float:
        enough = fleets[place].enough
        prices = None if enough is None else enough.trial.metrics.prices
        return math.inf if prices is None or prices.tokens.all_in is None else prices.tokens.all_in

    return min(range(len(fleets)), key=key)


def most_trials(spaces: Sequence[Space], limits: SearchLimits) -> int:
    """About how many simulations of the whole work `fewest` takes at most."""
    num_fleets = max(len(list(space.fleets())) for space in spaces)
    return len(spaces).bit_length() * (num_fleets + limits.num_trials)


class _Sizing:
    def __init__(
        self,
        spaces: Sequence[Space],
        goal: Goal,
        work: Sequence[BenchRequest],
        limits: SearchLimits,
        progress: Meter | None,
    ) -> None:
        self._spaces, self._goal, self._work, self._limits, self._progress = spaces, goal, work, limits, progress
        self._used = 0.0
        self.num_simulated = 0
        self.best: dict[int, Sized] = {}
        """The best of each number of replicas, by the number's place."""

    def is_enough_by_default(self, place: int) -> bool:
        """Whether this number is enough with some router and roles, and no other option changed."""
        space = self._spaces[place]
        trials = []
        for options in space.fleets():
            trials.append(simulate_trial(space, self._goal, options, self._work))
            self.num_simulated += 1
            self.at(1.0)
            self._used += 1.0
        trials.sort(key=_by_goodput)
        together = next(trial for trial in trials if roles_in(trial.options) is None)
        if not trials[0].score.is_better_than(together.score):
            trials = [together, *trials]  # roles have to be worth it
        return self._note(place, trials)

    def is_enough_tuned(self, place: int) -> bool:
        """Whether this number is enough with any options."""
        space = self._spaces[place]
        tuned = search(space, self._goal, self._work, limits=self._limits, progress=self)
        self.num_simulated += tuned.num_simulated
        self._used += self._limits.num_trials
        return self._note(place, [tuned.best, *tuned.trials])

    def _note(self, place: int, trials: Sequence[Trial]) -> bool:
        """Keep the first trial that is enough, or else the one that misses least."""
        kept = (self._sized(place, trial) for trial in trials if trial.score.is_kept)
        best = next((one for one in kept if one.is_enough), None)
        best = best or self._sized(place, min(trials, key=lambda trial: trial.score.tail))
        self.best[place] = best
        return best.is_enough

    def _sized(self, place: int, trial: Trial) -> Sized:
        space = self._spaces[place]

        def most() -> float:
            return space.capacity(trial.options, self._work)

        return Sized(space, trial, overload(trial.metrics, most))

    def advance(self) -> None:
        """Called like a search's meter; the progress is set by `at` instead."""

    def at(self, done: float, total: float | None = None) -> None:
        """`done` of `total` of the current search are done; all searches before it are complete."""
        if self._progress is not None:
            self._progress.at(self._used + done)
