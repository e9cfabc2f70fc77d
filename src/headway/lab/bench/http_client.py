"""A small HTTP/1.1 client for load: many streams at once on one event loop, each piece stamped when it arrives.

General clients pass every event of a stream through several layers and a task switch; at thousands of tokens a second
that is more work than the server's, and their queues are in the measured times. Here the transport's own callback looks
at the clock and hands the bytes on.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

from headway.errors import ConfigError, HeadwayError
from headway.lab.bench.http1 import ResponseParser

CONNECT_TIMEOUT_S = 30.0
MAX_OPEN_FILES = 10_240
OnBody = Callable[[bytes, float], None]
"""(a piece of the body, when it came on `time.perf_counter`)"""


class ServerUnreachableError(HeadwayError):
    """There is no server, or not one that answers as it should."""


@dataclass(frozen=True)
class Address:
    """Where a server is."""

    host: str
    port: int
    is_tls: bool
    prefix: str
    """What stands before every path."""

    @classmethod
    def of(cls, url: str) -> Address:
        """`ConfigError` if it is not one of HTTP."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(f"The server's address must be one such as http://127.0.0.1:8000, not '{url}'.")
        is_tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if is_tls else 80), is_tls, parts.path.rstrip("/"))

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass
class Response:
    """A response whose body has ended."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass
class _Exchange:
    """One request on a connection, until its response is whole."""

    done: asyncio.Future[None]
    on_body: OnBody | None
    parser: ResponseParser = field(default_factory=ResponseParser)
    kept: list[bytes] = field(default_factory=list)
    """The body, where nobody takes it piece by piece."""


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._exchange: _Exchange | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, request: bytes, on_body: OnBody | None) -> _Exchange:
        """Send a request and wait for the end of its response."""
        assert self._transport is not None
        self._exchange = exchange = _Exchange(asyncio.get_running_loop().create_future(), on_body)
        self._transport.write(request)
        try:
            await exchange.done
        except BaseException:
            self.abort()
            raise
        finally:
            self._exchange = None
        return exchange

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one without being derived from it

    def data_received(self, data: bytes) -> None:
        at_s = time.perf_counter()
        exchange = self._exchange
        if exchange is None or exchange.done.done():
            self.abort()  # nobody asked
            return
        try:
            body = exchange.parser.feed(data)
            if body and exchange.on_body is not None and exchange.parser.status == 200:
                exchange.on_body(body, at_s)
            elif body:
                exchange.kept.append(body)
        except Exception as error:
            exchange.done.set_exception(error)
            return
        if exchange.parser.is_complete:
            exchange.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        exchange = self._exchange
        if exchange is None or exchange.done.done():
            return
        if exchange.parser.end():
            exchange.done.set_result(None)
        else:
            when = "in the middle of the answer" if exchange.parser.has_begun else "before it answered"
            exchange.done.set_exception(ConnectionResetError(f"the server closed the connection {when}"))


def allow_many_connections() -> None:
    """Every stream is an open file, of which most systems allow 1,024 unless asked."""
    try:
        import resource
    except ImportError:  # not a Unix
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class HttpClient:
    """Requests to one server. Connections are used again; there are as many as requests at the same time."""

    def __init__(self, address: Address, headers: Mapping[str, str] | None = None) -> None:
        self.address = address
        self._tls = ssl.create_default_context() if address.is_tls else None
        lines = {"host": address.host_header, "accept": "*/*", **(headers or {})}
        try:
            self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode("latin-1")
        except UnicodeEncodeError:
            raise ConfigError("The API key cannot be sent: it has characters that no header may have.") from None
        if b"\n" in self._headers.replace(b"\r\n", b""):
            raise ConfigError("The API key cannot be sent: it has a line break in it.")
        self._idle: list[_Connection] = []

    async def send(
        self, method: str, path: str, body: bytes | None = None, *, on_body: OnBody | None = None
    ) -> Response:
        """One exchange. With `on_body`, the body of a response with status 200 goes there as it comes. `OSError` and
        `BadResponseError` say what went wrong on the way."""
        request = self._request(method, path, body)
        connection, is_new = await self._connection()
        try:
            exchange = await connection.exchange(request, on_body)
        except ConnectionResetError as error:
            if is_new or "before it answered" not in str(error):
                raise
            # An idle connection that the server had given up meanwhile. Once more, on a fresh one.
            connection = await self._connect()
            exchange = await connection.exchange(request, on_body)
        parser = exchange.parser
        if parser.keeps_alive and connection.is_open:
            self._idle.append(connection)
        else:
            connection.abort()
        return Response(parser.status, parser.headers, b"".join(exchange.kept))

    def close(self) -> None:
        """Give up the connections that nobody uses."""
        while self._idle:
            self._idle.pop().abort()

    def _request(self, method: str, path: str, body: bytes | None) -> bytes:
        head = f"{method} {self.address.prefix}{path} HTTP/1.1\r\n".encode("latin-1") + self._headers
        if body is None:
            return head + b"\r\n"
        return head + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    async def _connection(self) -> tuple[_Connection, bool]:
        """(a connection, whether it is fresh)"""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection, False
        return await self._connect(), True

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    _Connection, self.address.host, self.address.port, ssl=self._tls
                )
        except TimeoutError:
            raise OSError(f"no connection within {CONNECT_TIMEOUT_S:g} s") from None
        return connection
