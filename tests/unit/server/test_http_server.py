"""The server on a real socket: heads that are too large or too slow, the port, TLS files, draining."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest

from headway.errors import ConfigError
from headway.server.config import ServerConfig
from headway.server.http_server import DrainingServer, bind, create_server
from headway.server.messages import Delta
from tests.unit.server.fake_engine import FakeEngine, FakeServer, run, until


class Drained:
    """Notes that it was asked to drain."""

    def __init__(self) -> None:
        self.asked = False

    async def __call__(self) -> None:
        self.asked = True


@contextlib.asynccontextmanager
async def listening(fake: FakeServer, drain: Drained | None = None) -> AsyncIterator[tuple[DrainingServer, int]]:
    config = fake.services.config
    listener = bind(config)
    server = create_server(fake.app, config, drain or Drained())
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    port = listener.getsockname()[1]
    await until(lambda: server.started)
    try:
        yield server, port
    finally:
        server.should_exit = True
        await task


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


HEAD = b"GET /health HTTP/1.1\r\nhost: x\r\n"


def test_heads_are_bounded_in_size() -> None:
    async def scenario() -> None:
        async with listening(FakeServer(port=0, max_header_bytes=2048)) as (_, port):
            assert (await talk(port, HEAD + b"\r\n")).startswith(b"HTTP/1.1 200")
            at_once = await talk(port, HEAD + b"a: " + b"x" * 3000 + b"\r\n\r\n")
            assert at_once.startswith(b"HTTP/1.1 431")
            many = await talk(port, HEAD + b"".join(b"a%d: x\r\n" % number for number in range(1000)) + b"\r\n")
            assert many.startswith(b"HTTP/1.1 431")
            in_pieces = await talk(port, HEAD + b"a: ", *[b"x" * 1000] * 4)
            assert in_pieces.startswith(b"HTTP/1.1 431")
            nonsense = await talk(port, b"nonsense\r\n\r\n")
            assert nonsense.startswith(b"HTTP/1.1 400 Bad Request\r\n") and b'"code":"invalid_http"' in nonsense
            large_body = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 9000\r\n\r\n" + b" " * 9000
            assert (await talk(port, large_body)).startswith(b"HTTP/1.1 400")

    run(scenario())


def test_a_head_of_very_many_small_headers_takes_no_long_time() -> None:
    async def scenario() -> None:
        async with listening(FakeServer(port=0, max_header_bytes=2**20)) as (_, port):
            head = HEAD + b"a:\r\n" * 100_000 + b"\r\n"
            async with asyncio.timeout(5):
                assert (await talk(port, head)).startswith(b"HTTP/1.1 200")

    run(scenario())


def test_heads_are_bounded_in_time() -> None:
    async def scenario() -> None:
        async with listening(FakeServer(port=0, receive_timeout_s=0.05)) as (_, port):
            assert await talk(port) == b""  # says nothing
            assert await talk(port, HEAD, b"a:", b"b") == b""  # never ends
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(2):  # a connection that is kept open between requests is not a slow head
                writer.write(HEAD + b"\r\n")
                assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
                await asyncio.sleep(0.1)
            writer.close()

    run(scenario())


def test_stop_finishes_open_streams_and_takes_no_new_connections() -> None:
    async def scenario() -> None:
        drain = Drained()
        fake = FakeServer(FakeEngine(manual=True), port=0)
        async with listening(fake, drain) as (server, port), httpx.AsyncClient() as client:
            url = f"http://127.0.0.1:{port}/v1/completions"
            answer = asyncio.ensure_future(client.post(url, json={"prompt": "a", "stream": True}))
            await until(lambda: fake.engine.requests)
            request_id = fake.engine.requests[0].request_id
            fake.engine.push(Delta(request_id, text="one", token_ids=[1]))
            server.should_exit = True
            await until(lambda: drain.asked)
            with pytest.raises(httpx.ConnectError):
                async with httpx.AsyncClient() as other:
                    await other.get(f"http://127.0.0.1:{port}/health")
            fake.engine.push(Delta(request_id, text="two", token_ids=[1], finish_reason="stop", is_last=True))
            text = (await answer).text
            assert '"two"' in text and text.endswith("data: [DONE]\n\n")

    run(scenario())


def test_a_client_that_hangs_up_aborts_its_request() -> None:
    async def scenario() -> None:
        fake = FakeServer(FakeEngine(manual=True), port=0)
        async with listening(fake) as (_, port):
            body = b'{"prompt": "a"}'
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            await until(lambda: fake.engine.requests)
            writer.close()
            await until(lambda: fake.engine.aborted)

    run(scenario())


def test_a_port_that_is_taken() -> None:
    with contextlib.closing(bind(ServerConfig(port=0))) as listener:
        listener.listen()
        with pytest.raises(ConfigError, match="Cannot listen on 127.0.0.1"):
            bind(ServerConfig(port=listener.getsockname()[1]))


def test_tls_files_that_are_not_there() -> None:
    config = ServerConfig(ssl_certfile="/no/such.pem", ssl_keyfile="/no/such.key")
    with pytest.raises(ConfigError, match="TLS files"):
        create_server(FakeServer().app, config, Drained())
