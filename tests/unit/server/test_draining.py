"""A server that was asked to stop: what it still serves, what it refuses and how, and when it is gone."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from headway.server.http.draining import Drain
from headway.server.metrics.access_log import AccessRecord
from headway.wire.messages import Delta
from tests.unit.clock import Clock
from tests.unit.server.fake_engine import FakeEngine, FakeServer, until
from tests.unit.server.test_http_server import HEAD, Client, listening, post

LAME_DUCK_S = 0.25
COMPLETION = {"prompt": "a"}


class Finish:
    """An engine that runs on until the test says that it has ended."""

    def __init__(self) -> None:
        self.left_s: float | None = None
        self.over = asyncio.Event()

    async def __call__(self, left_s: float) -> None:
        self.left_s = left_s
        await self.over.wait()


def request(method: str, path: str) -> bytes:
    return f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n".encode()


HEALTH = HEAD + b"\r\n"
COMPLETE = post(b'{"prompt": "a"}')


async def test_the_lame_duck_serves_and_says_that_it_leaves() -> None:
    fake, finish = FakeServer(port=0, lame_duck_s=60.0, drain_timeout_s=60.0), Finish()
    drain = fake.services.drain
    async with listening(fake, finish) as (_, port), Client(port) as kept, Client(port) as other:
        status, head, body = await kept.ask(HEALTH)
        assert (status, body["status"]) == (200, "ok") and b"connection: close" not in head
        await other.ask(HEALTH)
        drain.ask()
        for data in (HEALTH, request("GET", "/ready"), request("GET", "/ping")):
            async with Client(port) as new:
                status, head, body = await new.ask(data)
                assert (status, body["status"]) == (503, "draining") and body["reason"]
                assert b"connection: close" in head and await new.is_closed()
        assert (await kept.ask(COMPLETE))[0] == 200 and await kept.is_closed()
        status, head, _ = await other.ask(HEALTH)
        assert status == 503 and b"connection: close" in head and await other.is_closed()
        async with Client(port) as new:
            assert (await new.ask(COMPLETE))[0] == 200
        assert finish.left_s is None, "the engine knows nothing of it yet"
        finish.over.set()
        drain.ask()  # insists


async def test_after_the_lame_duck_requests_are_refused_until_nothing_runs() -> None:
    fake, finish = FakeServer(FakeEngine(manual=True), port=0, lame_duck_s=LAME_DUCK_S), Finish()
    async with listening(fake, finish) as (server, port), Client(port) as idle, httpx.AsyncClient() as http:
        await idle.ask(HEALTH)
        url = f"http://127.0.0.1:{port}"
        answer = asyncio.ensure_future(http.post(f"{url}/v1/completions", json=COMPLETION | {"stream": True}))
        request_id = await fake.engine.asked()
        fake.engine.push(Delta(request_id, text="one", token_ids=[1]))
        fake.services.drain.ask()
        assert await idle.is_closed() and fake.services.drain.is_refusing, "it was kept as long as it could be used"
        await until(lambda: finish.left_s is not None)
        assert 0 < finish.left_s <= 15.0 - LAME_DUCK_S
        async with httpx.AsyncClient() as late:
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/responses"):
                refused = await late.post(url + path, json={"prompt": "x" * 300_000})
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                assert refused.headers["connection"] == "close"
                assert refused.json()["error"]["code"] == "server_shutting_down"
            refused = await late.post(url + "/v1/messages", json={})
            assert (refused.status_code, refused.json()["type"]) == (503, "error")
            assert refused.json()["error"]["type"] == "overloaded_error"
            assert (await late.get(url + "/live")).json()["error"]["code"] == "server_shutting_down"
            assert (await late.get(url + "/health")).json()["status"] == "draining"
            assert (await late.get(url + "/metrics")).status_code == 200
        fake.engine.push(Delta(request_id, text="two", token_ids=[1], finish_reason="stop", is_last=True))
        text = (await answer).text
        assert '"two"' in text and text.endswith("data: [DONE]\n\n")
        finish.over.set()
        await until(lambda: not server.servers[0].is_serving())


@pytest.mark.parametrize("lame_duck_s", [0.0, LAME_DUCK_S])
async def test_a_server_with_nothing_to_do_ends_after_the_lame_duck(lame_duck_s: float) -> None:
    fake, finish = FakeServer(port=0, lame_duck_s=lame_duck_s), Finish()
    finish.over.set()
    async with listening(fake, finish) as (_, port), Client(port) as kept:
        await kept.ask(HEALTH)
        asked_s = asyncio.get_running_loop().time()
        fake.services.drain.ask()
    assert asyncio.get_running_loop().time() - asked_s >= lame_duck_s


@pytest.mark.parametrize("is_refusing", [False, True])
async def test_a_second_signal_waits_for_nothing(is_refusing: bool) -> None:
    fake, finish = FakeServer(FakeEngine(manual=True), port=0, lame_duck_s=60.0, drain_timeout_s=60.0), Finish()
    async with listening(fake, finish) as (_, port), Client(port) as client:
        asking = asyncio.ensure_future(client.ask(COMPLETE))
        await fake.engine.asked()
        fake.services.drain.ask(lame_duck=not is_refusing)
        if is_refusing:
            await until(lambda: finish.left_s is not None)
        fake.services.drain.ask()
    asking.cancel()


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_drain_cuts_off_has_an_error_of_its_own(stream: bool) -> None:
    records: list[AccessRecord] = []
    fake = FakeServer(FakeEngine(manual=True), port=0, lame_duck_s=0.0)
    fake.services.on_request_end.append(records.append)

    async def finish(left_s: float) -> None:
        request_id = fake.engine.requests[0].request_id
        fake.engine.push(
            Delta(request_id, finish_reason="error", error="the engine stopped", error_status=503, is_last=True)
        )

    async with listening(fake, finish) as (_, port), httpx.AsyncClient() as http:
        url = f"http://127.0.0.1:{port}/v1/completions"
        answer = asyncio.ensure_future(http.post(url, json=COMPLETION | {"stream": stream}))
        await fake.engine.answer("one")
        fake.services.drain.ask()
        found = await answer
    if stream:
        *_, last, done, _ = found.text.split("\n\n")
        assert done == "data: [DONE]"
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        assert (found.status_code, found.headers["retry-after"]) == (503, "1")
        error = found.json()["error"]
    assert (error["code"], error["message"]) == (
        "server_shutting_down",
        "The server is shutting down; please retry.",
    )
    assert [record.error for record in records] == ["server_shutting_down"]


def test_a_request_that_comes_to_an_engine_that_is_gone_is_told_why() -> None:
    fake = FakeServer()
    fake.engine.health = fake.engine.health.__class__(False, "gone")
    assert fake.complete().json()["error"]["code"] == "engine_unavailable"
    fake.services.drain.ask(lame_duck=False)
    assert fake.complete().json()["error"]["code"] == "server_shutting_down"


async def test_the_drain_timeout_counts_from_the_signal_and_bounds_the_lame_duck() -> None:
    clock = Clock()
    drain = Drain(lame_duck_s=50.0, timeout_s=15.0, now=clock)
    drain.ask()
    clock.now_s += 15.0
    async with asyncio.timeout(25):  # the lame duck alone would take 50 s
        await drain.end_lame_duck()
    assert drain.is_refusing and not drain.is_forced and drain.left_s == 0.0
    skipped = Drain(lame_duck_s=50.0, timeout_s=60.0, now=clock)
    skipped.ask(lame_duck=False)
    assert skipped.is_refusing
    await skipped.end_lame_duck()
    assert skipped.left_s == 60.0


async def test_a_start_is_given_up_when_the_server_is_asked_to_stop() -> None:
    ends: list[str] = []

    async def load() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ends.append("cancelled")

    async def fail() -> None:
        raise ValueError("no model")

    drain = Drain(lame_duck_s=1.0, timeout_s=1.0)
    assert await drain.unless_asked(lambda: asyncio.sleep(0))
    with pytest.raises(ValueError, match="no model"):
        await drain.unless_asked(fail)
    asyncio.get_running_loop().call_soon(drain.ask)
    assert not await drain.unless_asked(load) and ends == ["cancelled"]
    assert not await drain.unless_asked(fail), "nothing is begun any more"
