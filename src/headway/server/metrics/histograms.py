"""Histograms of the server, with the bounds of their buckets.

Where vLLM has a histogram of the same name, its bounds are among ours, so that a panel which reads one bucket, such as
`le="0.1"`, finds it. Ours are finer below a second.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

LATENCY_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_GAP_BUCKETS_S = tuple(sorted({*LATENCY_BUCKETS_S, 0.025, 0.05, 0.075, 0.15, 0.2, 0.3, 0.4}))
REQUEST_TIME_BUCKETS_S = tuple(
    sorted({*LATENCY_BUCKETS_S, 0.3, 0.8, 1.5, 2.0, 15.0, 30.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0})
)
STEP_BUCKETS_S = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08),
    *(0.16, 0.32, 0.64, 1.28, 2.56, 5.12),
)
ERROR_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0, 10.0)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)
COMPLETION_BUCKETS = (1, 2, 5, 10, 20)


class Histogram:
    """Counts values by bucket. Observing costs only a binary search, because it is done for every token."""

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
        """Return pairs of an upper bound and the number of values up to it, the last for infinity, as in Prometheus."""
        rows: list[tuple[str, float]] = []
        below = 0
        for bound, count in zip([*map(_bound_text, self._bounds), "+Inf"], self.counts, strict=True):
            below += count
            rows.append((bound, below))
        return rows


def _bound_text(bound: float) -> str:
    return str(float(bound))
