"""The access log: one JSON line per request, with its route, its outcome and its timings."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import msgspec

from headway.sampling_params import SamplingParams
from headway.server.api.api_errors import ApiError, error_type
from headway.server.limits import LIMITS
from headway.wire.messages import RequestTimings

logger = logging.getLogger(__name__)

GATHER_S = 0.05
"""Least time between two writes. A thread that woke up for each line would slow down the requests."""
CLOSE_S = 2.0

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class AccessRecord:
    """What is known about a request. It is filled in while the request runs."""

    request_id: str
    method: str
    path: str
    client: str
    traceparent: str | None = None
    """The client's span that this request belongs to, in the form of W3C's `traceparent` header."""
    started_s: float = field(default_factory=time.perf_counter)
    time_s: float = field(default_factory=time.time)
    status: int | None = None
    disconnected: bool = False
    error: str | None = None
    """The code or type of the error object, if the answer was an error."""
    param: str | None = None
    """The request field that caused the error."""
    operation: str | None = None
    """What a generating endpoint does, in the words of OpenTelemetry's conventions. It is not logged."""
    params: SamplingParams | None = None
    """The sampling parameters. They are not logged."""
    key: str | None = None
    """The digest of the API key. It is not logged."""
    user: str | None = None
    service_class: str | None = None
    """The service class, if there are several."""
    stream: bool | None = None
    num_prompt_tokens: int | None = None
    num_output_tokens: int = 0
    first_token_s: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    timings: RequestTimings | None = None
    """Timings of the prompt; if there are several, of the one that took longest."""

    def note_error(self, failure: ApiError) -> None:
        """Record that the answer is an error, or ends with one."""
        self.error = failure.code or error_type(failure.status)
        self.param = failure.param

    def note_timings(self, timings: RequestTimings) -> None:
        """Record the engine's timings of one prompt."""
        if self.timings is None or _total_s(timings) > _total_s(self.timings):
            self.timings = timings

    def line(self) -> bytes:
        """Return the record as JSON, without fields that do not apply."""
        fields: dict[str, object] = {
            "time": round(self.time_s, 3),
            "request_id": self.request_id,
            "client": self.client,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "duration_ms": _ms(time.perf_counter() - self.started_s),
        }
        if self.disconnected:
            fields["disconnected"] = True
        if self.error is not None:
            fields["error"] = self.error
        if self.param is not None:
            fields["param"] = self.param
        if self.user is not None:
            fields["user"] = self.user
        if self.service_class is not None:
            fields["service_class"] = self.service_class
        if self.num_prompt_tokens is not None:
            fields |= self._generation()
        return _encode(fields)

    def _generation(self) -> dict[str, object]:
        fields: dict[str, object] = {
            "stream": self.stream,
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "finish_reasons": self.finish_reasons,
        }
        if self.first_token_s is not None:
            fields["first_token_ms"] = _ms(self.first_token_s - self.started_s)
        if self.timings is not None:
            fields["queue_ms"] = _ms(self.timings.queue_s)
            fields["prefill_ms"] = _ms(self.timings.prefill_s)
            fields["decode_ms"] = _ms(self.timings.decode_s)
            fields["preemptions"] = self.timings.num_preemptions
            fields["cached_tokens"] = self.timings.num_cached_tokens
        return fields


class AccessLog:
    """Writes lines to stdout from a thread. If stdout is read too slowly, lines are dropped and no request waits."""

    def __init__(self) -> None:
        self._out = sys.stdout
        self._lines: deque[str] = deque()
        self._news = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="access log", daemon=True)
        self._thread.start()

    def write(self, record: AccessRecord) -> None:
        """Queue the line of a request that has ended."""
        if len(self._lines) < LIMITS.max_queued_log_lines:
            self._lines.append(record.line().decode())
            self._news.set()

    def close(self) -> None:
        """Write the rest. It waits only briefly for a reader that does not read."""
        self._closed.set()
        self._news.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._news.wait()
                self._closed.wait(GATHER_S)
                self._news.clear()
                self._write_all()
        except (OSError, ValueError) as error:  # the reader has exited, or stdout was closed
            logger.warning("the access log cannot be written any more: %s", error)

    def _write_all(self) -> None:
        while self._lines:
            self._out.write(self._lines.popleft() + "\n")
        self._out.flush()


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def _total_s(timings: RequestTimings) -> float:
    return timings.queue_s + timings.prefill_s + timings.decode_s
