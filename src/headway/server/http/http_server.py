"""uvicorn on one socket, with bounded connections and a stop that drains.

    SIGTERM ──► no new connections ──► the engine finishes what runs, for a limited time ──► answers go out ──► exit 0

A second signal ends the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from headway.errors import ConfigError
from headway.server.http.connection import BoundedProtocol, ConnectionLimit
from headway.server.server_config import ServerConfig

GRACE_S = 10.0
"""After the engine has drained: how long clients may take to read what is left of their answers."""
KEEP_ALIVE_S = 75
LISTEN_BACKLOG = 4096
MAX_OPEN_FILES = 65536
"""The most that is asked of the system; each connection is an open file, and takes some memory too."""
RESERVED_FILES = 128
"""Open files that are no connections: the engine's channel, model files, and those that are just being closed."""


class DrainingServer(uvicorn.Server):
    """Runs `drain` as soon as it is asked to stop, while open requests go on. Calls `on_started` when it listens."""

    def __init__(
        self, config: uvicorn.Config, drain: Callable[[], Awaitable[None]], on_started: Callable[[], None] | None
    ) -> None:
        super().__init__(config)
        self._drain = drain
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._on_started is not None:
            self._on_started()

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


def raise_file_limit() -> int:
    """Take as many open files as the system allows, up to `MAX_OPEN_FILES`. Returns how many there may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, soft)


def max_connections(num_files: int) -> int:
    """How many of `num_files` open files may be connections."""
    return max(num_files - RESERVED_FILES, num_files // 2)


def create_server(
    app: ASGIApp,
    config: ServerConfig,
    drain: Callable[[], Awaitable[None]],
    *,
    on_started: Callable[[], None] | None = None,
    num_files: int = MAX_OPEN_FILES,
) -> DrainingServer:
    """A server for one event loop; `serve(sockets=[...])` runs it until a signal comes."""
    protocol = type(
        "Protocol",
        (BoundedProtocol,),
        {
            "max_header_bytes": config.max_header_bytes,
            "max_body_bytes": config.max_body_bytes,
            "timeout_s": config.receive_timeout_s,
            "limit": ConnectionLimit(max_connections(num_files)),
        },
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
    return DrainingServer(settings, drain, on_started)
