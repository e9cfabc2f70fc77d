"""How long a step takes in which requests only generate, by how many they are: learned from such steps.

    duration           ╱
                   ╱            what each request adds: its keys and values are read
               ╱
    ───────╱
           │  what a step takes for nobody: all weights are read
           0          requests

A line through what was seen, younger steps counting more. Where batches have always been about as large, that says
little about others; then reading the weights counts as much as `ROWS_PER_BASE` requests, as for an 8B model in 16 bit
with contexts of a thousand tokens.
"""

from __future__ import annotations

ROWS_PER_BASE = 100.0
"""So many requests cost as much as reading the weights, as far as nothing else is known."""

_KEPT = 0.998  # of what older steps count, with each new one
_PRIOR_WEIGHT = 0.1  # what `ROWS_PER_BASE` counts, where a step counts 1
_MOST_TIMES_EXPECTED = 3.0  # beyond this a slow step is cut off, below its inverse a fast one starts anew


class DecodeTime:
    """Weighted sums, and two numbers that follow from them."""

    def __init__(self) -> None:
        self._num = self._rows = self._rows_squared = self._s = self._rows_s = 0.0
        self._base_s = self._row_s = 0.0

    def observe(self, num_rows: int, duration_s: float) -> None:
        """A step in which so many requests generated has taken so long."""
        expected_s = self.seconds(num_rows)
        if duration_s < expected_s / _MOST_TIMES_EXPECTED:
            self._num = self._rows = self._rows_squared = self._s = self._rows_s = 0.0
        elif self._num:
            duration_s = min(duration_s, _MOST_TIMES_EXPECTED * expected_s)
        self._num = _KEPT * self._num + 1.0
        self._rows = _KEPT * self._rows + num_rows
        self._rows_squared = _KEPT * self._rows_squared + num_rows * num_rows
        self._s = _KEPT * self._s + duration_s
        self._rows_s = _KEPT * self._rows_s + num_rows * duration_s
        self._fit()

    def seconds(self, num_rows: int) -> float:
        """What a step takes in which so many generate; 0 before any was seen."""
        return self._base_s + num_rows * self._row_s

    def _fit(self) -> None:
        """The least squares of the steps' errors and of `base_s - ROWS_PER_BASE * row_s`. No part is negative."""
        num = self._num + _PRIOR_WEIGHT
        rows = self._rows - _PRIOR_WEIGHT * ROWS_PER_BASE
        rows_squared = self._rows_squared + _PRIOR_WEIGHT * ROWS_PER_BASE**2
        determinant = num * rows_squared - rows * rows
        self._base_s = (rows_squared * self._s - rows * self._rows_s) / determinant
        self._row_s = (num * self._rows_s - rows * self._s) / determinant
        if self._row_s < 0.0:
            self._base_s, self._row_s = self._s / self._num, 0.0
        elif self._base_s < 0.0:
            self._base_s, self._row_s = 0.0, self._rows_s / self._rows_squared
