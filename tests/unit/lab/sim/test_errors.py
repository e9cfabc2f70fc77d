"""The arithmetic of simulated against measured."""

from __future__ import annotations

import math

import pytest

from headway.lab.bench.online_metrics import OnlineMetrics
from headway.lab.bench.timelines import RequestTimeline
from headway.lab.sim.cost_model import StepWork
from headway.lab.sim.sim_accuracy import ErrorRow, error_rows, percent_text
from headway.lab.sim.step_timing import WINDOW_S, SpeedProfile, StepSample
from tests.unit.lab.sim.machines import small_cost


def metrics(ttft_s: float, gap_s: float, duration_s: float) -> OnlineMetrics:
    times = [ttft_s, ttft_s + gap_s, ttft_s + 2 * gap_s]
    return OnlineMetrics.of([RequestTimeline(0.0, 10, 3, times)], duration_s)


def test_errors_are_relative_to_what_was_measured() -> None:
    rows = {
        row.key: row for row in error_rows(metrics(1.0, 0.1, 2.0), metrics(1.05, 0.08, 2.5), metrics(1.0, 0.1, 2.0))
    }
    assert rows["mean_ttft_ms"].error == pytest.approx(0.05)
    assert rows["mean_tpot_ms"].error == pytest.approx(-0.2)
    assert rows["output_throughput"].error == pytest.approx(2.0 / 2.5 - 1)
    assert rows["mean_tpot_ms"].error_at_measured_speed == pytest.approx(0.0)


def test_promises() -> None:
    assert ErrorRow("mean_ttft_ms", 100.0, 109.9).is_within is True
    assert ErrorRow("mean_ttft_ms", 100.0, 89.0).is_within is False
    assert ErrorRow("output_throughput", 100.0, 94.0).is_within is False
    assert ErrorRow("p99_itl_ms", 100.0, 119.0).is_within is True
    assert ErrorRow("p50_ttft_ms", 100.0, 500.0).is_within is None


def test_nothing_measured() -> None:
    assert ErrorRow("mean_ttft_ms", 0.0, 0.0).error == 0.0
    assert math.isnan(ErrorRow("mean_ttft_ms", 0.0, 1.0).error)
    assert ErrorRow("mean_ttft_ms", 0.0, 1.0).as_json()["error"] is None
    lonely = OnlineMetrics.of([RequestTimeline(0.0, 10, 1, [1.0])], 1.0)
    assert "mean_tpot_ms" not in {row.key for row in error_rows(lonely, lonely)}, "a single token has no gaps"


def test_percent() -> None:
    assert (percent_text(0.0512), percent_text(-0.3), percent_text(None), percent_text(math.nan)) == (
        "+5.1%",
        "-30.0%",
        "",
        "",
    )


def test_a_machine_that_is_slower_for_a_while() -> None:
    cost = small_cost()
    work = StepWork(1, 1, 1, 1)
    usual_s = cost.seconds(work)
    factors = {0: 1.0, 1: 2.0, 3: 4.0}  # nothing ran in window 2
    samples = [
        StepSample(work, factor * usual_s, None, None, at_s=100.0 + (window + 0.5) * WINDOW_S)
        for window, factor in factors.items()
    ]
    profile = SpeedProfile.of(cost, samples, started_s=100.0)
    assert profile.factors == pytest.approx([1.0, 2.0, 2.0, 4.0])
    assert profile.overall == pytest.approx(7 / 3)
    assert [profile.at(at_s) for at_s in (0.0, 1.5 * WINDOW_S, 99.0)] == pytest.approx([1.0, 2.0, 4.0])
    assert SpeedProfile.of(cost, [], started_s=0.0).at(5.0) == 1.0
