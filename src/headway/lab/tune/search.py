"""The search: many candidates on a part of the work, the better ones on more of it, then step by step from the best.

    successive halving    candidates drawn at random on half of the work, the best third of them on all of it; on less
                          than half a queue has not built up, and what is best then is not what is best later
    coordinate search     from the best so far: every option a step up or down, as long as that helps
    simplification        options of the best that do not matter go back to their defaults

Everything is drawn with a seed, so a search can be repeated. No library is needed; docs/results/tune_search.md compares.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.lab.tune.objective import SAME_GOODPUT, Goal
from headway.lab.tune.space import Space
from headway.lab.tune.trial import Trial, Tuned, simulate_trial
from headway.lab.workload.requests import BenchRequest

Progress = Callable[[float], object]
"""How much of the budget is used, in simulations of the whole work."""

_SHARES = (0.5, 1.0)
_KEPT = 1 / 3
_HALVING_SHARE = 0.7  # of the budget; the rest is for the coordinate search
_LEAST_REQUESTS = 50


@dataclass(frozen=True)
class SearchLimits:
    """How long to search."""

    num_trials: int = 40
    """As many simulations of the whole work; those of a part of it count as that part."""
    seed: int = 0


def search(
    space: Space,
    goal: Goal,
    work: Sequence[BenchRequest],
    *,
    limits: SearchLimits | None = None,
    progress: Progress | None = None,
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
        progress: Progress | None,
    ) -> None:
        self._space, self._goal, self._work, self._limits, self._progress = space, goal, work, limits, progress
        self._used = 0.0
        self.num_simulated = 0
        self.trials: dict[tuple[Any, ...], Trial] = {}  # of the whole work, by their options

    def whole(self, options: Mapping[str, Any]) -> Trial:
        """With all requests; the same options are tried once."""
        key = tuple(options.values())
        if key not in self.trials:
            self.trials[key] = self._try(options, len(self._work))
        return self.trials[key]

    def halve(self) -> None:
        """Candidates drawn at random; ever fewer of them with ever more requests."""
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
        """From the best so far, one option at a time, until nothing helps or the budget is used up; if there is some
        left, from the next best."""
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
        """The best, with each option that is not needed for that as by default. These few are over the budget."""
        best = self.ranked()[0]
        for name in self._space.changes(best.options):
            options = {**best.options, name: self._space.default[name]}
            if self._space.is_valid(options):
                simpler = self.whole(options)
                if not best.score.is_better_than(simpler.score):
                    best = simpler
        return best

    def ranked(self) -> list[Trial]:
        """Those of the whole work, the best first: of those with about the highest goodput the one with the shortest
        tail; of equals, the one that is most like the default."""
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
            self._progress(min(self._used, float(self._limits.num_trials)))
        return trial


def _by_goodput(trial: Trial) -> tuple[float, float]:
    return -trial.score.goodput, trial.score.tail
