"""The HTTP server: uvicorn on one socket, with bounded connections and a graceful stop (see `draining`).

The socket listens until no request is running, so that health checks and late requests get an answer, not a reset.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import resource
import socket
from collections.abc import Awaitable, Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from headway.errors import ConfigError
from headway.server.http.connection import BoundedProtocol, ConnectionLimit
from headway.server.http.draining import Drain
from headway.server.limits import LIMITS
from headway.server.server_config import ServerConfig

GRACE_S = 10.0
"""How long clients may take, after the drain timeout, to read the rest of their answers."""


Finish = Callable[[float], Awaitable[None]]
"""Lets running requests continue for the given seconds, then ends them."""


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains when it is asked to stop, then ends. It calls `on_started` when it listens."""

    def __init__(
        self, config: uvicorn.Config, drain: Drain, finish: Finish, on_started: Callable[[], None] | None
    ) -> None:
        super().__init__(config)
        self._drain = drain
        self._finish = finish
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._on_started is not None:
            self._on_started()

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._drain.is_asked

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        drain = self._drain
        if not drain.is_asked:
            drain.ask()
        insisting = asyncio.ensure_future(self._insist())
        await drain.end_lame_duck()
        for connection in list(self.server_state.connections):
            assert isinstance(connection, BoundedProtocol)
            connection.end_after_answer()
        finishing = asyncio.ensure_future(self._finish(max(drain.left_s, 0.0)))
        await drain.unless_forced(finishing)
        self.config.timeout_graceful_shutdown = math.ceil(max(drain.left_s + GRACE_S, 1.0))
        await super().shutdown(sockets)
        insisting.cancel()
        if drain.is_forced:
            finishing.cancel()
        await asyncio.gather(finishing, insisting, return_exceptions=True)

    async def _insist(self) -> None:
        await self._drain.until_forced()
        self.force_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do not handle signals here: the caller handles them from before the server listens, and uses `drain`."""
        yield


def bind(config: ServerConfig) -> socket.socket:
    """Bind the port before anything slow happens. Raises `ConfigError` if the port is not available."""
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
    """Raise the limit of open files as far as the system allows, up to `Limits.max_open_files`. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = LIMITS.max_open_files if hard == resource.RLIM_INFINITY else min(LIMITS.max_open_files, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return LIMITS.max_open_files if soft == resource.RLIM_INFINITY else min(LIMITS.max_open_files, soft)


def max_connections(num_files: int) -> int:
    """Return how many of `num_files` open files may be connections."""
    return max(num_files - LIMITS.reserved_files, num_files // 2)


def create_server(
    app: ASGIApp,
    config: ServerConfig,
    drain: Drain,
    finish: Finish,
    *,
    on_started: Callable[[], None] | None = None,
    num_files: int = LIMITS.max_open_files,
) -> DrainingServer:
    """Return a server for one event loop. Its `serve(sockets=[...])` returns after `drain` was asked and completed."""
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
            timeout_keep_alive=LIMITS.keep_alive_s,
            backlog=LIMITS.listen_backlog,
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
        )
        settings.load()
    except OSError as error:  # includes ssl.SSLError
        raise ConfigError(f"The TLS files cannot be used: {error}.") from error
    return DrainingServer(settings, drain, finish, on_started)
