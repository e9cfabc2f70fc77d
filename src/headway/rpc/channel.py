"""The socket between the front end and the engine process: frames, and the two ends of it.

    front end   EngineConnection   asyncio; spawns the process, hands over each message as it arrives
    engine      EngineChannel      blocking only where it is told to; what cannot be sent at once is kept and sent later

A frame is the length of a message as four bytes, then its msgpack. The two processes share a pair of connected Unix
sockets and nothing else: if one of them dies, the kernel closes its end and the other one learns of it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from headway.errors import EngineStartError, HeadwayError
from headway.rpc.messages import (
    CacheNews,
    EngineReady,
    FromEngine,
    Heartbeat,
    Snapshot,
    Start,
    StartUpFailed,
    StepBatch,
    ToEngine,
    UnreadableRequest,
    decode_from_engine,
    decode_to_engine,
    encode,
)

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 256 * 2**20
"""More than any message can be; a longer one means that the two ends no longer agree where frames begin."""
RECEIVE_BYTES = 2**20
MAX_UNSENT_BYTES = 64 * 2**20
"""How far the front end may lag behind before the engine waits for it."""
EXIT_GRACE_S = 3.0
"""How long a process may take to exit, beyond what it was given to drain or once its socket is closed."""
KILLED_S = 2.0
"""How long the kernel may take to end a process that was killed; one that it cannot end is left to it."""
News = StepBatch | Snapshot | CacheNews | Heartbeat
_LENGTH = struct.Struct("<I")


class BrokenFrameError(HeadwayError):
    """What came over the socket is not a message. Nothing after it can be trusted."""


def pack(message: Any) -> bytes:
    """A message as one frame."""
    payload = encode(message)
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._rest = b""  # the beginning of a frame whose end has not come

    def feed(self, data: bytes) -> list[memoryview]:
        """Take the next bytes; returns the payloads they complete, good until their last reference goes."""
        buffer = self._rest + data if self._rest else data
        view = memoryview(buffer)
        payloads = []
        start, size = 0, len(buffer)
        while size - start >= _LENGTH.size:
            length = _LENGTH.unpack_from(buffer, start)[0]
            if length > MAX_FRAME_BYTES:
                raise BrokenFrameError(f"a frame claims to have {length:,} bytes")
            end = start + _LENGTH.size + length
            if end > size:
                break
            payloads.append(view[start + _LENGTH.size : end])
            start = end
        self._rest = bytes(view[start:])
        return payloads


class ChannelClosedError(Exception):
    """The front end has closed its end, or is gone."""


class EngineChannel:
    """The engine process's end: whole messages, in order, over a connected socket.

    One thread receives; any may send.
    """

    def __init__(self, connection: socket.socket, *, wakeup: socket.socket | None = None) -> None:
        """Bytes that arrive on `wakeup` end a wait; they mean nothing else."""
        connection.setblocking(False)
        self._socket = connection
        self._wakeup = wakeup
        self._frames = FrameReader()
        self._unsent = bytearray()
        self._sending = threading.Lock()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        if wakeup is not None:
            wakeup.setblocking(False)
            self._poll.register(wakeup, select.POLLIN)

    def receive(self, *, timeout_s: float) -> list[ToEngine | UnreadableRequest]:
        """All messages that are there; if there are none, wait for one at most `timeout_s`.

        Raises `ChannelClosedError`; and `BrokenFrameError` or `msgspec.DecodeError` for what is no message.
        """
        messages: list[ToEngine | UnreadableRequest] = []
        while self._wait_for_input(0.0 if messages else timeout_s):
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                break
            except ConnectionError as error:
                raise ChannelClosedError from error
            if not data:
                raise ChannelClosedError
            messages += [decode_to_engine(payload) for payload in self._frames.feed(data)]
        return messages

    def send(self, message: FromEngine) -> None:
        """Queue a message and send as much as goes without waiting. Raises `ChannelClosedError`."""
        frame = pack(message)
        with self._sending:
            self._unsent += frame
        self._send_some()
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self.flush(timeout_s=float("inf"))

    def flush(self, *, timeout_s: float) -> bool:
        """Wait until everything is sent, at most `timeout_s`. Returns whether it was."""
        deadline_s = time.monotonic() + timeout_s
        writable = select.poll()
        writable.register(self._socket, select.POLLOUT)
        while self._unsent and (left_s := deadline_s - time.monotonic()) > 0:
            writable.poll(min(left_s, 1.0) * 1e3)
            self._send_some()
        return not self._unsent

    def close(self) -> None:
        """Let the front end know that nothing more comes."""
        self._socket.close()

    def _wait_for_input(self, timeout_s: float) -> bool:
        """Whether the front end has sent something (or has gone), after waiting at most `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            if self._unsent:
                self._poll.modify(self._socket, select.POLLIN | select.POLLOUT)
            events = dict(self._poll.poll(max(0.0, deadline_s - time.monotonic()) * 1e3))
            if self._unsent:
                self._poll.modify(self._socket, select.POLLIN)
                self._send_some()
            happened = events.get(self._socket.fileno(), 0)
            if happened & ~select.POLLOUT:
                return True
            if self._wakeup is not None and self._wakeup.fileno() in events:
                with contextlib.suppress(BlockingIOError):
                    self._wakeup.recv(RECEIVE_BYTES)
                return False
            if not events or (timeout_s == 0.0):
                return False

    def _send_some(self) -> None:
        try:
            with self._sending:
                while self._unsent:
                    num_sent = self._socket.send(self._unsent)
                    del self._unsent[:num_sent]
        except BlockingIOError:
            pass
        except ConnectionError as error:
            raise ChannelClosedError from error


class EngineConnection(asyncio.Protocol):
    """The front end's end: one life of the engine process (spawned, ready, gone) and the socket to it."""

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

    async def open(
        self, start: Start, *, factory: str | None, environment: Mapping[str, str] | None = None
    ) -> EngineReady:
        """Spawn the process, with this added to the environment, and wait until it is ready. If anything goes wrong,
        nothing of it stays behind."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = await _spawn(theirs, factory, environment or {})
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
        """Wait `grace_s` for the process to exit, then kill it. Returns the exit status, if there is one."""
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
    """The child gets one end of the socket pair, no input, and the front end's standard error for its log. It looks for
    modules in the working directory only if it has to find a factory."""
    command = ["-m", "headway.rpc.engine_process", "--fd", str(inherited.fileno())]
    command = ["-P", *command] if factory is None else [*command, "--factory", factory]
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=(inherited.fileno(),),
        env={**os.environ, **environment},
    )
