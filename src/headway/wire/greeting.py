"""How a TCP connection between two machines begins: each end says which messages it speaks, and proves that it knows
the secret without sending it. What follows is not encrypted."""

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
    modules = [sys.modules[part.__module__] for part in (Start, Delivered, SamplingParams, RequestOptions)]
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
