"""The server's own counters and latencies: since the start for Prometheus, and of the last minute for its page.

Latencies are measured in the front end, as clients see them. The engine sends its own numbers with every step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headway.server.loop_guard import LoopStalls
from headway.server.metrics.histograms import (
    COMPLETION_BUCKETS,
    ERROR_BUCKETS,
    LATENCY_BUCKETS_S,
    PREEMPTION_BUCKETS,
    REQUEST_TIME_BUCKETS_S,
    STEP_BUCKETS_S,
    STEP_TOKEN_BUCKETS,
    TOKEN_BUCKETS,
    TOKEN_GAP_BUCKETS_S,
    Histogram,
)
from headway.server.metrics.recent import RecentQuantiles, RecentShare, RecentTimes, RecentUtilisation
from headway.wire.engine_stats import EngineStats
from headway.wire.messages import RequestTimings

STEP_KINDS = ("decode", "prefill", "mixed")
FINISH_REASONS = ("stop", "length", "abort", "error")
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Methods that metrics name; a client may send any word."""


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What a request asked for and got: one prompt with its completions."""

    num_prompt_tokens: int
    n: int
    max_tokens: int | None
    longest_completion: int
    """Tokens of the longest of its completions."""


class ServerMetrics:
    """The server's counters and histograms. `observe_*` and `count_*` are called for each event."""

    def __init__(self, model: str, now: Callable[[], float] = time.monotonic) -> None:
        self.model = model
        self.time_to_first_token = Histogram(LATENCY_BUCKETS_S)
        self.inter_token_latency = Histogram(TOKEN_GAP_BUCKETS_S)
        self.time_per_output_token = Histogram(TOKEN_GAP_BUCKETS_S)
        self.e2e_latency = Histogram(REQUEST_TIME_BUCKETS_S)
        self.queue_time = Histogram(REQUEST_TIME_BUCKETS_S)
        self.prefill_time = Histogram(REQUEST_TIME_BUCKETS_S)
        self.decode_time = Histogram(REQUEST_TIME_BUCKETS_S)
        self.inference_time = Histogram(REQUEST_TIME_BUCKETS_S)
        self.prompt_length = Histogram(TOKEN_BUCKETS)
        self.generation_length = Histogram(TOKEN_BUCKETS)
        self.longest_generation = Histogram(TOKEN_BUCKETS)
        self.computed_prompt_tokens = Histogram(TOKEN_BUCKETS)
        self.wanted_completions = Histogram(COMPLETION_BUCKETS)
        self.wanted_tokens = Histogram(TOKEN_BUCKETS)
        self.preemptions = Histogram(PREEMPTION_BUCKETS)
        self.step_tokens = Histogram(STEP_TOKEN_BUCKETS)
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
        self.responses: dict[tuple[str, str, int], int] = {}
        """HTTP answers by route, method and status."""
        self.response_time: dict[tuple[str, str], Histogram] = {}
        """How long they took, by route and method."""
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
            self.step_tokens.observe(stats.step.num_tokens)

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

    def observe_request(self, shape: RequestShape, timings: RequestTimings) -> None:
        """Record what the engine says of a request that has ended."""
        self.queue_time.observe(timings.queue_s)
        self.prefill_time.observe(timings.prefill_s)
        self.decode_time.observe(timings.decode_s)
        self.inference_time.observe(timings.prefill_s + timings.decode_s)
        self.preemptions.observe(timings.num_preemptions)
        self.prompt_length.observe(shape.num_prompt_tokens)
        self.computed_prompt_tokens.observe(max(0, shape.num_prompt_tokens - timings.num_cached_tokens))
        self.longest_generation.observe(shape.longest_completion)
        self.wanted_completions.observe(shape.n)
        if shape.max_tokens is not None:
            self.wanted_tokens.observe(shape.max_tokens)

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

    def observe_response(self, route: str, method: str, status: int, duration_s: float) -> None:
        """Record an HTTP answer. `status` is 0 if there was none."""
        method = method if method in METHODS else "other"
        self.responses[route, method, status] = self.responses.get((route, method, status), 0) + 1
        self.response_time.setdefault((route, method), Histogram(REQUEST_TIME_BUCKETS_S)).observe(duration_s)
