"""Heads of requests that no client should send: each is answered with a 4xx or closed, and none makes a traceback."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections import Counter
from collections.abc import Callable

import pytest

from headway.server.http.connection import BoundedProtocol
from headway.server.http.http_server import create_server
from tests.unit.server.fake_engine import FakeServer, run
from tests.unit.server.fake_transport import FakeTransport

NUM_HEADS = 4_000
BATCH = 200
SEED = 0
MOST_TURNS = 12
"""Turns of the event loop in which a request is answered, if its body is complete."""
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) [A-Za-z ]+\r\n")
METHODS = (
    *("GET", "POST", "HEAD", "OPTIONS", "CONNECT", "PUT", "DELETE", "TRACE", "PATCH", "PRI", "get", "G ET", "", "\0"),
)
TARGETS = (
    *("/health", "/v1/completions", "/v1/models/small", "/tokenize", "/metrics", "/live?replica=9", "/nothing", "*"),
    *("", "/", "//", "/../etc", "/%", "/%00", "/%ff%fe", "/%zz", "/a b", "/\xff", "/?%", "/#x", "?", "evil:80"),
    *(":80", "http://localhost", "http://localhost/health", "HTTP://LOCALHOST:8000/", "http://evil/", "http://"),
    *("http:///x", "http://[", "http://[::1]/", "http://[::1", "http://a:b@localhost/", "http://localhost:99999/"),
    *("https://localhost", "ftp://localhost/", "file:///etc/passwd", "javascript:1", "http://localhost:0x50/"),
    *("/" + "a" * 3000, "[::1]:80"),
)
VERSIONS = ("HTTP/1.1", "HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/1.9", "HTTP/9.9", "HTTP/1", "http/1.1", "HTTP/x", "")
ODD_HEADERS = (
    *("origin: http://[", "origin: http://[::1", "origin: null", "origin: http://localhost:8000", "origin: ]"),
    *("origin::", "origin: http://localhost:99999999", "origin: //", "origin: http://\xe9"),
    *("sec-fetch-site: cross-site", "content-length: 0", "content-length: 2", "content-length: 002"),
    *("transfer-encoding: chunked", "expect: x", "expect: 100-continue", "connection: close", "connection: upgrade"),
    *("upgrade: h2c", "upgrade: websocket", "connection: keep-alive, upgrade", "http2-settings: AAMAAABkAAQ"),
    *("content-type: application/json", "a:", "A: \xff", "authorization: Bearer", "authorization: Basic !"),
    *("authorization: \xff", "x-request-id: " + "i" * 200, "range: x", "x-request-id: \t", "traceparent: 00-"),
    *("traceparent: 00-" + "f" * 400, "if-none-match: W/", "x-api-key: \x7f", "cookie: " + "c" * 2900),
    *("x-forwarded-for: ,,,", "access-control-request-method: POST", "content-encoding: gzip"),
)
WRONG_HEADERS = (
    *("host: localhost", "host: localhost:8000", "host: evil", "host:", "host: [", "host: [::1]:8000", "host: a b"),
    *("host: a, b", "host: localhost:x", "host: \xff", "HOST: 127.0.0.1", "host : localhost", "host: " + "h" * 300),
    *("content-length: -1", "content-length: +1", "content-length: 0x2", "content-length: 1, 1"),
    *("content-length: \xb2", "content-length: 99999999999999999999999999", "content-length:"),
    *("transfer-encoding: xchunked", "transfer-encoding: gzip, chunked", "transfer-encoding: chunked, identity"),
    *("content-type: \x00", ": no name", "no colon", "a\0b: c", "a: b\0c", "a: b\rc", "a: b\nc", " folded: line"),
    *("\tfolded", "a b: c", "é: ü"),
)
ENDS = ("\r\n", "\r\n", "\r\n", "\r\n", "\n", "\r", "\r\n ", "\r\n\t", "\r\n\r\n", "\0")
BODIES = (b"{}", b"2\r\n{}\r\n0\r\n\r\n", b"zz\r\n", b"\0" * 9, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")


def malformed(draw: random.Random) -> bytes:
    """A head that may be right in most of its parts, and what is sent behind it."""

    def seldom(share: float) -> bool:
        return draw.random() < share

    method = draw.choice(METHODS) if seldom(0.2) else draw.choice(("GET", "POST"))
    version = draw.choice(VERSIONS) if seldom(0.1) else "HTTP/1.1"
    target = draw.choice(TARGETS) if seldom(0.5) else draw.choice(TARGETS[:8])
    headers = [] if seldom(0.1) else ["host: localhost"]
    headers += draw.choices(ODD_HEADERS, k=draw.randrange(4))
    if seldom(0.3):
        headers.insert(draw.randint(0, len(headers)), draw.choice(WRONG_HEADERS))
    space, bad_ends = draw.choice(("", "  ", "\t", "\0")) if seldom(0.05) else " ", seldom(0.1)
    lines = [space.join((method, target, version)), *headers]
    head = "".join(line + (draw.choice(ENDS) if bad_ends else "\r\n") for line in lines).encode("latin-1", "replace")
    head += b"\r\n" + (draw.choice(BODIES) if seldom(0.3) else b"")
    for _ in range(draw.randint(1, 3) if seldom(0.2) else 0):
        place = draw.randrange(len(head))
        head = head[:place] + bytes([draw.randrange(256)]) + head[place + draw.randrange(2) :]
    return head


class Client:
    """A connection that sends in one piece or in several."""

    def __init__(self, connect: Callable[[], BoundedProtocol], data: bytes, draw: random.Random) -> None:
        self.data = data
        self.transport = FakeTransport(connect())
        cut = draw.randrange(len(data)) if draw.random() < 0.3 else 0
        for piece in (data[:cut], data[cut:]):
            if piece:
                self.transport.feed(piece)

    @property
    def statuses(self) -> list[int]:
        return [int(status) for status in STATUS.findall(self.transport.written)]


def connector(fake: FakeServer) -> tuple[Callable[[], BoundedProtocol], set[asyncio.Task[None]]]:
    """What makes connections to an application, and the requests that it is answering."""
    server = create_server(fake.app, fake.services.config, fake.services.drain, no_finish)
    settings, state = server.config, server.server_state
    return (lambda: settings.http_protocol_class(config=settings, server_state=state, app_state={})), state.tasks


async def no_finish(left_s: float) -> None:
    pass


def test_no_head_makes_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """Whether bytes are of an answer that waits for a body or of none at all, no request outlives its connection."""
    draw, outcomes, bad = random.Random(SEED), Counter[int | str](), list[bytes]()

    async def scenario() -> None:
        fake = FakeServer(port=0, max_header_bytes=3072, max_body_bytes=4096)
        connect, tasks = connector(fake)
        for _ in range(NUM_HEADS // BATCH):
            clients = [Client(connect, malformed(draw), draw) for _ in range(BATCH)]
            for _ in range(MOST_TURNS):
                await asyncio.sleep(0)
            for client in clients:
                outcomes.update(client.statuses or ["closed" if client.transport.is_closing() else "waits"])
                if any(status >= 500 for status in client.statuses):
                    bad.append(client.data)
                client.transport.leave()
            async with asyncio.timeout(5):
                while tasks:
                    await asyncio.sleep(0)

    with caplog.at_level(logging.ERROR):
        run(scenario())
    assert not bad and not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert {200, 400, 403, 404, 405, 415, 431} <= outcomes.keys(), outcomes
    assert outcomes["waits"] < NUM_HEADS / 10 and outcomes["closed"] < NUM_HEADS / 10, outcomes


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\norigin: http://[", 403, "origin_not_allowed"),
        (b"CONNECT evil:80 HTTP/1.1\r\nhost: evil:80", 400, "invalid_http"),
        (b"GET /health HTTP/1.1", 400, "invalid_host"),
        (b"GET /health HTTP/1.1\r\nhost: evil\r\nhost: 127.0.0.1", 400, "invalid_host"),
        (b"GET /health HTTP/1.0\r\nhost: localhost\r\nhost: localhost", 400, "invalid_host"),
        (b"GET /health HTTP/1.1\r\nhost: a b", 400, "invalid_host"),
        (b"GET http://localhost/health HTTP/1.1\r\nhost: evil", 400, "invalid_host"),
        (b"GET ftp://localhost/health HTTP/1.1\r\nhost: localhost", 400, "invalid_http"),
        (b"GET health HTTP/1.1\r\nhost: localhost", 400, "invalid_http"),
        (b"GET /\xff HTTP/1.1\r\nhost: localhost", 400, "invalid_http"),
        (b"GET http://evil/health HTTP/1.1\r\nhost: evil", 403, "host_not_allowed"),
        (b"GET /health HTTP/1.0", 200, None),
        (b"GET /health HTTP/1.1\r\nHost: LOCALHOST:8000", 200, None),
        (b"GET http://localhost:8000/health?x=1 HTTP/1.1\r\nhost: localhost:8000", 200, None),
        (b"GET HTTP://[::1]/health HTTP/1.1\r\nhost: [::1]", 200, None),
    ],
)
async def test_heads_that_are_taken_and_refused(head: bytes, status: int, code: str | None) -> None:
    connect, tasks = connector(FakeServer(port=0))
    transport = FakeTransport(connect())
    transport.feed(head + b"\r\n\r\n")
    while tasks:
        await asyncio.sleep(0)
    assert transport.written.startswith(b"HTTP/1.1 %d " % status)
    assert code is None or b'"code":"%b"' % code.encode() in transport.written
