"""Simulated against measured: how far each number of a result is off, and whether that is within what is promised."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.lab.bench.online_metrics import OnlineMetrics

TOLERANCES: Mapping[str, float] = {
    "output_throughput": 0.05,
    "mean_ttft_ms": 0.10,
    "mean_tpot_ms": 0.10,
    "p99_ttft_ms": 0.20,
    "p99_tpot_ms": 0.20,
    "p99_itl_ms": 0.20,
    "p99_e2el_ms": 0.20,
}
"""What is promised of a simulation; other keys are shown for information."""

SHOWN = (
    "request_throughput",
    "output_throughput",
    *(f"{what}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for what in ("mean", "p50", "p99")),
)


@dataclass(frozen=True)
class ErrorRow:
    """One number of a result."""

    key: str
    measured: float
    simulated: float
    at_measured_speed: float | None = None
    """Simulated on a machine that is as fast as the real one was from moment to moment, by its own steps."""

    @property
    def error(self) -> float:
        """(simulated - measured) / measured; `nan` where there is nothing to compare."""
        return _error(self.simulated, self.measured)

    @property
    def error_at_measured_speed(self) -> float | None:
        """What is left without errors in the time of steps."""
        return None if self.at_measured_speed is None else _error(self.at_measured_speed, self.measured)

    @property
    def tolerance(self) -> float | None:
        """`None`: nothing is promised."""
        return TOLERANCES.get(self.key)

    @property
    def is_within(self) -> bool | None:
        """Whether it is as good as promised; `None` where nothing is."""
        return None if self.tolerance is None else abs(self.error) <= self.tolerance

    def as_json(self) -> dict[str, Any]:
        """For the result file."""
        return {
            "measured": _or_none(self.measured),
            "simulated": _or_none(self.simulated),
            "error": _or_none(self.error),
            "error_at_measured_speed": _or_none(self.error_at_measured_speed),
            "tolerance": self.tolerance,
        }


def error_rows(
    measured: OnlineMetrics,
    simulated: OnlineMetrics,
    at_measured_speed: OnlineMetrics | None = None,
    keys: Sequence[str] = SHOWN,
) -> list[ErrorRow]:
    """One for each key that both have a number for."""
    sides = [side.as_json() for side in (measured, simulated)]
    third = None if at_measured_speed is None else at_measured_speed.as_json()
    rows = []
    for key in keys:
        first, second = (side[key] for side in sides)
        if first is not None and second is not None:
            rows.append(ErrorRow(key, first, second, None if third is None else third[key]))
    return rows


def percent_text(error: float | None) -> str:
    """With its sign; empty where there is none."""
    return "" if error is None or math.isnan(error) else f"{100 * error:+.1f}%"


def _error(simulated: float, measured: float) -> float:
    if measured == 0.0:
        return 0.0 if simulated == 0.0 else math.nan
    return (simulated - measured) / measured


def _or_none(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
