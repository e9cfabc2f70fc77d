"""What a response says about the time of its request: how long it will wait, and how long everything took.

x-headway-expected-ttft-ms      the engine's forecast when it queued the request: from its arrival to its first token
x-headway-expected-total-ms     the same to its last token; missing if nothing is known about the answer's length
x-headway-ttft-ms               the actual time, in whole answers
x-headway-total-ms              the same
metrics                         an object in the answer, with --enable-per-request-metrics
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headway.outputs import forecast_error
from headway.server.metrics.access_log import AccessRecord
from headway.server.metrics.server_metrics import ServerMetrics
from headway.wire.messages import RequestForecast

EXPECTED_FIRST, EXPECTED_TOTAL = "x-headway-expected-ttft-ms", "x-headway-expected-total-ms"
ACTUAL_FIRST, ACTUAL_TOTAL = "x-headway-ttft-ms", "x-headway-total-ms"
EXPOSED_HEADERS = (EXPECTED_FIRST, EXPECTED_TOTAL, ACTUAL_FIRST, ACTUAL_TOTAL)
"""Web pages of other origins may read these."""


class AnswerMetrics(msgspec.Struct):
    """The times of a request, under vLLM's names as far as it has them. None: there was no such time."""

    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    """From the first token to the last."""
    queue_time_ms: float | None
    """In the engine, before its first step."""
    prefill_time_ms: float | None
    """From its first step to its first token."""
    mean_itl_ms: float | None
    """Mean time between two tokens of a sequence."""
    tokens_per_second: float | None
    """Tokens after the first of each sequence, per second of `generation_time_ms`."""
    cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""
    expected_time_to_first_token_ms: float | None
    expected_total_time_ms: float | None


class WaitReport:
    """The forecast of one HTTP request and its actual times."""

    EARLY_FROM_S = 0.05
    """A stream's headers are sent before its first token only if that is at least this far away."""

    def __init__(self, record: AccessRecord, metrics: ServerMetrics, *, has_output: bool) -> None:
        """`has_output`: the answer has tokens, and not only what was computed of the prompts."""
        self._record = record
        self._metrics = metrics
        self._has_output = has_output
        self.expected_first_s: float | None = None
        """When the first token is expected, since the arrival; None if that is not known."""
        self.expected_total_s: float | None = None
        self._end_s: float | None = None

    def note_forecasts(self, forecasts: Sequence[RequestForecast], now_s: float) -> None:
        """Note the forecasts of all prompts, which were made just before `now_s`."""
        spent_s = now_s - self._record.started_s
        self.expected_first_s = spent_s + min(each.first_token_s for each in forecasts)
        ends_s = [each.total_s if self._has_output else each.first_token_s for each in forecasts]
        known_s = [end_s for end_s in ends_s if end_s is not None]
        self.expected_total_s = spent_s + max(known_s) if len(known_s) == len(ends_s) else None

    def note_first_token(self, now_s: float) -> None:
        """Compare the forecast with the actual time of the first token."""
        actual_s = now_s - self._record.started_s
        expected_s = self.expected_first_s
        self._metrics.observe_forecast(None if expected_s is None else abs(forecast_error(expected_s, actual_s)))

    def note_end(self, now_s: float) -> None:
        """Note the time of the last token."""
        self._end_s = now_s

    def is_long(self, now_s: float) -> bool:
        """Whether the first token is expected to take some time yet."""
        spent_s = now_s - self._record.started_s
        return self.expected_first_s is not None and self.expected_first_s - spent_s >= self.EARLY_FROM_S

    @property
    def expected_headers(self) -> dict[str, str]:
        """The headers that can be sent before the answer."""
        return _in_ms({EXPECTED_FIRST: self.expected_first_s, EXPECTED_TOTAL: self.expected_total_s})

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a whole answer: what was expected, and what happened."""
        return self.expected_headers | _in_ms(
            {ACTUAL_FIRST: self._since(self._record.first_token_s), ACTUAL_TOTAL: self._since(self._end_s)}
        )

    def measured(self, *, num_gaps: int, gaps_s: float, num_cached_tokens: int) -> AnswerMetrics:
        """Return the times. `num_gaps`: the tokens after the first of each sequence; `gaps_s`: the sum of the times
        between tokens."""
        first_s, timings = self._record.first_token_s, self._record.timings
        generated_s = None if first_s is None or self._end_s is None else self._end_s - first_s
        is_timed = num_gaps > 0 and gaps_s > 0 and generated_s is not None and generated_s > 0
        return AnswerMetrics(
            time_to_first_token_ms=_ms(self._since(first_s)),
            generation_time_ms=_ms(generated_s),
            queue_time_ms=None if timings is None else _ms(timings.queue_s),
            prefill_time_ms=None if timings is None else _ms(timings.prefill_s),
            mean_itl_ms=_ms(gaps_s / num_gaps) if is_timed else None,
            tokens_per_second=round(num_gaps / generated_s, 3) if is_timed and generated_s else None,
            cached_tokens=num_cached_tokens,
            expected_time_to_first_token_ms=_ms(self.expected_first_s),
            expected_total_time_ms=_ms(self.expected_total_s),
        )

    def _since(self, at_s: float | None) -> float | None:
        return None if at_s is None else at_s - self._record.started_s


def with_metrics(body: bytes, metrics: AnswerMetrics | None) -> bytes:
    """Return a JSON object with the field `metrics` in addition, if there are any."""
    return body if metrics is None else body[:-1] + b',"metrics":' + msgspec.json.encode(metrics) + b"}"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)


def _in_ms(seconds: dict[str, float | None]) -> dict[str, str]:
    return {name: f"{1e3 * value:.0f}" for name, value in seconds.items() if value is not None}
