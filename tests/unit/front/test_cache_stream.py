"""Following prefix caches: an index that is built from the stream equals the caches, whatever gets lost in between."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from typing import Any

import pytest

from headway.core.kv.blocks import block_digests, root_digest
from headway.core.kv.cache_report import CacheChanges
from headway.core.request_options import RequestOptions
from headway.front import watch_streams
from headway.front.deployment import Deployment
from headway.front.engine_client import EngineClient
from headway.front.replica import Replica
from headway.front.watch_streams import CacheEvent, CacheStream
from headway.sampling_params import SamplingParams
from headway.wire.messages import AddRequest, CacheNews, ReportCache
from tests.unit.front.served import kill, read, started, until


class Outside:
    """An index as a router outside builds it. It complains of gaps and repetitions."""

    def __init__(self) -> None:
        self.held: dict[int, set[bytes]] = {}
        self.at: dict[int, tuple[int, int]] = {}
        self.num_whole = 0

    def take(self, event: CacheEvent) -> None:
        place, now = event.place, (event.epoch, event.number)
        if event.is_whole:
            self.num_whole += 1
            self.held[place] = set()
            assert now >= self.at.get(place, (0, -1)) or now == (self.at[place][0], -1), "the past came back"
            self.at[place] = now
        elif now != self.at[place]:  # else it is a further part of a state
            epoch, number = self.at[place]
            assert now == (epoch, number + 1)
            self.at[place] = now
        held = self.held[place]
        for digest in event.evicted:
            held.remove(digest)
        for digest in event.stored:
            assert digest not in held
            held.add(digest)


def digest_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


class PretendedReplica:
    """A cache that changes at random, and a way to the front end that loses reports."""

    def __init__(self, client: EngineClient, place: int, chance: random.Random, num_blocks: int) -> None:
        self.client = client
        self.replica: Replica = client.replicas[place]
        self.replica.send = self._take  # type: ignore[method-assign]
        self.chance = chance
        self.num_blocks = num_blocks
        self.start()

    def start(self) -> None:
        self.held: set[bytes] = set()
        self.changes = CacheChanges(lambda: self.held)

    def _take(self, message: Any) -> None:
        assert isinstance(message, ReportCache)
        self.changes.tell_all()

    def change(self) -> None:
        for _ in range(self.chance.randrange(1, 12)):
            digest = digest_of(self.chance.randrange(self.num_blocks))
            if digest in self.held:
                self.held.remove(digest)
                self.changes.evict(digest)
            else:
                self.held.add(digest)
                self.changes.store(digest)

    def report(self, *, loses: bool = False) -> bool:
        report = self.changes.report()
        if report is not None and not loses:
            news = CacheNews(report.number, list(report.stored), list(report.evicted), report.is_whole)
            self.client.receive(self.replica, news)
        return report is not None

    def die(self) -> None:
        self.replica.epoch += 1
        self.client.note_loss(self.replica)
        self.start()


async def read_events(stream: CacheStream, outside: Outside, most: float = math.inf) -> None:
    """So many events, as far as they have come."""
    with contextlib.suppress(TimeoutError):
        while (most := most - 1) >= 0:
            async with asyncio.timeout(0.001):
                event = await anext(stream)
            outside.take(event)


@pytest.mark.parametrize("seed", range(30))
async def test_the_index_outside_equals_the_caches_whatever_happens(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(watch_streams, "MAX_UNREAD_BLOCKS", chance.choice([5, 50, 10_000]))
    monkeypatch.setattr(watch_streams, "MAX_REPORTED", chance.choice([1, 7, 4096]))
    monkeypatch.setattr("headway.core.kv.cache_report.MAX_REPORTED", chance.choice([3, 4096]))
    client = EngineClient(Deployment(num_replicas=3, router="round-robin", reports_caches=True))
    replicas = [PretendedReplica(client, place, chance, 40) for place in range(3)]
    followers: list[tuple[CacheStream, Outside]] = []
    for _ in range(300):
        each = chance.choice(replicas)
        draw = chance.random()
        if draw < 0.6:
            each.change()
            each.report()
        elif draw < 0.63:
            each.change()
            each.report(loses=True)
        elif draw < 0.66:
            each.die()
        elif draw < 0.7 and len(followers) < 4:
            followers.append((client.follow_caches(), Outside()))
        elif draw < 0.72 and followers:
            followers.pop()[0].close()
        elif followers:
            stream, outside = chance.choice(followers)
            await read_events(stream, outside, chance.randrange(4))
    followers.append((client.follow_caches(), Outside()))
    for each in replicas:
        each.change()  # after which a gap is seen, if there is one
        while each.report():
            pass
    for stream, outside in followers:
        assert len(stream._states) <= 3 * 40, "parts of an old state are not kept beside a new one"
        await read_events(stream, outside)
        assert outside.held == {place: each.held for place, each in enumerate(replicas)}
    await client.shutdown()
    for stream, _ in followers:
        assert [event async for event in stream] == []
    assert [event async for event in client.follow_caches()] == [], "nothing is followed at the end"


async def test_real_engines_with_evictions_salts_and_a_death() -> None:
    async with started(
        resumes=True, num_replicas=2, router="round-robin", reports_caches=True, num_kv_blocks=64
    ) as client:
        outside, stream = Outside(), client.follow_caches()

        async def follow() -> None:
            async for event in stream:
                outside.take(event)

        following = asyncio.create_task(follow())
        await ask(client, 0, 24, salt="mine")
        known = block_digests(root_digest("mine"), prompt(0), 4)
        await until(lambda: any(set(known) <= held for held in outside.held.values()))
        for number in range(1, 40):  # far more than there is room for
            await ask(client, number, 24)
        await agrees(client, outside)
        assert any(known[-1] not in held for held in outside.held.values())
        epoch = client.replicas[0].epoch
        kill(client.replicas[0])
        await until(lambda: outside.at[0] == (epoch + 1, -1) and not outside.held[0])
        await ask(client, 0, 24)
        await until(lambda: client.replicas[0].is_ready)
        for number in range(8):
            await ask(client, number, 24)
        await agrees(client, outside)
        stream.close()
        await following


def prompt(number: int) -> tuple[int, ...]:
    return tuple((number * 31 + place) % 200 + 1 for place in range(24))


async def ask(client: EngineClient, number: int, length: int, *, salt: str | None = None) -> None:
    request_id = f"r{number}-{client.num_restarts}-{salt}-{random.random()}"
    options = RequestOptions(cache_salt=salt)
    await read(client.submit(AddRequest(request_id, list(prompt(number)), SamplingParams(max_tokens=4), options)))


async def agrees(client: EngineClient, outside: Outside) -> None:
    """Whether what was built from changes is what the engines themselves tell when they are asked for everything."""
    for place, replica in enumerate(client.replicas):
        await until(lambda place=place: outside.held[place] == set(client._routers[0].index.blocks_of(place)))
        before, (_, number) = outside.held[place].copy(), outside.at[place]
        num_whole = outside.num_whole
        replica.send(ReportCache())
        await until(lambda num_whole=num_whole: outside.num_whole > num_whole)
        assert outside.held[place] == before and outside.at[place][1] == number + 1 and before
