"""uvicorn, and what it leaves open: bounds on the size and the time of a request's head, and a stop that drains.

    SIGTERM ──► no new connections ──► the engine finishes what runs, for a limited time ──► answers go out ──► exit 0

A second signal ends the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from http import HTTPStatus
from types import FrameType
from typing import Any, ClassVar

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headway.errors import ConfigError
from headway.server.config import ServerConfig
from headway.server.errors import ApiError

GRACE_S = 10.0
"""After the engine has drained: how long clients may take to read what is left of their answers."""
KEEP_ALIVE_S = 75
LISTEN_BACKLOG = 4096
_REFUSAL = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s"
_TOO_LARGE = ApiError(431, "The request's headers are too large.", code="headers_too_large")
_NO_HTTP = ApiError(400, "This is not a valid HTTP request.", code="invalid_http")


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Its head must be small and arrive in time, or the connection is closed."""

    max_header_bytes: ClassVar[int] = 0
    head_timeout_s: ClassVar[float] = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._headers_bytes = 0
        self._in_head = True
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)  # a head that comes in many pieces
            if self._head_bytes > self.max_header_bytes + len(data):
                self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = self._headers_bytes = 0
        self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers_bytes += len(name) + len(value) + 4
        if self._headers_bytes > self.max_header_bytes:
            self._head_bytes = self.max_header_bytes + 1
            raise ValueError("the head is too large")  # ends the parser, which calls send_400_response
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Called for what is no HTTP; there is no request yet that an application could answer."""
        refusal = _NO_HTTP if self._head_bytes <= self.max_header_bytes else _TOO_LARGE
        phrase = HTTPStatus(refusal.status).phrase.encode()
        self.transport.write(_REFUSAL % (refusal.status, phrase, len(refusal.body), refusal.body))
        self.transport.close()

    def _expect_head(self) -> None:
        self._in_head = True
        self._stop_timer()
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._give_up)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


class DrainingServer(uvicorn.Server):
    """Runs `drain` as soon as it is asked to stop, while open requests go on. Calls `on_started` when it listens."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[], Awaitable[None]]) -> None:
        super().__init__(config)
        self.on_started: Callable[[], None] = lambda: None
        self._drain = drain

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.ensure_future(self._drain())
        await super().shutdown(sockets)
        if self.force_exit:
            draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's own: the signals are not raised again afterwards, so that the process exits with 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal asks to stop, the second insists."""
        self.force_exit = self.should_exit
        self.should_exit = True


def bind(config: ServerConfig) -> socket.socket:
    """Take the port before anything slow happens; `ConfigError` if it is not to be had."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"Cannot listen on {config.host}, port {config.port}: {error}.") from error
    listener.set_inheritable(False)
    return listener


def create_server(app: ASGIApp, config: ServerConfig, drain: Callable[[], Awaitable[None]]) -> DrainingServer:
    """A server for one event loop; `serve(sockets=[...])` runs it until a signal comes."""
    protocol = type(
        "Protocol",
        (BoundedProtocol,),
        {"max_header_bytes": config.max_header_bytes, "head_timeout_s": config.receive_timeout_s},
    )
    try:
        settings = uvicorn.Config(
            app,
            http=protocol,
            interface="asgi3",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(config.drain_timeout_s + GRACE_S),
            backlog=LISTEN_BACKLOG,
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
        )
        settings.load()
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"The TLS files cannot be used: {error}.") from error
    return DrainingServer(settings, drain)
