"""Numbers of the last minute: quantiles, shares and samples that forget what is older."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from headway.core.utilisation import UNKNOWN, Utilisation, UtilisationStats
from headway.server.limits import LIMITS

WINDOW_S = 60.0


class RecentQuantiles:
    """Quantiles of the values of the last minute, kept in ten-second slices, with a relative error of at most 10%.

    Values are counted in buckets that each span a factor of 1.1 and begin at one microsecond.
    """

    SLICE_S = 10.0
    NUM_SLICES = 6
    _FACTOR = math.log(1.1)
    _NUM_CLASSES = 200

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._slices: deque[tuple[int, list[int]]] = deque(maxlen=self.NUM_SLICES)

    def observe(self, value_s: float, times: int = 1) -> None:
        """Count `value_s`, `times` times."""
        number = int(self._now() / self.SLICE_S)
        if not self._slices or self._slices[-1][0] != number:
            self._slices.append((number, [0] * self._NUM_CLASSES))
        place = int(math.log(value_s * 1e6) / self._FACTOR) if value_s > 1e-6 else 0
        self._slices[-1][1][min(place, self._NUM_CLASSES - 1)] += times

    def quantiles(self, wanted: Sequence[float]) -> list[float]:
        """Return the wanted quantiles in seconds, or NaN if nothing was counted."""
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
    """The growth of one counter in the last minute, as a share of the growth of another."""

    WINDOW_S = 60

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._part = self._whole = 0
        self._marks: deque[tuple[int, int, int]] = deque()  # each second with a change, and the counters before it

    def observe(self, part: int, whole: int) -> None:
        """Record the current counters. Counters that have decreased were reset."""
        if whole < self._whole or part < self._part:
            self._marks.clear()
        elif whole > self._whole:
            self._mark(int(self._now()))
        self._part, self._whole = part, whole

    def share(self) -> float | None:
        """Return the share in the last minute, or None if the whole has not grown."""
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


class RecentUtilisation:
    """How well steps used their devices in the last minute, from a copy of the counters each second."""

    WINDOW_S = 60

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._marks: deque[tuple[int, UtilisationStats]] = deque()
        self._last = UtilisationStats()

    def observe(self, stats: UtilisationStats) -> None:
        """Record the current counters. Counters that have decreased were reset."""
        if stats.device_busy_s < self._last.device_busy_s:
            self._marks.clear()
            self._last = UtilisationStats()
        second = int(self._now())
        if not self._marks or self._marks[-1][0] != second:
            self._marks.append((second, self._last.copy()))
        self._last = stats

    def shares(self) -> Utilisation:
        """Return the shares in the last minute."""
        oldest = int(self._now()) - self.WINDOW_S
        while self._marks and self._marks[0][0] <= oldest:
            self._marks.popleft()
        return Utilisation.of(self._last.since(self._marks[0][1])) if self._marks else UNKNOWN


class RecentTimes:
    """Samples of the last minute, in seconds."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._samples: deque[tuple[float, float]] = deque(maxlen=LIMITS.max_samples)

    def add(self, seconds: float) -> None:
        """Add a sample of `seconds`, taken now."""
        self._samples.append((self._now(), seconds))

    def of_last(self, last_s: float) -> list[float]:
        """Return the sorted samples of the last `last_s` seconds, which may be at most `WINDOW_S`."""
        now_s = self._now()
        while self._samples and self._samples[0][0] < now_s - WINDOW_S:
            self._samples.popleft()
        recent = []
        for at_s, seconds in reversed(self._samples):
            if at_s < now_s - last_s:
                break
            recent.append(seconds)
        recent.sort()
        return recent


def percentile(ordered: list[float], share: float) -> float | None:
    """Return the nearest-rank percentile of sorted samples, or None if there are none."""
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
