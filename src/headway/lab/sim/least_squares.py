"""Least squares where no coefficient may be negative: the active-set method of Lawson and Hanson."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_TOLERANCE = 1e-10


def non_negative_least_squares(matrix: Array, target: Array) -> Array:
    """x >= 0 with the least |matrix x - target|.

    Coefficients start at zero. The one that would help most is set free, all free ones are solved for, and those that
    would become negative are fixed at zero again; until none that is fixed would help.
    """
    scale = np.maximum(np.abs(matrix).max(0), 1e-300)
    scaled = matrix / scale
    gram, right = scaled.T @ scaled, scaled.T @ target
    x = np.zeros(matrix.shape[1])
    free = np.zeros(len(x), dtype=bool)
    limit = _TOLERANCE * max(float(np.abs(right).max()), 1e-300)
    for _ in range(3 * len(x)):
        gain = np.where(free, -np.inf, right - gram @ x)
        if gain.max() <= limit:
            break
        free[int(np.argmax(gain))] = True
        x = _solve_free(gram, right, x, free)
    return x / scale


def _solve_free(gram: Array, right: Array, x: Array, free: NDArray[np.bool_]) -> Array:
    """The best non-negative values of the free coefficients; some of them may be fixed again on the way."""
    while free.any():
        wanted = np.zeros(len(x))
        wanted[free] = np.linalg.lstsq(gram[np.ix_(free, free)], right[free], rcond=None)[0]
        negative = free & (wanted <= 0.0)
        if not negative.any():
            return wanted
        # As far towards the solution as nobody becomes negative; who arrives at zero stays there.
        share = float(np.min(x[negative] / np.maximum(x[negative] - wanted[negative], 1e-300)))
        x = np.maximum(x + share * (wanted - x), 0.0)
        fixed = negative & (x <= 1e-15)
        if not fixed.any():
            fixed = negative
        free &= ~fixed
        x = np.where(free, x, 0.0)
    return np.zeros(len(x))
