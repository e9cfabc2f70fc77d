"""The greeting at the start of a TCP connection between two machines. Each end names its message version, and proves
that it knows the secret without sending it. The messages that follow are not encrypted."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import importlib.metadata
import inspect
import os
import socket
import sys
import time
from typing import TypeVar

import msgspec

from headway.core.request_options import RequestOptions
from headway.errors import HeadwayError
from headway.outputs import Delivered
from headway.sampling_params import SamplingParams
from headway.wire.frames import LENGTH, pack
from headway.wire.messages import (
    Start,
)

SECRET_VARIABLE = "HEADWAY_SECRET"
"""The environment variable that holds the secret of an engine that listens."""
GREETING_S = 10.0
"""The longest that the whole greeting may take."""
MAX_GREETING_BYTES = 4096
DEAD_PEER_MS = 10_000
"""If sent data is not acknowledged for this long, the other machine counts as gone."""
NONCE_BYTES = 32


class RefusedError(HeadwayError):
    """This end refuses the other one, or was refused by it."""


class Hello(msgspec.Struct, tag=True):
    """The first message: versions and a nonce."""

    version: str
    protocol: str
    nonce: bytes


class Proof(msgspec.Struct, tag=True):
    """The proof that the sender knows the secret."""

    code: bytes


class Refusal(msgspec.Struct, tag=True):
    """The connection is refused."""

    reason: str


_Greeting = TypeVar("_Greeting", Hello, Proof)
_decode_greeting = msgspec.msgpack.Decoder(Hello | Proof | Refusal).decode


@functools.cache
def protocol() -> str:
    """A hash of the messages' source code. It changes whenever their definitions may have changed."""
    modules = [sys.modules[part.__module__] for part in (Start, Delivered, SamplingParams, RequestOptions)]
    return hashlib.sha256("".join(map(inspect.getsource, modules)).encode()).hexdigest()[:16]


def _version() -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("headway")
    return "not installed"


def greet(connection: socket.socket, secret: bytes, *, is_engine: bool) -> None:
    """Check that the other end has the same message version and knows the secret. Takes at most `GREETING_S`. Raises
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
    """Receive the next message, and not a byte more: the following bytes are for another reader."""
    length = LENGTH.unpack(_receive_exactly(connection, LENGTH.size, deadline_s))[0]
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
    """Connect to an engine that listens there. Blocks. Raises `RefusedError` and `OSError`."""
    connection = socket.create_connection((host, port), timeout=GREETING_S)
    try:
        prepare_tcp(connection)
        greet(connection, secret, is_engine=False)
    except BaseException:
        connection.close()
        raise
    return connection


def prepare_tcp(connection: socket.socket) -> None:
    """Set socket options so that small messages are sent at once and a lost machine is noticed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PEER_MS)
