"""The server on a real socket: what is too large, too slow or too many, clients that leave, the port."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from headway.errors import ConfigError
from headway.server.http.asgi_io import send_json
from headway.server.http.http_server import DrainingServer, Finish, bind, create_server
from headway.server.server_config import ServerConfig
from tests.unit.server.fake_engine import FakeEngine, FakeServer, until

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def no_finish(left_s: float) -> None:
    """There is no engine that has to end."""


@contextlib.asynccontextmanager
async def listening(
    fake: FakeServer, finish: Finish = no_finish, *, num_files: int = 1000
) -> AsyncIterator[tuple[DrainingServer, int]]:
    config, drain = fake.services.config, fake.services.drain
    listener = bind(config)
    server = create_server(fake.app, config, drain, finish, num_files=num_files)
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    port = listener.getsockname()[1]
    await until(lambda: server.started)
    try:
        yield server, port
    finally:
        if not drain.is_asked:
            drain.ask(lame_duck=False)
        await task


class Client:
    """A kept connection."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Client:
        self.reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def ask(self, data: bytes) -> tuple[int, bytes, Any]:
        """Status, head in lower case, and the JSON of a whole answer."""
        self._writer.write(data)
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        body = await self.reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r")[0]))
        return int(head[9:12]), head, json.loads(body)

    async def is_closed(self) -> bool:
        return await self.reader.read() == b""


async def talk(port: int, *pieces: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
    with contextlib.suppress(ConnectionError):
        return await reader.read(4096)
    return b""


HEAD = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
JSON_HEAD = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def post(body: bytes) -> bytes:
    return JSON_HEAD.replace(b"/tokenize", b"/v1/completions") + b"content-length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize(
    ("pieces", "begins"),
    [
        ([HEAD + b"\r\n"], b"HTTP/1.1 200"),
        ([HEAD + b"a: " + b"x" * 3000 + b"\r\n\r\n"], b"HTTP/1.1 431"),
        ([HEAD + b"".join(b"a%d: x\r\n" % number for number in range(1000)) + b"\r\n"], b"HTTP/1.1 431"),
        ([HEAD + b"a: ", *[b"x" * 1000] * 4], b"HTTP/1.1 431"),
        ([JSON_HEAD + b"content-length: 9000\r\n\r\n" + b" " * 9000], b"HTTP/1.1 400"),
        ([b"nonsense\r\n\r\n"], b"HTTP/1.1 400 Bad Request\r\n"),
    ],
)
async def test_heads_are_bounded_in_size(pieces: list[bytes], begins: bytes) -> None:
    async with listening(FakeServer(port=0, max_header_bytes=2048)) as (_, port):
        assert (await talk(port, *pieces)).startswith(begins)


async def test_a_head_of_very_many_small_headers_takes_no_long_time() -> None:
    async with listening(FakeServer(port=0, max_header_bytes=2**20)) as (_, port):
        head = HEAD + b"a:\r\n" * 100_000 + b"\r\n"
        async with asyncio.timeout(5):
            assert (await talk(port, head)).startswith(b"HTTP/1.1 200")


async def test_heads_are_bounded_in_time() -> None:
    async with listening(FakeServer(port=0, receive_timeout_s=0.05)) as (_, port):
        assert await talk(port) == b""  # says nothing
        assert await talk(port, HEAD, b"a:", b"b") == b""  # never ends
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):  # a connection that is kept open between requests is not a slow head
            writer.write(HEAD + b"\r\n")
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.1)
        writer.close()


CHUNKED = JSON_HEAD + b"transfer-encoding: chunked\r\n\r\n"
ENDLESS = {
    "a trailer": (CHUNKED + b"0\r\nX: ", b"a" * 4096),
    "trailers": (CHUNKED + b"0\r\n", b"X: a\r\n" * 600),
    "a chunk's extension": (CHUNKED + b"5;", b"a" * 4096),
    "chunk extensions": (CHUNKED, b"1;aaaaaaaaaaaaaaaa=aaaaaaaaaaaaaaaa\r\na\r\n" * 100),
    "tiny chunks": (CHUNKED, b"1\r\na\r\n" * 600),
    "a declared body": (JSON_HEAD + b"content-length: 1000000000\r\n\r\n", b" " * 65536),
}


async def push(port: int, start: bytes, piece: bytes, *, most: int) -> tuple[int, bytes]:
    """Send a piece over and over until the server has closed the connection; how much it took, and what it said."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(start)
    num_sent = 0
    with contextlib.suppress(ConnectionError):
        while num_sent < most and not writer.is_closing():
            writer.write(piece)
            num_sent += len(piece)
            await writer.drain()
            await asyncio.sleep(0)
    assert num_sent < most, "the connection was not closed"
    with contextlib.suppress(ConnectionError):
        return num_sent, await reader.read()
    return num_sent, b""


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("path", [b"/tokenize", b"/nothing"])
async def test_what_surrounds_a_body_and_follows_an_answer_is_bounded(kind: str, path: bytes) -> None:
    start, piece = ENDLESS[kind]
    async with listening(FakeServer(port=0, max_header_bytes=2048, max_body_bytes=4096)) as (_, port):
        await push(port, start.replace(b"/tokenize", path), piece, most=2**25)


async def test_trailers_are_no_headers() -> None:
    """What a client appends to its body must not reach routes as if it had come with the request."""
    seen: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        seen.extend(name for name, _ in scope["headers"])
        await send_json(send, {})

    fake = FakeServer(port=0)
    fake.app = app
    async with listening(fake) as (_, port):
        body = b"2\r\n{}\r\n0\r\nauthorization: Bearer k\r\n\r\n"
        assert (await talk(port, CHUNKED, body)).startswith(b"HTTP/1.1 200")
    assert seen == [b"host", b"content-type", b"transfer-encoding"]


@pytest.mark.parametrize("line", [b"POST /nothing", b"GET /health", b"POST /tokenize", b""])
async def test_bodies_are_bounded_in_time_whatever_was_answered_and_so_are_empty_lines(line: bytes) -> None:
    head, piece = JSON_HEAD.replace(b"POST /tokenize", line) + b"content-length: 100000\r\n\r\n", b" "
    if not line:
        head, piece = HEAD + b"\r\n", b"\r\n"
    async with listening(FakeServer(port=0, receive_timeout_s=0.05)) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(5):
                while not reader.at_eof():
                    writer.write(piece)  # now and then
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(reader.read(4096), 0.02)
        writer.close()


async def test_an_answer_that_is_not_read_is_given_up() -> None:
    """A client that asks for much and reads nothing: its connection and what is held for it go."""
    fake = FakeServer(FakeEngine(manual=True), port=0, receive_timeout_s=0.2)
    async with streaming(fake) as (_, writer):
        writer.transport.pause_reading()
        while not fake.engine.aborted:
            await fake.engine.answer("x" * 100_000)
            await asyncio.sleep(0.01)


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with listening(FakeServer(port=0)) as (_, port), Client(port) as client:
        paths = (b"/version", b"/health", b"/nothing", b"/v1/models")
        asked = b"".join(b"GET %s HTTP/1.1\r\nhost: localhost\r\n\r\n" % path for path in paths)
        answers = [await client.ask(data) for data in (asked, b"", b"", b"")]
    for (_, _, body), word in zip(answers, ("version", "status", "error", "data"), strict=True):
        assert word in body


@contextlib.asynccontextmanager
async def streaming(fake: FakeServer, behind: bytes = b"") -> AsyncIterator[Connection]:
    """A client that has begun to read an answer, and the server at the other end; what it sends behind its request."""
    async with listening(fake) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b'{"prompt": "a", "stream": true}') + behind)
        await fake.engine.answer("one")
        await reader.readuntil(b"one")
        yield reader, writer
        writer.close()
        await until(lambda: fake.engine.aborted)


@pytest.mark.parametrize(
    "second",
    [
        HEAD + b"\r\n",
        (HEAD + b"\r\n") * 3,
        HEAD,
        b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{",
        b"",
    ],
    ids=["a request", "several", "half a head", "half a body", "nothing"],
)
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_client_that_leaves_behind_another_request_aborts_the_first(second: bytes, at_once: bool) -> None:
    fake = FakeServer(FakeEngine(manual=True), port=0)
    async with streaming(fake, second if at_once else b"") as (_, writer):
        if not at_once:
            writer.write(second)
            await writer.drain()
            await asyncio.sleep(0.02)
        assert not fake.engine.aborted


@pytest.mark.parametrize(
    "piece",
    [HEAD + b"\r\n", b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999\r\n\r\n" + b" " * 9999],
)
async def test_what_is_sent_ahead_is_bounded(piece: bytes) -> None:
    fake = FakeServer(FakeEngine(manual=True), port=0, max_header_bytes=2048)
    async with listening(fake) as (_, port):
        num_sent, answer = await push(port, post(b'{"prompt": "a"}'), piece, most=2**22)
        assert num_sent < 2**21
        assert b"HTTP/1.1" not in answer  # it would be taken for the first one's
        await until(lambda: fake.engine.aborted)


async def test_nonsense_behind_a_request_is_not_answered_in_the_middle_of_its_stream() -> None:
    fake = FakeServer(FakeEngine(manual=True), port=0)
    async with streaming(fake) as (reader, writer):
        writer.write(b"nonsense\r\n\r\n")
        assert b"HTTP/1.1" not in await reader.read()


async def test_newcomers_take_the_places_of_idle_connections(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeServer(FakeEngine(manual=True), port=0)
    async with listening(fake, num_files=20) as (server, port):  # ten connections
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b'{"prompt": "a", "stream": true}'))
        await fake.engine.asked()
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
        await asyncio.gather(*(reader.read() for reader, _ in idle[:20]))  # the oldest are closed
        assert len(server.server_state.connections) <= 10
        assert (await talk(port, HEAD + b"connection: close\r\n\r\n")).startswith(b"HTTP/1.1 200")
        await fake.engine.answer("one", finish_reason="stop", is_last=True)
        await reader.readuntil(b"[DONE]")
        for _, other in (*idle, (reader, writer)):
            other.close()
    (line,) = [record.message for record in caplog.records if "connections are taken" in record.message]
    assert line.startswith("all 10 connections are taken, as many as the limit of open files allows (ulimit -n); idle")


def test_a_port_that_is_taken() -> None:
    with contextlib.closing(bind(ServerConfig(port=0))) as listener:
        listener.listen()
        with pytest.raises(ConfigError, match="Cannot listen on 127.0.0.1"):
            bind(ServerConfig(port=listener.getsockname()[1]))


def test_tls_files_that_are_not_there() -> None:
    config = ServerConfig(ssl_certfile="/no/such.pem", ssl_keyfile="/no/such.key")
    with pytest.raises(ConfigError, match="TLS files"):
        create_server(FakeServer().app, config, FakeServer().services.drain, no_finish)
