"""A small load balancer: kept connections on both sides, a readiness check now and then, and no second try.

A request goes to the next server in turn that was ready at its last check, over a connection that was kept from an
earlier request if there is one. Whatever goes wrong is the client's to see (502 or 503, or a cut answer) and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from tests.stress.http_parts import Head, read_head, relay_body

CHECK = b"GET /ready HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
CHECK_TIMEOUT_S = 5.0
_CONNECTION = re.compile(rb"\r\nconnection: [^\r]*", re.IGNORECASE)


@dataclass
class Upstream:
    """A server behind the proxy."""

    port: int
    is_ready: bool = False
    num_requests: int = 0
    num_reused: int = 0
    """Requests that went over a kept connection."""
    kept: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = field(default_factory=list)

    async def check(self) -> None:
        """Ask whether it takes requests."""
        with contextlib.suppress(OSError, EOFError, TimeoutError):
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                with contextlib.closing(writer):
                    writer.write(CHECK)
                    self.is_ready = (await read_head(reader)).status == 200
                    return
        self.is_ready = False

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection that was kept and that the server has not closed, or a new one."""
        self.num_requests += 1
        while self.kept:
            reader, writer = self.kept.pop()
            if not reader.at_eof() and not writer.is_closing():
                self.num_reused += 1
                return reader, writer
            writer.close()
        return await asyncio.open_connection("127.0.0.1", self.port)


class SmallProxy:
    """In front of servers on this machine. An asynchronous context; `port` is where it listens."""

    def __init__(self, ports: Sequence[int], *, check_s: float = 1.0) -> None:
        self.upstreams = [Upstream(port) for port in ports]
        self.failures: list[str] = []
        self.port = 0
        self._check_s = check_s
        self._turns = itertools.cycle(self.upstreams)
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        for upstream in self.upstreams:
            await upstream.check()
            self._tasks.add(asyncio.create_task(self._keep_checking(upstream)))
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for upstream in self.upstreams:
            for _, writer in upstream.kept:
                writer.close()

    async def _keep_checking(self, upstream: Upstream) -> None:
        while True:
            await asyncio.sleep(self._check_s)
            await upstream.check()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client's connection."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                head = await read_head(reader)
                body = await reader.readexactly(head.content_length or 0)
                await self._forward(head, body, writer)
        except (EOFError, ConnectionError):  # the client has left
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _forward(self, head: Head, body: bytes, client: asyncio.StreamWriter) -> None:
        upstream = next((each for each in itertools.islice(self._turns, len(self.upstreams)) if each.is_ready), None)
        if upstream is None:
            await self._fail("503 Service Unavailable", "no server is ready", client)
            return
        try:
            reader, writer = await upstream.connect()
            writer.write(head.data + body)
            answer = await read_head(reader)
        except (EOFError, OSError) as error:
            await self._fail("502 Bad Gateway", f"{upstream.port}: {error!r} before the answer", client)
            return
        client.write(_CONNECTION.sub(b"", answer.data))
        try:
            await relay_body(answer, reader, client)
        except EOFError:
            self.failures.append(f"{upstream.port}: the answer was cut off")
            writer.close()
            raise ConnectionError("the client must see it") from None
        if answer.is_last:
            writer.close()
        else:
            upstream.kept.append((reader, writer))

    async def _fail(self, status: str, why: str, client: asyncio.StreamWriter) -> None:
        self.failures.append(why)
        client.write(f"HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n".encode())
        await client.drain()
