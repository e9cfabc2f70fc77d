"""The server's own counters and latencies: since the start for Prometheus, and of the last minute for its page.

Latencies are measured in the front end, as clients see them. The engine sends its own numbers with every step.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from headway.core.utilisation import UNKNOWN, Utilisation, UtilisationStats
from headway.server.limits import LIMITS
from headway.server.loop_guard import LoopStalls
from headway.wire.engine_stats import EngineStats
from headway.wire.messages import RequestTimings

LATENCY_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
STEP_BUCKETS_S = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08),
    *(0.16, 0.32, 0.64, 1.28, 2.56, 5.12),
)
WINDOW_S = 60.0
STEP_KINDS = ("decode", "prefill", "mixed")
FINISH_REASONS = ("stop", "length", "abort", "error")
ERROR_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0, 10.0)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)


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


class ServerMetrics:
    """The server's counters and histograms. `observe_*` and `count_*` are called for each event."""

    def __init__(self, model: str, now: Callable[[], float] = time.monotonic) -> None:
        self.model = model
        self.time_to_first_token = Histogram(LATENCY_BUCKETS_S)
        self.inter_token_latency = Histogram(LATENCY_BUCKETS_S)
        self.time_per_output_token = Histogram(LATENCY_BUCKETS_S)
        self.e2e_latency = Histogram(LATENCY_BUCKETS_S)
        self.queue_time = Histogram(LATENCY_BUCKETS_S)
        self.prefill_time = Histogram(LATENCY_BUCKETS_S)
        self.decode_time = Histogram(LATENCY_BUCKETS_S)
        self.inference_time = Histogram(LATENCY_BUCKETS_S)
        self.prompt_length = Histogram(TOKEN_BUCKETS)
        self.generation_length = Histogram(TOKEN_BUCKETS)
        self.step_time = {kind: Histogram(STEP_BUCKETS_S) for kind in STEP_KINDS}
        self.schedule_time = Histogram(STEP_BUCKETS_S)
        self.recent_itl = RecentQuantiles(now)
        self.recent_first_tokens = RecentTimes(now=now)
        """For the page, which shows those of the last few seconds."""
        self.recent_hits = RecentShare(now)
        """Share of the looked-up tokens that were found in the prefix cache. The page shows it too."""
        self.recent_utilisation = RecentUtilisation(now)
        self.prediction_time = Histogram(STEP_BUCKETS_S)
        self.prediction_error = 0.0
        self.num_checked_predictions = 0
        self.num_missing_predictions = 0
        self.forecast_error = Histogram(ERROR_BUCKETS)
        """Of the forecasts of first tokens, as shares of the actual times, or of 200 ms if these were shorter."""
        self.num_missing_forecasts = 0
        """Requests that had no forecast when their first token came."""
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.responses: dict[tuple[str, int], int] = {}
        self.num_answering = 0
        """Number of generation requests in progress, from their first byte to the last byte of their answer."""
        self.loop_stalls = LoopStalls()
        self.num_front_end_restarts = 0
        self.num_devices: Callable[[], int] | None = None
        """How many devices the engines have now; `None` if that is not known."""
        self._num_steps = -1

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Count a generation request as in progress inside the block."""
        self.num_answering += 1
        try:
            yield
        finally:
            self.num_answering -= 1

    def observe_step(self, stats: EngineStats) -> None:
        """Record the numbers of a step, unless it has been recorded before."""
        self.recent_hits.observe(stats.prefix_cache.num_hit_tokens, stats.prefix_cache.num_queried_tokens)
        self.recent_utilisation.observe(stats.utilisation)
        if stats.batch.num_steps != self._num_steps:
            self._num_steps = stats.batch.num_steps
            self.step_time[stats.step.kind].observe(stats.step.duration_s)
            self.schedule_time.observe(stats.step.schedule_s)

    def observe_first_token(self, after_s: float) -> None:
        """Record the first token of a sequence, `after_s` seconds after its request arrived."""
        self.time_to_first_token.observe(after_s)
        self.recent_first_tokens.add(after_s)

    def observe_tokens(self, gap_s: float, num_tokens: int) -> None:
        """Record tokens that were delivered together, `gap_s` seconds after the previous ones. Each counts with an
        equal share of the gap."""
        each_s = gap_s / num_tokens
        self.inter_token_latency.observe(each_s, num_tokens)
        self.recent_itl.observe(each_s, num_tokens)

    def observe_timings(self, timings: RequestTimings) -> None:
        """Record the engine's timings of a request that has ended."""
        self.queue_time.observe(timings.queue_s)
        self.prefill_time.observe(timings.prefill_s)
        self.decode_time.observe(timings.decode_s)
        self.inference_time.observe(timings.prefill_s + timings.decode_s)

    def observe_prediction(self, waited_s: float, *, num_missing: int) -> None:
        """Record how long a request waited for its predicted lengths, and how many of them are missing."""
        self.prediction_time.observe(waited_s)
        self.num_missing_predictions += num_missing

    def observe_prediction_error(self, log_error: float) -> None:
        """Record a prediction's error: the absolute difference of the logarithms of predicted and actual length."""
        self.prediction_error += log_error
        self.num_checked_predictions += 1

    def observe_forecast(self, error: float | None) -> None:
        """Record the error of the forecast of a request's first token; None if there was no forecast."""
        if error is None:
            self.num_missing_forecasts += 1
        else:
            self.forecast_error.observe(error)

    def count_response(self, route: str, status: int) -> None:
        """Count an HTTP answer by route and status."""
        self.responses[route, status] = self.responses.get((route, status), 0) + 1
