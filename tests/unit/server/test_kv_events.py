"""/v1/kv_events: who may read it, what comes first, and readers that are slow, silent, gone or too many."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from starlette.types import Message

from headway.front.watch_streams import MAX_UNREAD_BLOCKS, CacheEvent
from headway.server.api import kv_event_stream
from headway.server.limits import LIMITS
from tests.unit.server.fake_engine import FakeEngine, FakeServer, RawClient, engine_ready, until

PATH = "/v1/kv_events"
A, B, C = (bytes([letter]) * 32 for letter in b"abc")


def change(number: int, stored: list[bytes], evicted: list[bytes] | None = None) -> CacheEvent:
    return CacheEvent(0, 0, number, 16, False, stored, evicted or [])


def blocks(body: bytes) -> list[dict[str, Any]]:
    """The data of all events but the first, which is a greeting."""
    parts = body.decode().split("\n\n")
    assert parts.pop() == "", "an event was cut"
    assert parts[0].startswith("event: hello\ndata: {")
    told = [part for part in parts[1:] if not part.startswith(":")]
    assert all(part.startswith("event: blocks\ndata: ") for part in told)
    return [json.loads(part.partition("data: ")[2]) for part in told]


def reader(server: FakeServer) -> RawClient:
    return RawClient(server.app, PATH, None, {"host": "127.0.0.1"}, method="GET")


async def num_told(client: RawClient, number: int) -> None:
    await until(lambda: client.body.count(b"event: blocks") == number)


def following(**options: Any) -> FakeServer:
    return FakeServer(FakeEngine(manual=True), kv_events=True, **options)


def test_off_by_default_and_the_error_names_the_flag() -> None:
    server = FakeServer()
    assert server.call("HEAD", PATH).status_code == server.call("GET", PATH).status_code == 404
    error = server.call("GET", PATH).json()["error"]
    assert "--kv-events" in error["message"] and error["code"] == "kv_events_off"


def test_no_prefix_cache_and_no_engine_yet_are_said_and_other_methods_follow_nothing() -> None:
    server = following()
    assert server.call("POST", PATH, json={}).status_code == 405
    assert server.call("HEAD", PATH).status_code == 200
    server.engine.info = engine_ready(prefix_caching=False)
    answer = server.call("GET", PATH)
    assert answer.status_code == 404 and "--no-enable-prefix-caching" in answer.json()["error"]["message"]
    server.engine.info = None
    assert server.call("GET", PATH).status_code == 503
    assert server.engine.followers == []


async def test_the_present_state_comes_first_then_changes_and_nothing_twice() -> None:
    server = following()
    server.engine.cached = [A, B]
    client = reader(server)
    await num_told(client, 1)
    (follower,) = server.engine.followers
    follower.push(change(7, [C], [A]))
    await num_told(client, 2)
    same = {"replica": 0, "epoch": 0, "block_size": 16}
    assert blocks(client.body) == [
        {**same, "number": 6, "is_whole": True, "stored": [A.hex(), B.hex()], "evicted": []},
        {**same, "number": 7, "is_whole": False, "stored": [C.hex()], "evicted": [A.hex()]},
    ]
    hello = json.loads(client.body.decode().partition("data: ")[2].partition("\n")[0])
    assert hello["num_replicas"] == 1 and hello["block_size"] == 16 and "headway-root" in hello["digest"]
    follower.close()  # as a server that stops does
    await client.task
    assert client.sent[-1] == {"type": "http.response.body", "body": b""}
    assert server.engine.followers == []


async def status_of(server: FakeServer) -> int:
    client = reader(server)
    await until(lambda: client.sent)
    status: int = client.sent[0]["status"]
    await client.leave()
    return status


async def test_too_many_readers_are_refused_until_one_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_stream, "LIMITS", replace(LIMITS, max_followers=2))
    server = following()
    await reader(server).leave()
    assert server.engine.followers == [], "one that leaves at once leaves nothing behind"
    clients = [reader(server), reader(server)]
    await until(lambda: len(server.engine.followers) == 2)
    assert await status_of(server) == 429
    await clients[0].leave()
    assert await status_of(server) == 200
    await clients[1].leave()


async def test_a_quiet_stream_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_stream, "LIMITS", replace(LIMITS, quiet_s=0.005))
    server = following()
    client = reader(server)
    await until(lambda: client.body.count(b": nothing new") >= 2)
    server.engine.followers[0].push(change(7, [C]))
    await num_told(client, 2)
    assert [told["number"] for told in blocks(client.body)] == [6, 7]
    await client.leave()


class SlowClient(RawClient):
    """Takes in two messages, and more when there is `room`."""

    def __init__(self, server: FakeServer) -> None:
        self.room = asyncio.Semaphore(2)
        super().__init__(server.app, PATH, None, {"host": "127.0.0.1"}, method="GET")

    async def _send(self, message: Message) -> None:
        if message.get("body"):
            await self.room.acquire()
        await super()._send(message)


async def test_a_reader_that_stops_reading_costs_little_and_is_told_everything_again() -> None:
    server = following()
    server.engine.cached = [A]
    client = SlowClient(server)
    await num_told(client, 1)
    (follower,) = server.engine.followers
    for number in range(7, 207):
        follower.push(change(number, [(1000 * number + one).to_bytes(32, "big") for one in range(1000)]))
        assert follower._num_unread <= MAX_UNREAD_BLOCKS
        await asyncio.sleep(0)
    server.engine.cached = [B, C]
    for _ in range(100):
        client.room.release()
    await num_told(client, 3)
    told = blocks(client.body)
    assert [each["is_whole"] for each in told] == [True, False, True], "what it had not read is not sent any more"
    assert told[-1]["stored"] == [B.hex(), C.hex()]
    await client.leave()
    assert server.engine.followers == []
