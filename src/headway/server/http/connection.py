"""A client connection with limits: it is closed if the client sends too much, or sends or reads too slowly.

    between ──► head ──► body ──► between                  what arrives; a pipelined request begins before the
                                                           previous one is answered
    head    size, time                                     431, closed
    body    chunk framing and trailers, size, time         413, closed; less time once the request is answered
    ahead   size and number of the pipelined requests      closed
            after the one that is being answered
    answer  time in which the client reads nothing         cut off

uvicorn stops reading while a pipelined request waits, and then does not notice that the client has disconnected. This
connection keeps reading, up to the limit for pipelined requests.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headway.server.api.api_errors import ApiError
from headway.server.http.request_head import NO_HTTP, checked_target
from headway.server.limits import LIMITS

logger = logging.getLogger(__name__)

CHUNK_FRAMING_BYTES = 5
"""Framing of the smallest chunk: a size of one digit and two line ends."""
LOG_FULL_EVERY_S = 60.0
_REFUSAL = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s"
_HEAD_TOO_LARGE = ApiError(431, "The request's headers are too large.", code="headers_too_large")
_BODY_TOO_LARGE = ApiError(
    413,
    "The body is too large, or what surrounds it: send it in larger chunks, without trailers.",
    code="body_too_large",
)


class _Phase(enum.Enum):
    """The part of a request that is arriving."""

    BETWEEN = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()


class ConnectionLimit:
    """Limits the number of open connections. At the limit, a new connection replaces the one that has been idle, which
    means without a complete request, for longest. Connections whose requests are being answered are never replaced."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._open: set[BoundedProtocol] = set()
        self._idle: dict[BoundedProtocol, None] = {}
        """Connections without a complete request, longest idle first."""
        self._logged_s: float | None = None

    def enter(self, connection: BoundedProtocol) -> None:
        """Add a new connection. If there are too many, cut off the longest idle one, which may be the new one."""
        self._open.add(connection)
        self._idle[connection] = None
        if len(self._open) > self.most:
            self._log(connection.loop.time())
            leaves = next(iter(self._idle))
            self.leave(leaves)
            leaves.cut_off()

    def leave(self, connection: BoundedProtocol) -> None:
        """Remove a connection that has ended."""
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def set_idle(self, connection: BoundedProtocol, idle: bool) -> None:
        """Record whether a connection is idle: it has no complete request that is to be answered."""
        if connection not in self._open:
            return
        if idle:
            self._idle.setdefault(connection)
        else:
            self._idle.pop(connection, None)

    def _log(self, now_s: float) -> None:
        if self._logged_s is None or now_s - self._logged_s >= LOG_FULL_EVERY_S:
            self._logged_s = now_s
            logger.warning(
                "all %d connections are taken, as many as the limit of open files allows (ulimit -n); idle ones are "
                "closed for newcomers",
                self.most,
            )


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's connection with limits, which a subclass sets."""

    max_header_bytes: ClassVar[int] = 0
    max_body_bytes: ClassVar[int] = 0
    timeout_s: ClassVar[float] = 0.0
    limit: ClassVar[ConnectionLimit]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._phase = _Phase.HEAD
        self._phase_bytes = 0
        """Bytes that arrived in this phase, not counting the read in which it began."""
        self._named_bytes = 0
        """Bytes of the head's URL and headers, or of the body's trailers."""
        self._body_bytes = 0
        """Bytes of the body without framing and trailers."""
        self._num_chunks = 0
        self._ahead_bytes = 0
        """Bytes of pipelined requests that arrived before the previous request was answered."""
        self._head_refusal: ApiError | None = None
        """The error in the head of the request that is arriving, if there is one."""
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._receive_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0

    # ---- the connection -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._enter(_Phase.HEAD)
        self.limit.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.limit.leave(self)
        self._set_receive_timer(None)
        self._set_send_timer(None)
        self._disconnect_all()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._phase is _Phase.BETWEEN:
            self._enter(_Phase.HEAD)  # even if it is only an empty line
        self._phase_bytes += len(data)
        if self._is_ahead:
            self._ahead_bytes += len(data)
        super().data_received(data)
        if not self.transport.is_closing():
            self._check_bounds()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection: no further request has arrived in time."""
        self._close()

    def end_after_answer(self) -> None:
        """Accept no further request. Close now if none is arriving or being answered, else after the last answer."""
        if self._unanswered:
            self._unanswered[-1].keep_alive = False
        elif self._phase is _Phase.BETWEEN or not self._phase_bytes:
            self._close()

    def cut_off(self) -> None:
        """End the connection now, without sending what is left."""
        self._disconnect_all()
        self.transport.abort()

    # ---- what arrives -------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if len(self._unanswered) > LIMITS.max_pipelined:
            raise ValueError("too many pipelined requests")  # ends the parser, which calls send_400_response
        super().on_message_begin()
        self._enter(_Phase.HEAD)

    def on_url(self, url: bytes) -> None:
        self._count_named(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_named(len(name) + len(value) + 4)
        if self._phase is not _Phase.BODY:  # else it is a trailer
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        try:
            self.url = checked_target(
                self.parser.get_method(), self.url, self.parser.get_http_version(), self.scope["headers"]
            )
        except ApiError as error:
            self._head_refusal = error
            raise  # ends the parser, which calls send_400_response
        super().on_headers_complete()
        self._enter(_Phase.BODY)
        self._unanswered.append(self.cycle)
        self.flow.resume_reading()  # otherwise a disconnect would go unnoticed

    def on_chunk_header(self) -> None:
        """Count a chunk. The parser calls this for each one; a single read may hold very many of them."""
        self._num_chunks += 1
        if self._num_chunks * CHUNK_FRAMING_BYTES > self._max_framing_bytes:
            raise ValueError("the chunks are too small")  # ends the parser, which calls send_400_response

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._is_ahead:
            self.cycle.body += body  # bounded by the limit for pipelined requests
            self.cycle.message_event.set()
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._enter(_Phase.BETWEEN)

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is not valid HTTP or exceeds a limit. uvicorn calls this after a parser error."""
        if self._named_bytes > self.max_header_bytes:
            self._refuse(_HEAD_TOO_LARGE)
        elif self._num_chunks * CHUNK_FRAMING_BYTES > self._max_framing_bytes:
            self._refuse(_BODY_TOO_LARGE)
        else:
            self._refuse(self._head_refusal or NO_HTTP)

    @property
    def _is_ahead(self) -> bool:
        """Whether the arriving data belongs to a pipelined request: a previous request is not answered yet."""
        own = 1 if self._phase is _Phase.BODY and self._unanswered and self._unanswered[-1] is self.cycle else 0
        return len(self._unanswered) > own

    def _enter(self, phase: _Phase) -> None:
        self._phase = phase
        self._phase_bytes = self._named_bytes = self._body_bytes = self._num_chunks = 0
        if phase is _Phase.HEAD:
            self._set_receive_timer(self.timeout_s)
        elif phase is _Phase.BODY:
            self._set_receive_timer(self.timeout_s + LIMITS.app_first_s)
        else:
            self._set_receive_timer(None)
            self.limit.set_idle(self, not self._unanswered)

    def _count_named(self, num_bytes: int) -> None:
        self._named_bytes += num_bytes
        if self._named_bytes > self.max_header_bytes:
            raise ValueError("the headers are too large")  # ends the parser, which calls send_400_response

    def _check_bounds(self) -> None:
        if self._phase is _Phase.HEAD and self._phase_bytes > self.max_header_bytes:
            self._refuse(_HEAD_TOO_LARGE)
        elif self._phase is _Phase.BODY and self._is_too_large:
            self._refuse(_BODY_TOO_LARGE)
        elif self._ahead_bytes > self.max_header_bytes:
            self._close()

    @property
    def _is_too_large(self) -> bool:
        """Whether the body or its framing exceeds its limit."""
        framing_bytes, most = self._phase_bytes - self._body_bytes, self.max_body_bytes + LIMITS.read_ahead_bytes
        return framing_bytes > self._max_framing_bytes or self._body_bytes > most

    @property
    def _max_framing_bytes(self) -> int:
        """Limit for the sizes and extensions of chunks and the trailers, together."""
        return self.max_header_bytes + self._body_bytes // LIMITS.body_per_framing

    # ---- what is answered ---------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        """Record that the oldest unanswered request is answered."""
        if self._unanswered:
            self._unanswered.popleft()
        if self.transport.is_closing():
            self._watch_sending()
        elif not self._unanswered:
            self._ahead_bytes = 0
            self.limit.set_idle(self, True)
            if self._phase is _Phase.BODY:
                self._set_receive_timer(min(self.timeout_s, LIMITS.linger_s))
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Start to watch a client that reads slowly or not at all."""
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        """Stop watching: the client has read most of the pending data."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._set_send_timer(None)

    def _refuse(self, refusal: ApiError) -> None:
        """Close the connection. First send `refusal`, if it is this request's turn and no answer has begun."""
        turn = not self._is_ahead and not any(cycle.response_started for cycle in self._unanswered)
        self._disconnect_all()
        if turn and (self._phase is not _Phase.BODY or not self.cycle.response_complete):
            phrase = HTTPStatus(refusal.status).phrase.encode()
            self.transport.write(_REFUSAL % (refusal.status, phrase, len(refusal.body), refusal.body))
        self._close()

    def _close(self) -> None:
        """Send what is left, then close. A client that does not read it is cut off."""
        if not self.transport.is_closing():
            self._set_receive_timer(None)
            self._disconnect_all()
            self.transport.close()
            self._watch_sending()

    def _disconnect_all(self) -> None:
        """Tell every request of this connection, not only the last one, that its client is gone."""
        while self._unanswered:
            cycle = self._unanswered.popleft()
            cycle.disconnected = True
            cycle.message_event.set()

    def _watch_sending(self) -> None:
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._set_send_timer(self.timeout_s)

    def _check_sending(self) -> None:
        if self.transport.get_write_buffer_size() >= self._unsent_bytes:
            self.cut_off()
        else:
            self._watch_sending()

    # ---- time ---------------------------------------------------------------------------------------------------

    def _set_receive_timer(self, seconds: float | None) -> None:
        self._receive_timer = self._replaced(self._receive_timer, seconds, self._close)

    def _set_send_timer(self, seconds: float | None) -> None:
        self._send_timer = self._replaced(self._send_timer, seconds, self._check_sending)

    def _replaced(
        self, timer: asyncio.TimerHandle | None, seconds: float | None, then: Callable[[], None]
    ) -> asyncio.TimerHandle | None:
        if timer is not None:
            timer.cancel()
        return None if seconds is None else self.loop.call_later(seconds, then)
