"""The search for the highest rate, against tails that are known, and its bounds."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from headway_lab.bench.online_metrics import OnlineMetrics
from headway_lab.size.rates import highest_rate
from headway_lab.tune import Trial
from headway_lab.tune.tune_goal import Score

METRICS = OnlineMetrics.of([], 1.0)


def trials(tail: Callable[[float], float]) -> tuple[Callable[[float], Trial], list[float]]:
    """A simulation with this tail at each rate, and the rates that were asked for."""
    asked: list[float] = []

    def simulate(rate: float) -> Trial:
        asked.append(rate)
        return Trial({}, METRICS, Score(rate, 1.0, tail(rate), int(tail(rate) > 1.0)), 100)

    return simulate, asked


@pytest.mark.parametrize("guess", [2.0, 8.0, 11.0, 14.0])
@pytest.mark.parametrize(
    "tail",
    [lambda rate: (rate / 10.0) ** 2, lambda rate: (rate / 10.0) ** 9, lambda rate: 0.3 + 0.7 * (rate / 10.0) ** 4],
)
def test_where_the_tail_crosses_its_bound(tail: Callable[[float], float], guess: float) -> None:
    simulate, asked = trials(tail)
    found = highest_rate(simulate, guess=guess, ceiling=100.0, num_trials=6)
    assert found.rate == pytest.approx(10.0, rel=0.06) and len(asked) <= 6
    assert found.breaking is not None and found.breaking.score.tail > 1.0


def test_no_rate_above_the_capacity_counts() -> None:
    simulate, asked = trials(lambda rate: 0.1)
    found = highest_rate(simulate, guess=8.0, ceiling=9.0, num_trials=5)
    assert found.rate == 9.0 and max(asked) == 9.0 and found.breaking is None
    assert len(asked) == 2  # the same rate is not simulated twice


def test_none_if_no_rate_that_was_tried_keeps_the_promises() -> None:
    simulate, asked = trials(lambda rate: math.inf)
    found = highest_rate(simulate, guess=8.0, ceiling=9.0, num_trials=3)
    assert found.rate == 0.0 and asked == sorted(asked, reverse=True) and len(asked) == 9


def test_known_trials_are_used() -> None:
    simulate, asked = trials(lambda rate: rate / 10.0)
    known = [(5.0, simulate(5.0)), (20.0, simulate(20.0))]
    found = highest_rate(simulate, guess=12.0, ceiling=50.0, num_trials=1, known=known)
    assert asked == [5.0, 20.0, 12.0] and found.rate == pytest.approx(10.0, rel=0.01)
