"""The errors of forecasts over a run."""

from __future__ import annotations

import math

import pytest

from headway_lab.bench.forecast_errors import ForecastErrors
from headway_lab.bench.timelines import RequestTimeline


def timeline(arrival_s: float, first_s: float | None, expected_s: float | None) -> RequestTimeline:
    times_s = [] if first_s is None else [first_s, first_s + 1.0]
    return RequestTimeline(arrival_s, 10, 2, times_s, expected_first_s=expected_s)


def test_errors_are_shares_of_the_wait_and_of_a_short_wait_shares_of_200_ms() -> None:
    errors = ForecastErrors.of(
        [
            timeline(1.0, 2.0, 2.5),  # a second instead of one and a half
            timeline(5.0, 9.0, 8.0),
            timeline(6.0, 6.01, 6.05),  # 40 ms too many are a fifth of 200 ms
            timeline(7.0, 8.0, None),
            timeline(8.0, None, 9.0),
        ]
    )
    assert errors.errors == pytest.approx([0.5, 0.25, 0.2])
    assert errors.bias == pytest.approx((0.5 - 0.25 + 0.2) / 3)
    assert errors.as_json() == {
        "median_forecast_error": pytest.approx(0.25),
        "p90_forecast_error": pytest.approx(0.45),
        "forecasts_missing": 1,
    }


def test_without_forecasts_there_are_no_errors() -> None:
    errors = ForecastErrors.of([timeline(1.0, 2.0, None)])
    assert math.isnan(errors.percentile(50)) and math.isnan(errors.bias)
    assert errors.as_json() == {"median_forecast_error": None, "p90_forecast_error": None, "forecasts_missing": 1}
