"""One life of the engine process, as the front end sees it: spawned, ready, gone.

The two ends share a pair of connected Unix sockets and nothing else. If the process dies, however that happens, the
kernel closes its end and this one learns of it at once; the same holds the other way round.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Callable
from typing import Any, cast

import msgspec

from headway.errors import HeadwayError
from headway.rpc.frames import BrokenFrameError, FrameReader, pack
from headway.rpc.messages import (
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
"""How long a process may take to exit, beyond what it was given to drain or once its socket is closed."""
KILLED_S = 2.0
"""How long the kernel may take to end a process that was killed; one that it cannot end is left to it."""

News = StepBatch | Snapshot | Heartbeat


class EngineStartError(HeadwayError):
    """The engine process ended before it was ready. The message is for the operator."""

    http_status = 503


class EngineConnection(asyncio.Protocol):
    """A process and the socket to it."""

    def __init__(self, on_news: Callable[[News], None], on_lost: Callable[[EngineConnection], None]) -> None:
        """`on_lost` is called once, as soon as no more news can come, also if the engine never got ready."""
        self.lost = asyncio.Event()
        self.pid = 0
        self._on_news = on_news
        self._on_lost = on_lost
        self._frames = FrameReader()
        self._ready: asyncio.Future[EngineReady] = asyncio.get_running_loop().create_future()
        self._process: asyncio.subprocess.Process | None = None
        self._transport: asyncio.Transport | None = None

    async def open(self, start: Start, *, factory: str | None) -> EngineReady:
        """Spawn the process and wait until it is ready. If anything goes wrong, nothing of it stays behind."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = await _spawn(theirs, factory)
            self.pid = self._process.pid
            await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
            self.send(start)
            return await self._ready
        except BaseException:
            if self._transport is None:  # which would own the socket
                ours.close()
            await self.end()
            raise

    def send(self, message: Any) -> None:
        """Hand a message to the socket; never blocks. What cannot be packed raises, and nothing is sent."""
        frame = pack(message)
        if self._transport is not None:
            self._transport.write(frame)

    def kill(self) -> None:
        """End the process without asking it, also one that is stopped. `on_lost` follows at once."""
        if self._transport is not None:
            self._transport.abort()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def wait_for_exit(self) -> int | None:
        """The exit status; None if there never was a process."""
        return None if self._process is None else await self._process.wait()

    async def end(self, grace_s: float = 0.0) -> int | None:
        """Wait so long for the process to exit, then kill it. Returns the exit status, if there is one."""
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self.wait_for_exit(), grace_s)
        self.kill()
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self.wait_for_exit(), KILLED_S)
        logger.error("the engine process %d does not end although it was killed", self.pid)
        return None

    # ---- called by the event loop ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is in the event loop."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Take whole messages out of what came."""
        try:
            for payload in self._frames.feed(data):
                self._take(decode_from_engine(payload))
        except (BrokenFrameError, msgspec.DecodeError) as error:
            logger.error("the engine process sent something that is no message (%s); it is ended", error)
            self.kill()

    def connection_lost(self, error: Exception | None) -> None:
        """The process closed its end, or died."""
        self._transport = None
        if not self._ready.done():
            self._ready.set_exception(EngineStartError("The engine process ended while it was starting."))
            self._ready.exception()  # whoever opened this may have been cancelled: then nobody looks at it
        self.lost.set()
        self._on_lost(self)

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, EngineReady):
            self._ready.set_result(message)
        elif isinstance(message, StartUpFailed):
            self._ready.set_exception(EngineStartError(message.message))
        else:
            self._on_news(message)


async def _spawn(inherited: socket.socket, factory: str | None) -> asyncio.subprocess.Process:
    """The child gets one end of the socket pair, no input, and the front end's standard error for its log. Only for the
    sake of a factory does it look for modules in the working directory."""
    command = ["-m", "headway.rpc.engine_process", "--fd", str(inherited.fileno())]
    command = ["-P", *command] if factory is None else [*command, "--factory", factory]
    return await asyncio.create_subprocess_exec(
        sys.executable, *command, stdin=asyncio.subprocess.DEVNULL, pass_fds=(inherited.fileno(),)
    )
