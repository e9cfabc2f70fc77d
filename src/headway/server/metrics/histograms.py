"""Counting times and shares: for Prometheus since the start, and over the last minute."""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Callable, Sequence

LATENCY_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
STEP_BUCKETS_S = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08),
    *(0.16, 0.32, 0.64, 1.28, 2.56, 5.12),
)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)


class Histogram:
    """How many values fell below each bound. Observing costs a binary search, since it is done for every token."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self.counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times."""
        self.counts[bisect.bisect_left(self._bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, how many were at most that), the last for infinity, as Prometheus wants it."""
        rows: list[tuple[str, float]] = []
        below = 0
        for bound, count in zip([*map(_bound_text, self._bounds), "+Inf"], self.counts, strict=True):
            below += count
            rows.append((bound, below))
        return rows


def _bound_text(bound: float) -> str:
    return str(float(bound))


class RecentQuantiles:
    """Quantiles of the values of the last minute, in ten-second slices, exact to a tenth of a value.

    Values are counted in classes that each span a factor of 1.1, from a microsecond on.
    """

    SLICE_S = 10.0
    NUM_SLICES = 6
    _FACTOR = math.log(1.1)
    _NUM_CLASSES = 200

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._slices: deque[tuple[int, list[int]]] = deque(maxlen=self.NUM_SLICES)

    def observe(self, value_s: float, times: int = 1) -> None:
        """Count a value."""
        number = int(self._now() / self.SLICE_S)
        if not self._slices or self._slices[-1][0] != number:
            self._slices.append((number, [0] * self._NUM_CLASSES))
        place = int(math.log(value_s * 1e6) / self._FACTOR) if value_s > 1e-6 else 0
        self._slices[-1][1][min(place, self._NUM_CLASSES - 1)] += times

    def quantiles(self, wanted: Sequence[float]) -> list[float]:
        """The wanted quantiles, in seconds; NaN where nothing was counted."""
        oldest = int(self._now() / self.SLICE_S) - self.NUM_SLICES
        slices = [counts for number, counts in self._slices if number > oldest]
        counts = [sum(column) for column in zip(*slices)]
        return [self._quantile(counts, share) for share in wanted]

    def _quantile(self, counts: list[int], share: float) -> float:
        number = sum(counts)
        if number == 0:
            return math.nan
        left = share * number
        for place, count in enumerate(counts):
            left -= count
            if left <= 0:
                return math.exp((place + 0.5) * self._FACTOR) / 1e6
        raise AssertionError("the share of a whole cannot exceed it")


class RecentShare:
    """By how much one counter has grown in the last minute, as a share of another's growth."""

    WINDOW_S = 60

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._part = self._whole = 0
        self._marks: deque[tuple[int, int, int]] = deque()  # of each second with news: the counters before it

    def observe(self, part: int, whole: int) -> None:
        """What the counters say now. Counters that have fallen started anew."""
        if whole < self._whole or part < self._part:
            self._marks.clear()
        elif whole > self._whole:
            self._mark(int(self._now()))
        self._part, self._whole = part, whole

    def share(self) -> float | None:
        """Of the last minute; None if the whole has not grown in it."""
        oldest = int(self._now()) - self.WINDOW_S
        while self._marks and self._marks[0][0] <= oldest:
            self._marks.popleft()
        if not self._marks:
            return None
        _, part, whole = self._marks[0]
        return (self._part - part) / (self._whole - whole)

    def _mark(self, second: int) -> None:
        if not self._marks or self._marks[-1][0] != second:
            self._marks.append((second, self._part, self._whole))
            while self._marks[0][0] <= second - self.WINDOW_S:
                self._marks.popleft()
