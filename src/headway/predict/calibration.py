"""From a model's score, which only orders, to the logarithm of a length.

The table is made from requests that the model had not seen: sorted by score and cut into groups of equal size, each
group gives a point (mean score, mean log length), made to rise strictly where chance has it fall. Between points the
line is straight; beyond the outer ones it goes on with a small slope, so that no two scores become equal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway.predict.capped_length import expected_length

MOST_POINTS = 24
LEAST_GROUP = 25
MOST_SHIFT = 1.0
SHIFT_STEPS = 20
OUTER_RISE = 0.02
"""How much the log length goes on rising over one width of the table."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Calibration:
    """Both lists rise strictly. `sigma` is how far true log lengths scatter around the table."""

    scores: tuple[float, ...]
    log_lengths: tuple[float, ...]
    sigma: float

    def __post_init__(self) -> None:
        if len(self.scores) != len(self.log_lengths) or len(self.scores) < 2:
            raise ValueError("the calibration table needs two columns of at least two numbers")
        for column in (self.scores, self.log_lengths):
            if not all(map(math.isfinite, column)) or not all(a < b for a, b in itertools.pairwise(column)):
                raise ValueError("the columns of the calibration table must rise")
        if not math.isfinite(self.sigma) or self.sigma < 0:
            raise ValueError("the scatter of the calibration table must be a number of at least 0")

    def log_lengths_of(self, scores: npt.ArrayLike) -> Floats:
        """The log length for each score."""
        values = np.asarray(scores, dtype=np.float64)
        beyond = values - np.clip(values, self.scores[0], self.scores[-1])
        slope = OUTER_RISE / (self.scores[-1] - self.scores[0])
        return np.asarray(np.interp(values, self.scores, self.log_lengths) + slope * beyond)


def calibrate(scores: Floats, log_lengths: Floats) -> Calibration:
    """A table for these scores, which belong to requests that the model has not learnt from."""
    order = np.argsort(scores, kind="stable")
    num_points = int(np.clip(len(scores) // LEAST_GROUP, 2, MOST_POINTS))
    groups = [group for group in np.array_split(order, num_points) if len(group)]
    points = _rising(
        [float(scores[group].mean()) for group in groups], [float(log_lengths[group].mean()) for group in groups]
    )
    table = Calibration(tuple(x for x, _ in points), tuple(y for _, y in points), sigma=0.0)
    sigma = float(np.sqrt(np.mean((table.log_lengths_of(scores) - log_lengths) ** 2)))
    return Calibration(table.scores, table.log_lengths, sigma)


def centred(
    table: Calibration, scores: Floats, max_tokens: Sequence[int | None], num_output_tokens: Floats
) -> Calibration:
    """The table, shifted so that the expected lengths add up to the true ones: these are log-normal only roughly."""
    logs = table.log_lengths_of(scores).tolist()
    wanted = float(num_output_tokens.sum())
    low, high = -MOST_SHIFT, MOST_SHIFT
    for _ in range(SHIFT_STEPS):
        shift = (low + high) / 2
        total = sum(expected_length(log + shift, table.sigma, limit) for log, limit in zip(logs, max_tokens))
        low, high = (shift, high) if total < wanted else (low, shift)
    return Calibration(table.scores, tuple(y + low for y in table.log_lengths), table.sigma)


def _rising(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """Pool neighbours whose order is wrong (isotonic regression), then drop what is still level."""
    pools: list[tuple[float, float, int]] = []
    for x, y in zip(xs, ys):
        count = 1
        while pools and (y <= pools[-1][1] or x <= pools[-1][0]):
            past_x, past_y, past = pools.pop()
            x, y = (x * count + past_x * past) / (count + past), (y * count + past_y * past) / (count + past)
            count += past
        pools.append((x, y, count))
    if len(pools) == 1:
        # The scores say nothing: a table that hardly rises.
        x, y, _ = pools[0]
        return [(x - 0.5, y - OUTER_RISE / 2), (x + 0.5, y + OUTER_RISE / 2)]
    return [(x, y) for x, y, _ in pools]
