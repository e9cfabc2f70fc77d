"""How long a step that only decodes takes, by its number of requests. A policy that divides steps asks."""

from __future__ import annotations

ROWS_PER_BASE = 100.0
"""This many requests cost as much as reading the weights, as long as batches of one size only have been observed: about
right for an 8B model in 16 bit with contexts of a thousand tokens."""
MOST_TIMES_EXPECTED = 3.0
"""A step slower than this is cut off, one faster than its inverse replaces what was learned."""

_KEPT = 0.998  # weight of older decode steps, with each new one
_PRIOR_WEIGHT = 0.1  # weight of `ROWS_PER_BASE`, where a step counts 1


class DecodeTime:
    """The time of a step that only decodes, as a line through the observed steps, younger ones counting more.

    duration           ╱
                   ╱            each request adds the reading of its keys and values
               ╱
    ───────╱
           │  reading the weights, whatever the number of requests
           0          requests
    """

    def __init__(self) -> None:
        self._num = self._rows = self._rows_squared = self._s = self._rows_s = 0.0
        self._base_s = self._row_s = 0.0

    def observe(self, num_rows: int, duration_s: float) -> None:
        """Learn from a step in which this many requests generated."""
        expected_s = self.seconds(num_rows)
        if duration_s < expected_s / MOST_TIMES_EXPECTED:
            self._num = self._rows = self._rows_squared = self._s = self._rows_s = 0.0
        elif self._num:
            duration_s = min(duration_s, MOST_TIMES_EXPECTED * expected_s)
        self._num = _KEPT * self._num + 1.0
        self._rows = _KEPT * self._rows + num_rows
        self._rows_squared = _KEPT * self._rows_squared + num_rows * num_rows
        self._s = _KEPT * self._s + duration_s
        self._rows_s = _KEPT * self._rows_s + num_rows * duration_s
        self._fit()

    def seconds(self, num_rows: int) -> float:
        """Expected time of a step with this many decodes; 0 before any was observed."""
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
