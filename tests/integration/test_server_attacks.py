"""What one client can do to the others: each attack runs beside another user's stream, which must not notice."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from headway.server.limits import LIMITS
from tests.integration.server_process import ServerProcess
from tests.integration.under_attack import attacked_server, connected, flood, is_closed, unharmed

pytestmark = pytest.mark.flaky(reruns=2)

ATTACK_S = 1.2
"""Longer than the longest pause that others may notice."""
FLOOD_S = 0.5
"""Of each kind: together they take long."""
MAX_TAKEN_BYTES = 32 * 2**20
"""What a connection may get rid of, in the buffers of both sides too, before the server closes it."""
KEY = "secret"
MAX_OPEN_FILES = 512
CHUNKED = b"POST %s HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n"
DECLARED = b"POST %s HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1000000000\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """With a key that attackers do not have, and few open files."""
    with attacked_server("--api-key", KEY, max_open_files=MAX_OPEN_FILES) as running:
        yield running


def test_harm_is_noticed(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_ATTACK_SLACK", "1")
    with pytest.raises(AssertionError, match="longest pause"):
        stand_still(server)


def stand_still(server: ServerProcess) -> None:
    with unharmed(server, key=KEY, longest_pause_s=0.5, health_p99_s=0.2):
        os.kill(server.front_end_pid, signal.SIGSTOP)
        time.sleep(0.8)
        os.kill(server.front_end_pid, signal.SIGCONT)


FLOODS = {
    "a trailer": (CHUNKED + b"0\r\nX: ", b"a" * 65536),
    "trailers": (CHUNKED + b"0\r\n", b"X: a\r\n" * 10_000),
    "a chunk's extension": (CHUNKED + b"5;", b"a" * 65536),
    "tiny chunks": (CHUNKED, b"1\r\na\r\n" * 10_000),
    "small chunks": (CHUNKED, b"8\r\naaaaaaaa\r\n" * 5_000),
    "a body": (DECLARED, b" " * 65536),
    "requests": (HEALTH, HEALTH * 1000),
    "empty lines": (HEALTH, b"\r\n" * 30_000),
    "a head": (b"GET %s HTTP/1.1\r\nX: ", b"a" * 65536),
    "a URL": (b"GET %s", b"a" * 65536),
}


def test_one_connection_that_sends_without_end(server: ServerProcess) -> None:
    """Again and again, each kind in turn: it is closed each time, before it has sent much."""
    with unharmed(server, key=KEY):
        for kind, (start, piece) in FLOODS.items():
            until_s = time.monotonic() + FLOOD_S
            while time.monotonic() < until_s:
                with connected(server) as connection, contextlib.suppress(ConnectionError):
                    connection.sendall(start.replace(b"%s", b"/v1/completions"))
                    num_sent, closed = flood(connection, piece, seconds=10, max_bytes=MAX_TAKEN_BYTES)
                    assert closed, (kind, num_sent)
                time.sleep(0.02)


def test_many_refused_requests_whose_bodies_never_come(server: ServerProcess) -> None:
    with unharmed(server, key=KEY), contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connected(server)) for _ in range(100)]
        for connection in connections:
            connection.sendall((DECLARED % b"/v1/completions") + b" ")
        for connection in connections:
            assert is_closed(connection, within_s=10)


def test_more_idle_connections_than_files(server: ServerProcess) -> None:
    """Others still get in, and the log says why some are closed, once."""
    before = [line for line in server.log if "connections are taken" in line]
    with unharmed(server, key=KEY), contextlib.ExitStack() as stack:
        until_s = time.monotonic() + ATTACK_S
        while time.monotonic() < until_s:
            for _ in range(20):
                stack.enter_context(connected(server)).sendall(b"GET /")
            with connected(server) as newcomer:
                newcomer.sendall(HEALTH)
                assert newcomer.recv(65536).startswith(b"HTTP/1.1 200")
            time.sleep(0.01)
    assert len(before) == 0
    assert len([line for line in server.log if "connections are taken" in line]) == 1, server.log


def test_many_connections_at_once(server: ServerProcess) -> None:
    """Opened and closed without a word, as fast as this side can."""
    with unharmed(server, key=KEY):
        until_s = time.monotonic() + ATTACK_S
        while time.monotonic() < until_s:
            with contextlib.ExitStack() as stack:
                for _ in range(50):
                    stack.enter_context(connected(server))
            time.sleep(0.02)


def test_many_that_watch(server: ServerProcess) -> None:
    """Frames go to some of them, the others are refused."""
    asked = b"GET /live HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer %s\r\n\r\n" % KEY.encode()
    with unharmed(server, key=KEY), contextlib.ExitStack() as stack:
        statuses = []
        for _ in range(150):
            connection = stack.enter_context(connected(server))
            connection.sendall(asked)
            statuses.append(connection.recv(12)[-3:])
        assert statuses.count(b"429") >= 150 - LIMITS.max_viewers and statuses[0] == b"200", statuses
        time.sleep(ATTACK_S)


def test_answers_that_are_not_read(server: ServerProcess) -> None:
    """Many requests on each connection, none of whose answers is taken."""
    asked = b"GET /openapi.json HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer %s\r\n\r\n" % KEY.encode()
    with unharmed(server, key=KEY), contextlib.ExitStack() as stack:
        until_s = time.monotonic() + ATTACK_S
        connections = [stack.enter_context(connected(server)) for _ in range(30)]
        for connection in connections:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        while time.monotonic() < until_s:
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.settimeout(0.001)
                    connection.send(asked)
            time.sleep(0.01)
