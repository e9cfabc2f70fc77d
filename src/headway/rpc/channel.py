"""The socket between the front end and the engine process: frames, and the two ends of it.

    front end   EngineConnection   asyncio; gets the process from its home, hands over each message as it arrives
    engine      EngineChannel      blocking only where it is told to; what cannot be sent at once is kept and sent later

A frame is the length of a message as four bytes, then its msgpack. On one machine the two processes share a pair of
connected Unix sockets and nothing else: if one of them dies, the kernel closes its end and the other one learns of it
at once.

Between machines it is a TCP connection, which begins with a greeting: each end says which messages it speaks, and
proves that it knows the secret without sending it. What follows is not encrypted.

    engine  ──  Hello(version, protocol, nonce) ──►  front end
            ◄── Hello(version, protocol, nonce)  ──
            ◄── Proof(HMAC of both nonces)       ──
            ──  Proof, or Refusal with a reason  ──►
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import hmac
import importlib.metadata
import inspect
import logging
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import msgspec

from headway.child_process import python_command
from headway.core.request_options import RequestOptions
from headway.errors import EngineStartError, HeadwayError
from headway.outputs import Told
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
from headway.sampling_params import SamplingParams

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


# ---- the greeting ---------------------------------------------------------------------------------------------------

GREETING_S = 10.0
"""How long the other end may take for all of it."""
MAX_GREETING_BYTES = 4096
DEAD_PEER_MS = 10_000
"""What was sent and is not acknowledged for so long: the other machine is gone."""
NONCE_BYTES = 32


class RefusedError(HeadwayError):
    """The other end is not one to talk to, or says so of this one."""


class Hello(msgspec.Struct, tag=True):
    """Who speaks."""

    version: str
    protocol: str
    nonce: bytes


class Proof(msgspec.Struct, tag=True):
    """That the secret is known."""

    code: bytes


class Refusal(msgspec.Struct, tag=True):
    """There will be no connection."""

    reason: str


_Greeting = TypeVar("_Greeting", Hello, Proof)
_decode_greeting = msgspec.msgpack.Decoder(Hello | Proof | Refusal).decode


@functools.cache
def protocol() -> str:
    """Changes with whatever the messages are made of."""
    modules = [sys.modules[part.__module__] for part in (Start, Told, SamplingParams, RequestOptions)]
    return hashlib.sha256("".join(map(inspect.getsource, modules)).encode()).hexdigest()[:16]


def _version() -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("headway")
    return "not installed"


def greet(connection: socket.socket, secret: bytes, *, is_engine: bool) -> None:
    """Make sure that the other end speaks the same messages and knows the secret. Takes `GREETING_S` at most; raises
    `RefusedError`, or `OSError` if the connection breaks."""
    deadline_s = time.monotonic() + GREETING_S
    own = Hello(_version(), protocol(), os.urandom(NONCE_BYTES))
    if is_engine:
        _say(connection, own)
    other = _hear(connection, Hello, deadline_s)
    if not is_engine:
        _say(connection, own)
    nonces = (own.nonce + other.nonce) if is_engine else (other.nonce + own.nonce)

    def proof(of_engine: bool) -> bytes:
        return hmac.digest(secret, (b"engine" if of_engine else b"front end") + nonces, "sha256")

    if not is_engine:
        _check_versions(own, other)
        _say(connection, Proof(proof(False)))
    try:
        if is_engine:
            _check_versions(own, other)
        if not hmac.compare_digest(_hear(connection, Proof, deadline_s).code, proof(not is_engine)):
            raise RefusedError("the other end has another secret")
    except RefusedError as error:
        if is_engine:
            with contextlib.suppress(OSError):
                _say(connection, Refusal(str(error)))
        raise
    if is_engine:
        _say(connection, Proof(proof(True)))
    connection.settimeout(None)


def _check_versions(own: Hello, other: Hello) -> None:
    if own.protocol != other.protocol or len(other.nonce) != NONCE_BYTES:
        raise RefusedError(
            f"the other end has Headway {other.version}, messages {other.protocol}, and this one {own.version}, "
            f"messages {own.protocol}"
        )


def _say(connection: socket.socket, message: Hello | Proof | Refusal) -> None:
    connection.settimeout(GREETING_S)
    connection.sendall(pack(message))


def _hear(connection: socket.socket, kind: type[_Greeting], deadline_s: float) -> _Greeting:
    """The next message, byte for byte: what follows it belongs to others."""
    length = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size, deadline_s))[0]
    if length > MAX_GREETING_BYTES:
        raise RefusedError("the other end does not speak as Headway does")
    try:
        message = _decode_greeting(_receive_exactly(connection, length, deadline_s))
    except msgspec.DecodeError as error:
        raise RefusedError("the other end does not speak as Headway does") from error
    if isinstance(message, Refusal):
        raise RefusedError(f"the other end refuses: {message.reason}")
    if not isinstance(message, kind):
        raise RefusedError("the other end does not speak as Headway does")
    return message


def _receive_exactly(connection: socket.socket, num_bytes: int, deadline_s: float) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the other end has not finished its greeting")
        connection.settimeout(left_s)
        more = connection.recv(num_bytes - len(data))
        if not more:
            raise ConnectionResetError("the other end closed the connection")
        data += more
    return bytes(data)


def dial(host: str, port: int, secret: bytes) -> socket.socket:
    """A connection to an engine that listens there. Blocks; raises `RefusedError` and `OSError`."""
    connection = socket.create_connection((host, port), timeout=GREETING_S)
    try:
        prepare_tcp(connection)
        greet(connection, secret, is_engine=False)
    except BaseException:
        connection.close()
        raise
    return connection


def prepare_tcp(connection: socket.socket) -> None:
    """Tokens are sent at once, and a machine that is gone is noticed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PEER_MS)


# ---- the engine's end -----------------------------------------------------------------------------------------------


class ChannelClosedError(Exception):
    """The front end has closed its end, or is gone."""


class EngineChannel:
    """The engine process's end: whole messages, in order, over a connected socket.

    One thread receives; any may send.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        wakeup: socket.socket | None = None,
        waker: socket.socket | None = None,
        waits_for_reader: bool = True,
    ) -> None:
        """Bytes that arrive on `wakeup` end a wait; they mean nothing else. `waker` is its other end, which does not
        block. A front end that reads too slowly is waited for, or given up."""
        connection.setblocking(False)
        self._socket = connection
        self._waits_for_reader = waits_for_reader
        self._wakeup = wakeup
        self._waker = waker
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
            except OSError as error:
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
            if not self._waits_for_reader:
                raise ChannelClosedError("it does not read what it is sent")
            self.flush(timeout_s=float("inf"))

    def wake(self) -> None:
        """End a wait of `receive`. For any thread."""
        if self._waker is not None:
            with contextlib.suppress(OSError):  # it is full, so the wait ends anyway; or closed
                self._waker.send(b".")

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

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What to poll, to know when `receive` has something to do."""
        return tuple(each.fileno() for each in (self._socket, self._wakeup) if each is not None)

    @property
    def has_unsent(self) -> bool:
        """Whether `receive` would also send something."""
        return bool(self._unsent)

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
        except OSError as error:
            raise ChannelClosedError from error


# ---- the front end's ------------------------------------------------------------------------------------------------


class EngineProcess(Protocol):
    """What a connection knows of the process behind it."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def kill(self) -> None:
        """End it without asking; does not block."""

    async def wait(self) -> int:
        """Until it has ended."""


class Home(Protocol):
    """Where an engine process comes from."""

    @property
    def is_shared(self) -> bool:
        """Whether others may use the process, too: it is left alone, unless it hangs."""

    @property
    def num_gpus(self) -> int:
        """That the engine has, where that is known."""

    async def open(self, start: Start) -> tuple[socket.socket, EngineProcess]:
        """A process that waits for its first message, and the connection to it. `EngineStartError` if there is none.
        `start`: which engine it is to be, or must be already."""


@dataclass(frozen=True)
class LocalHome:
    """A process of this machine, started for this front end."""

    factory: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's."""
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
    """The front end's end: one life of the engine process (started, ready, gone) and the socket to it."""

    def __init__(self, on_news: Callable[[News], None], on_lost: Callable[[EngineConnection], None]) -> None:
        """`on_lost` is called once, as soon as no more news can come, also if the engine never got ready."""
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
        """Get a process and wait until it is ready. If anything goes wrong, nothing of it stays behind."""
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
        """Hand a message to the socket; never blocks. What cannot be packed raises, and nothing is sent."""
        frame = pack(message)
        if self._transport is not None:
            self._transport.write(frame)

    def kill(self) -> None:
        """End the process without asking it, also one that is stopped. `on_lost` follows at once."""
        if self._is_shared and self._transport is None:
            return
        if self._transport is not None:
            self._transport.abort()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def wait_for_exit(self) -> int | None:
        """The exit status; None if it cannot be known."""
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
    """The child gets one end of the socket pair, no input, and the front end's standard error for its log."""
    command = python_command("headway.rpc.engine_process", "--fd", str(inherited.fileno()))
    return await asyncio.create_subprocess_exec(
        *command,
        *([] if factory is None else ["--factory", factory]),
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=(inherited.fileno(),),
        env={**os.environ, **environment},
    )
