"""A small load balancer: kept connections on both sides, a readiness check now and then, and no second try.

A request goes to the next server in turn that was ready at its last check, over a connection that was kept from an
earlier request if there is one. Whatever goes wrong is the client's to see (502 or 503, or a cut answer) and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

CHECK_TIMEOUT_S = 5.0
OF_A_CONNECTION = (b"connection", b"transfer-encoding")
"""Headers that are not passed on."""


class Upstream:
    """A server behind the proxy."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.is_ready = False
        self.num_requests = 0
        self._num_connected = 0
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None, trust_env=False)

    @property
    def num_reused(self) -> int:
        """Requests that went over a kept connection."""
        return self.num_requests - self._num_connected

    async def check(self) -> None:
        """Ask whether it takes requests."""
        try:
            answer = await self.http.get("/ready", headers={"connection": "close"}, timeout=CHECK_TIMEOUT_S)
            self.is_ready = answer.status_code == 200
        except httpx.TransportError:
            self.is_ready = False

    async def send(self, asked: Request) -> httpx.Response:
        """Its answer, of which only the head is there yet."""
        headers = [one for one in asked.headers.raw if one[0] not in OF_A_CONNECTION]
        request = self.http.build_request(asked.method, asked.url.path, headers=headers, content=await asked.body())
        request.extensions["trace"] = self._trace
        self.num_requests += 1
        return await self.http.send(request, stream=True)

    async def _trace(self, event: str, info: dict[str, Any]) -> None:
        self._num_connected += event == "connection.connect_tcp.started"


class SmallProxy:
    """In front of servers on this machine. An asynchronous context; `port` is where it listens."""

    def __init__(self, ports: Sequence[int], *, check_s: float = 1.0) -> None:
        self.upstreams = [Upstream(port) for port in ports]
        self.failures: list[str] = []
        self.port = 0
        self._check_s = check_s
        self._turns = itertools.cycle(self.upstreams)
        app = Starlette(routes=[Route("/{path:path}", self._forward, methods=["GET", "POST"])])
        # An answer whose server went away may never end; the proxy does not wait for it.
        config = uvicorn.Config(app, port=0, lifespan="off", log_level="critical", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]  # they are for the whole

    async def __aenter__(self) -> Self:
        await asyncio.gather(*(upstream.check() for upstream in self.upstreams))
        self._checking = [asyncio.create_task(self._keep_checking(upstream)) for upstream in self.upstreams]
        self._serving = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.001)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = True
        await self._serving
        for task in self._checking:
            task.cancel()
        await asyncio.gather(*self._checking, return_exceptions=True)
        for upstream in self.upstreams:
            await upstream.http.aclose()

    async def _keep_checking(self, upstream: Upstream) -> None:
        while True:
            await asyncio.sleep(self._check_s)
            await upstream.check()

    async def _forward(self, asked: Request) -> Response:
        upstream = next((each for each in itertools.islice(self._turns, len(self.upstreams)) if each.is_ready), None)
        if upstream is None:
            self.failures.append("no server is ready")
            return Response(status_code=503)
        try:
            answer = await upstream.send(asked)
        except httpx.TransportError as error:
            self.failures.append(f"{upstream.port}: {error!r} before the answer")
            return Response(status_code=502)
        passed = StreamingResponse(self._relayed(upstream, answer), answer.status_code)
        passed.raw_headers = [one for one in answer.headers.raw if one[0].lower() not in OF_A_CONNECTION]
        return passed

    async def _relayed(self, upstream: Upstream, answer: httpx.Response) -> AsyncIterator[bytes]:
        try:
            async for part in answer.aiter_raw():
                yield part
        except httpx.TransportError:
            self.failures.append(f"{upstream.port}: the answer was cut off")
            raise  # the client must see it
        finally:
            await answer.aclose()
