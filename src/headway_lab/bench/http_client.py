"""A small HTTP/1.1 client for load: many streams at once on one event loop, each piece stamped when it arrives.

General clients pass every event of a stream through several layers and a task switch. At thousands of tokens a second
that is more work than the server's, and the measured times include the client's queues. Here the transport's own
callback reads the clock and passes the bytes on. The parsers take bytes and know no sockets, so every way to split a
response can be tested. They support what a load generator meets: one response after another on a connection, with a
length, in chunks, or until its end.
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

MAX_HEAD_BYTES = 65_536
_BLANK_LINE = b"\r\n\r\n"

CONNECT_TIMEOUT_S = 30.0
MAX_OPEN_FILES = 10_240
OnBody = Callable[[bytes, float], None]
"""Called with (a piece of the body, when it arrived on `time.perf_counter`)."""


class BadResponseError(Exception):
    """The bytes that arrived are not HTTP."""


class ResponseParser:
    """Parses one response. `feed` takes bytes as they arrive and returns those of the body."""

    def __init__(self) -> None:
        self.status = 0
        """The status; 0 until the head has arrived."""
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self._buffer = bytearray()
        self._chunks: _ChunkDecoder | None = None
        self._num_left: int | None = None
        """Bytes of the body that have not arrived, if its length is known."""

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection can carry another exchange after this one."""
        is_framed = self._chunks is not None or self._num_left is not None
        return self.is_complete and is_framed and self.headers.get("connection", "").lower() != "close"

    @property
    def has_begun(self) -> bool:
        """Whether any byte of the response has arrived."""
        return bool(self.status or self._buffer)

    def feed(self, data: bytes) -> bytes:
        """Take bytes as they arrive; `BadResponseError` if they are not HTTP."""
        if self.status:
            return self._body(data)
        self._buffer += data
        end = self._buffer.find(_BLANK_LINE)
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise BadResponseError("its head has no end")
            return b""
        head, rest = bytes(self._buffer[:end]), bytes(self._buffer[end + len(_BLANK_LINE) :])
        self._buffer.clear()
        self._read_head(head)
        if self.status < 200:  # "continue", and others that only announce a response
            self.status = 0
            self.headers.clear()
            return self.feed(rest)
        return self._body(rest)

    def end(self) -> bool:
        """Call it when the connection has ended; it returns whether the response is complete."""
        if self.status and self._chunks is None and self._num_left is None:
            self.is_complete = True
        return self.is_complete

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise BadResponseError(f"it begins with {first[:40]!r}")
        self.status = int(rest[:3])
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._chunks = _ChunkDecoder()
        elif self.status in (204, 304):
            self._num_left = 0
        elif "content-length" in self.headers:
            length = self.headers["content-length"]
            if not length.isdigit():
                raise BadResponseError(f"its length is {length[:40]!r}")
            self._num_left = int(length)

    def _body(self, data: bytes) -> bytes:
        if self._chunks is not None:
            body = self._chunks.feed(data)
            self.is_complete = self._chunks.is_complete
            return body
        if self._num_left is not None:
            data = data[: self._num_left]
            self._num_left -= len(data)
            self.is_complete = self._num_left == 0
        return data


class _ChunkDecoder:
    """Decodes a body in chunks. Each chunk is its length in hexadecimal, a line end, that many bytes, and a line end;
    one of length 0 ends the body, after which trailers may come."""

    def __init__(self) -> None:
        self.is_complete = False
        self._buffer = b""
        self._in_trailers = False

    def feed(self, data: bytes) -> bytes:
        data = self._buffer + data if self._buffer else data
        pieces, place = [], 0
        while not self.is_complete:
            line_end = data.find(b"\r\n", place)
            if line_end < 0:
                break
            if self._in_trailers:
                self.is_complete = line_end == place
                place = line_end + 2
                continue
            size = _chunk_size(data[place:line_end])
            if size == 0:
                self._in_trailers, place = True, line_end + 2
                continue
            start = line_end + 2
            if len(data) < start + size + 2:
                break
            pieces.append(data[start : start + size])
            place = start + size + 2
        self._buffer = data[place:]
        return b"".join(pieces)


def _chunk_size(line: bytes) -> int:
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:
        raise BadResponseError(f"a chunk's length is {line[:40]!r}") from None


class EventParser:
    """Parses server-sent events, and returns the data of each event whose blank line has arrived."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, body: bytes) -> list[bytes]:
        """Take a piece of the body; return the events that are complete now."""
        events = []
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].lstrip(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events


class ServerUnreachableError(HeadwayError):
    """No server answers at this address, or it does not answer as it should."""


@dataclass(frozen=True)
class Address:
    host: str
    port: int
    is_tls: bool
    prefix: str
    """The prefix of every path."""

    @classmethod
    def of(cls, url: str) -> Address:
        """Parse a URL; `ConfigError` if it is not one of HTTP."""
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
    """A complete response."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass
class _Exchange:
    """One request on a connection, until its response is complete."""

    done: asyncio.Future[None]
    on_body: OnBody | None
    parser: ResponseParser = field(default_factory=ResponseParser)
    kept: list[bytes] = field(default_factory=list)
    """The body, if there is no `on_body`."""


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
            self.abort()  # bytes without a request
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
    """Raise the limit of open files, which is 1,024 on most systems: every stream is one."""
    try:
        import resource
    except ImportError:  # not a Unix
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class HttpClient:
    """Sends requests to one server. Connections are reused; there are as many as concurrent requests."""

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
        """Send a request and return its response. With `on_body`, the body of a response with status 200 is passed to
        it as it arrives. Raises `OSError` and `BadResponseError` if the exchange fails."""
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
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().abort()

    def _request(self, method: str, path: str, body: bytes | None) -> bytes:
        head = f"{method} {self.address.prefix}{path} HTTP/1.1\r\n".encode("latin-1") + self._headers
        if body is None:
            return head + b"\r\n"
        return head + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    async def _connection(self) -> tuple[_Connection, bool]:
        """Return (a connection, whether it is new)."""
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
