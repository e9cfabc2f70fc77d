"""The front end's side of the socket to an engine process, and the ways to get such a process.

On one machine the two processes share a pair of connected Unix sockets and nothing else: if one process dies, the
kernel closes its end, and the other process notices at once. Between machines they use a TCP connection that begins
with a greeting.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import msgspec

from headway.child_process import python_command
from headway.errors import EngineStartError
from headway.wire.frames import BrokenFrameError, FrameReader, pack
from headway.wire.messages import (
    CacheNews,
    CacheResetDone,
    EngineReady,
    FromEngine,
    Heartbeat,
    Snapshot,
    Start,
    StartUpFailed,
    StepBatch,
    decode_from_engine,
)

logger = logging.getLogger(__name__)


EXIT_GRACE_S = 3.0
"""How long a process may take to exit after its drain time, or after its socket was closed."""
KILLED_S = 2.0
"""How long to wait for a killed process to end. A process that the kernel cannot end is not waited for any longer."""
News = StepBatch | Snapshot | CacheNews | CacheResetDone | Heartbeat


class EngineProcess(Protocol):
    """The engine process as its connection sees it."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def kill(self) -> None:
        """Kill the process. Does not block."""

    async def wait(self) -> int:
        """Wait until it has ended. Returns the exit status."""


class Home(Protocol):
    """Provides an engine process."""

    @property
    def is_shared(self) -> bool:
        """Whether others may use the process too. It is then left alone unless it hangs."""

    @property
    def num_gpus(self) -> int:
        """The number of GPUs that the engine has, where that is known."""

    async def open(self, start: Start) -> tuple[socket.socket, EngineProcess]:
        """Get a process that waits for its first message, and the connection to it. Raises `EngineStartError`. `start`
        describes the engine that the process will run, or must run already."""


@dataclass(frozen=True)
class LocalHome:
    """Starts a process on this machine for this front end."""

    factory: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables added to those of this process."""
    is_shared: bool = False
    num_gpus: int = 0

    async def open(self, start: Start) -> tuple[socket.socket, EngineProcess]:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                return ours, await _spawn(theirs, self.factory, self.environment)
        except BaseException:
            ours.close()
            raise


class EngineConnection(asyncio.Protocol):
    """The front end's side: one life of an engine process (started, ready, gone) and the socket to it."""

    def __init__(self, on_news: Callable[[News], None], on_lost: Callable[[EngineConnection], None]) -> None:
        """`on_lost` is called once, as soon as no more messages can arrive, also if the engine never was ready."""
        self.lost = asyncio.Event()
        self.pid = 0
        self._on_news = on_news
        self._on_lost = on_lost
        self._frames = FrameReader()
        self._ready: asyncio.Future[EngineReady] = asyncio.get_running_loop().create_future()
        self._process: EngineProcess | None = None
        self._is_shared = False
        self._transport: asyncio.Transport | None = None

    async def open(self, start: Start, home: Home) -> EngineReady:
        """Get a process and wait until it is ready. If that fails, nothing is left behind."""
        try:
            self._is_shared = home.is_shared
            ours, self._process = await home.open(start)
            self.pid = self._process.pid
            try:
                await self._attach(ours)
            except BaseException:
                if self._transport is None:  # which would own the socket
                    ours.close()
                raise
            self.send(start)
            return await self._ready
        except BaseException:
            await self.end()
            raise

    async def _attach(self, ours: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        if ours.family == socket.AF_UNIX:
            await loop.create_unix_connection(lambda: self, sock=ours)
        else:
            await loop.create_connection(lambda: self, sock=ours)

    def send(self, message: Any) -> None:
        """Write a message to the socket without blocking. If it cannot be packed, this raises and sends nothing."""
        frame = pack(message)
        if self._transport is not None:
            self._transport.write(frame)

    def kill(self) -> None:
        """Kill the process, even a stopped one. `on_lost` follows at once."""
        if self._is_shared and self._transport is None:
            return
        if self._transport is not None:
            self._transport.abort()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def wait_for_exit(self) -> int | None:
        """Wait for the exit and return the status; None if it cannot be known."""
        return None if self._process is None or self._is_shared else await self._process.wait()

    async def end(self, grace_s: float = 0.0) -> int | None:
        """Wait `grace_s` for the process to exit, then kill it. Returns the exit status, if there is one."""
        if self._is_shared:
            if self._transport is not None:
                self._transport.abort()
            return None
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self.wait_for_exit(), grace_s)
        self.kill()
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self.wait_for_exit(), KILLED_S)
        logger.error("the engine process %d does not end although it was killed", self.pid)
        return None

    # ---- called by the event loop ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called when the socket is in the event loop."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Handle the complete messages in the data received."""
        try:
            for payload in self._frames.feed(data):
                self._take(decode_from_engine(payload))
        except (BrokenFrameError, msgspec.DecodeError) as error:
            logger.error("the engine process sent something that is no message (%s); it is ended", error)
            self.kill()

    def connection_lost(self, error: Exception | None) -> None:
        """Called when the process has closed its end or died."""
        self._transport = None
        if not self._ready.done():
            self._ready.set_exception(EngineStartError("The engine process ended while it was starting."))
            self._ready.exception()  # marks it as seen: the task that waited for it may have been cancelled
        self.lost.set()
        self._on_lost(self)

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, EngineReady):
            self._ready.set_result(message)
        elif isinstance(message, StartUpFailed):
            self._ready.set_exception(EngineStartError(message.message))
        else:
            self._on_news(message)


async def _spawn(
    inherited: socket.socket, factory: str | None, environment: Mapping[str, str]
) -> asyncio.subprocess.Process:
    """Start the child with one end of the socket pair, no input, and the front end's standard error for its log."""
    command = python_command("headway.engine_process.main", "--fd", str(inherited.fileno()))
    return await asyncio.create_subprocess_exec(
        *command,
        *([] if factory is None else ["--factory", factory]),
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=(inherited.fileno(),),
        env={**os.environ, **environment},
    )
