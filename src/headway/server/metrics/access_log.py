"""One JSON line per request: what was asked, how it ended, and where the time went."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import msgspec

from headway.server.api.api_errors import ApiError, error_type
from headway.server.limits import LIMITS
from headway.wire.messages import RequestTimings

logger = logging.getLogger(__name__)

GATHER_S = 0.05
"""At least so long between two writes: a thread that woke for each line would take time from the next request."""
CLOSE_S = 2.0

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class AccessRecord:
    """What is known about a request, filled in as it goes on."""

    request_id: str
    method: str
    path: str
    client: str
    traceparent: str | None = None
    """The span of the client's that this request belongs to, as W3C writes it."""
    started_s: float = field(default_factory=time.perf_counter)
    time_s: float = field(default_factory=time.time)
    status: int | None = None
    disconnected: bool = False
    error: str | None = None
    """The code of the error object, or its type, if the answer was one."""
    param: str | None = None
    """The field of the request that was refused."""
    key: str | None = None
    """The digest of its API key. Not for the log."""
    user: str | None = None
    service_class: str | None = None
    """Where there are several."""
    stream: bool | None = None
    num_prompt_tokens: int | None = None
    num_output_tokens: int = 0
    first_token_s: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    timings: RequestTimings | None = None
    """Of the prompt that took longest, where there are several."""

    def note_error(self, failure: ApiError) -> None:
        """The answer is an error object, or ends with one."""
        self.error = failure.code or error_type(failure.status)
        self.param = failure.param

    def note_timings(self, timings: RequestTimings) -> None:
        """The engine's account of one prompt."""
        if self.timings is None or _total_s(timings) > _total_s(self.timings):
            self.timings = timings

    def line(self) -> bytes:
        """The record as JSON, without what does not apply."""
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
    """Writes lines to stdout from a thread. If they are read too slowly, lines are lost and no request waits."""

    def __init__(self) -> None:
        self._out = sys.stdout
        self._lines: deque[str] = deque()
        self._news = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="access log", daemon=True)
        self._thread.start()

    def write(self, record: AccessRecord) -> None:
        """A request has ended."""
        if len(self._lines) < LIMITS.max_queued_log_lines:
            self._lines.append(record.line().decode())
            self._news.set()

    def close(self) -> None:
        """Write the rest; a reader that does not read is not waited for long."""
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
        except (OSError, ValueError) as error:  # the reader has gone, or stdout was closed
            logger.warning("the access log cannot be written any more: %s", error)

    def _write_all(self) -> None:
        while self._lines:
            self._out.write(self._lines.popleft() + "\n")
        self._out.flush()


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def _total_s(timings: RequestTimings) -> float:
    return timings.queue_s + timings.prefill_s + timings.decode_s
