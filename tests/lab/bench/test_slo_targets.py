"""Attainment: whose targets were met."""

from __future__ import annotations

import math

import pytest

from headway_lab.bench.slo_targets import Attainment, Targets, attainment
from headway_lab.bench.timelines import RequestTimeline


def timeline(*token_times_s: float, arrival_s: float = 10.0, num_wanted: int | None = None) -> RequestTimeline:
    times = [arrival_s + time_s for time_s in token_times_s]
    return RequestTimeline(arrival_s, 5, len(times) if num_wanted is None else num_wanted, times)


QUICK_AND_EVEN = timeline(0.25, 0.5, 0.75)
QUICK_AND_SLOW = timeline(0.25, 1.25, 2.25)
LATE_AND_EVEN = timeline(2.0, 2.25, 2.5)
ONE_TOKEN = timeline(0.25)
CUT_SHORT = timeline(0.25, 0.5, num_wanted=3)
REFUSED = timeline(num_wanted=3)
ALL = [QUICK_AND_EVEN, QUICK_AND_SLOW, LATE_AND_EVEN, ONE_TOKEN, CUT_SHORT, REFUSED]


def test_each_target_and_both() -> None:
    found = attainment(ALL, Targets(ttft_s=0.5, tpot_s=0.3))
    assert found == Attainment(num_requests=6, num_met_ttft=3, num_met_tpot=3, num_met=2)
    assert found.share == pytest.approx(1 / 3)


def test_a_target_is_met_at_the_very_last_moment() -> None:
    assert attainment([QUICK_AND_EVEN], Targets(ttft_s=0.25, tpot_s=0.25)).num_met == 1
    assert attainment([QUICK_AND_EVEN], Targets(ttft_s=0.2499)).num_met == 0
    assert attainment([QUICK_AND_EVEN], Targets(tpot_s=0.2499)).num_met == 0
    assert attainment([timeline(0.25, 0.375, 1.0)], Targets(tpot_s=0.375)).num_met == 1, "a mean, not the longest gap"


def test_what_is_not_promised_is_met_by_all_that_are_complete() -> None:
    assert attainment(ALL, Targets()).num_met == 4
    assert attainment(ALL, Targets(ttft_s=0.5)) == Attainment(6, num_met_ttft=3, num_met_tpot=4, num_met=3)


def test_targets_of_each() -> None:
    targets = [Targets(ttft_s=0.1), Targets(ttft_s=1.0), Targets(ttft_s=3.0)]
    assert attainment(ALL[:3], targets).num_met == 2
    with pytest.raises(ValueError):
        attainment(ALL, targets)
    assert math.isnan(attainment([], Targets(ttft_s=1.0)).share)
