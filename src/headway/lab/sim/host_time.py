"""What the host does around a step: planning and launching it before, taking in and handing out its tokens after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from headway.lab.sim.least_squares import non_negative_least_squares

_OUTLIER = 5.0  # times the median: another process had the core


@dataclass(frozen=True)
class HostTime:
    """Seconds for a step, and for each request in it. Where steps overlap, it passes beside the device's work."""

    before_s: float = 0.0
    before_row_s: float = 0.0
    after_s: float = 0.0
    after_row_s: float = 0.0

    def before(self, num_rows: int) -> float:
        """From the end of the step before until the device has this one."""
        return self.before_s + self.before_row_s * num_rows

    def after(self, num_rows: int) -> float:
        """From the device's result until the tokens are out."""
        return self.after_s + self.after_row_s * num_rows

    def scaled(self, factor: float) -> HostTime:
        """A host that takes so many times as long."""
        return HostTime(**{name: factor * value for name, value in asdict(self).items()})

    @staticmethod
    def fit(steps: Sequence[tuple[int, float, float]]) -> HostTime:
        """From (requests, seconds before, seconds after) of measured steps."""
        if not steps:
            return HostTime()
        rows, before, after = (np.array(side, dtype=np.float64) for side in zip(*steps, strict=True))
        return HostTime(*_line(rows, before), *_line(rows, after))

    def as_json(self) -> dict[str, float]:
        """For the calibration's file."""
        return asdict(self)

    @staticmethod
    def from_json(document: dict[str, Any]) -> HostTime:
        """What `as_json` made; `ValueError` or `TypeError` for anything else."""
        host = HostTime(**{name: float(value) for name, value in document.items()})
        if min(asdict(host).values()) < 0.0:
            raise ValueError("the host's time is negative")
        return host


def _line(rows: np.ndarray[Any, np.dtype[np.float64]], seconds: np.ndarray[Any, np.dtype[np.float64]]) -> list[float]:
    """(constant, per row)"""
    usual = seconds <= _OUTLIER * np.median(seconds)
    terms = np.stack([np.ones(int(usual.sum())), rows[usual]], axis=1)
    return [float(c) for c in non_negative_least_squares(terms, seconds[usual])]
