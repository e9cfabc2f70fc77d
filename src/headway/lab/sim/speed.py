"""How fast a machine was while it ran, compared with its calibration: for a simulation of that very time.

A machine with other work beside ours is not equally fast all the time. From the steps of a real run follows how many
times as long they took as expected, in windows of a few seconds; a simulation may follow the same ups and downs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.lab.sim.cost_model import CostModel
from headway.lab.sim.step_meter import StepSample

WINDOW_S = 2.0


@dataclass(frozen=True)
class SpeedProfile:
    """Times as long as expected, in windows of `WINDOW_S` from the start of the run; after the last as in it."""

    factors: Sequence[float]
    overall: float
    """Of all steps together."""

    def at(self, now_s: float) -> float:
        """So long after the start."""
        if not self.factors:
            return 1.0
        return self.factors[min(max(int(now_s / WINDOW_S), 0), len(self.factors) - 1)]

    @staticmethod
    def of(cost: CostModel, samples: Sequence[StepSample], *, started_s: float) -> SpeedProfile:
        """From the steps of a run. Windows without any are as the ones before them."""
        sums: dict[int, tuple[float, float]] = {}
        for sample in samples:
            window = max(int((sample.at_s - started_s - 0.5 * sample.duration_s) / WINDOW_S), 0)
            measured_s, expected_s = sums.get(window, (0.0, 0.0))
            sums[window] = (measured_s + sample.duration_s, expected_s + cost.seconds(sample.work))
        overall = _ratio(sum(m for m, _ in sums.values()), sum(e for _, e in sums.values()))
        factors: list[float] = []
        for window in range(max(sums, default=-1) + 1):
            last = factors[-1] if factors else overall
            factors.append(_ratio(*sums[window]) if window in sums else last)
        return SpeedProfile(factors, overall)


def _ratio(measured_s: float, expected_s: float) -> float:
    return measured_s / expected_s if expected_s else 1.0
