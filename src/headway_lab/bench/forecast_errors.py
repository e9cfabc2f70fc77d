"""The errors of the engine's forecasts of first tokens, over the requests of a run.

error  =  |expected - actual|  /  max(actual, 200 ms)          both since the arrival of the request
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headway.outputs import forecast_error
from headway_lab.bench.timelines import RequestTimeline, percentile


@dataclass(frozen=True)
class ForecastErrors:
    """The errors of all requests that had a forecast and got a first token."""

    errors: Sequence[float]
    num_missing: int
    """Requests with a first token that had no forecast: the engine had not run a step yet."""
    bias: float
    """The mean of (expected - actual) / max(actual, 200 ms): above 0 if requests wait less than was expected."""

    @classmethod
    def of(cls, timelines: Sequence[RequestTimeline]) -> ForecastErrors:
        begun = [timeline for timeline in timelines if timeline.token_times_s]
        pairs = [
            (timeline.expected_first_s - timeline.arrival_s, timeline.ttft_s)
            for timeline in begun
            if timeline.expected_first_s is not None
        ]
        signed = [forecast_error(expected_s, actual_s) for expected_s, actual_s in pairs]
        bias = sum(signed) / len(signed) if signed else math.nan
        return cls([abs(error) for error in signed], len(begun) - len(pairs), bias)

    def percentile(self, percent: float) -> float:
        """Return a percentile of the errors; `nan` if there are none."""
        return percentile(self.errors, percent) if self.errors else math.nan

    def as_json(self) -> dict[str, float | None]:
        """The keys of a result."""
        median, p90 = self.percentile(50), self.percentile(90)
        return {
            "median_forecast_error": None if math.isnan(median) else median,
            "p90_forecast_error": None if math.isnan(p90) else p90,
            "forecasts_missing": self.num_missing,
        }
