"""Two servers behind a proxy that are restarted one after the other, while clients with kept connections ask on."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from headway.front.engine_client import Health
from headway.server.http.http_server import bind, create_server
from headway.server.server_config import ServerConfig
from headway.wire.messages import AddRequest, Delta
from tests.stress.small_proxy import SmallProxy
from tests.stress.steady_clients import load
from tests.unit.server.fake_engine import FakeEngine, FakeServer, until

STEP_S = 0.005
CHECK_S = 0.05
LAME_DUCK_S = 0.5
WORDS = tuple(f"{number} " for number in range(30))
EXPECTED = {prompt: list(range(300, 300 + len(WORDS))) for prompt in ("a", "b", "c")}


class SlowEngine(FakeEngine):
    """A token at a time, and it ends when all requests have ended."""

    def __init__(self) -> None:
        super().__init__(words=WORDS)
        self._num_pushed: Counter[str] = Counter()
        self._num_open = 0

    def _answer(self, request: AddRequest) -> None:
        self._num_open += 1
        super()._answer(request)

    def push(self, delta: Delta) -> None:
        self._num_pushed[delta.request_id] += 1
        after_s = STEP_S * self._num_pushed[delta.request_id]
        asyncio.get_running_loop().call_later(after_s, self._push_now, delta)

    def _push_now(self, delta: Delta) -> None:
        self._num_open -= delta.is_last
        super().push(delta)

    async def finish(self, left_s: float) -> None:
        self.health = Health(False, "the server is shutting down")
        async with asyncio.timeout(left_s):
            await until(lambda: not self._num_open)


class RestartedServer:
    """In this process, on the same port each time."""

    def __init__(self, lame_duck_s: float) -> None:
        self.port = 0
        self._lame_duck_s = lame_duck_s

    async def start(self) -> None:
        engine = SlowEngine()
        config = ServerConfig(port=self.port, lame_duck_s=self._lame_duck_s)
        listener = bind(config)
        self.port = listener.getsockname()[1]
        fake = FakeServer(engine, port=self.port, lame_duck_s=self._lame_duck_s)
        server = create_server(fake.app, config, fake.services.drain, engine.finish)
        self._drain, self._task = fake.services.drain, asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started)

    async def stop(self) -> None:
        self._drain.ask()
        await self._task


@pytest.mark.parametrize("lame_duck_s", [LAME_DUCK_S, 0.0])
async def test_a_rolling_restart_loses_nothing_unless_the_lame_duck_outlasts_the_check(lame_duck_s: float) -> None:
    servers = [RestartedServer(lame_duck_s) for _ in range(2)]
    for server in servers:
        await server.start()
    is_over = False
    check_s, rounds = (CHECK_S, 1) if lame_duck_s else (60.0, 3)
    async with SmallProxy([server.port for server in servers], check_s=check_s) as proxy:
        url = f"http://127.0.0.1:{proxy.port}"
        loading = asyncio.create_task(load(url, EXPECTED, num_clients=8, is_over=lambda: is_over))
        for server, upstream in rounds * list(zip(servers, proxy.upstreams, strict=True)):
            num_before = upstream.num_requests
            await until(lambda upstream=upstream, num_before=num_before: upstream.num_requests > num_before + 8)
            await server.stop()
            assert not upstream.is_ready or not lame_duck_s
            await server.start()
            await until(lambda upstream=upstream: upstream.is_ready)
        is_over = True
        report = await loading
    for server in servers:
        await server.stop()
    assert not report.differences and report.num_streams > 8 and report.num_whole > 8
    assert all(upstream.num_reused for upstream in proxy.upstreams)
    if lame_duck_s:
        assert not report.failures and not proxy.failures
    else:
        assert report.failures, "the proxy has to notice what is lost"
