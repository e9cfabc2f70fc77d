"""Blocks on disk and in other replicas: random requests, fetches and stores that end at any time, well or not, files
that vanish, aborts and failed steps. Requests read back their own tokens, all of them end, and no slot is lost."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

import pytest

from headway.config import SCHEDULING_POLICIES
from headway.core import HostTier, Request, RequestStatus, SchedulerOutput
from headway.core.fetching import FETCH_LIMIT_S
from headway.core.kv.moves import BlockMoves
from headway.core.request_options import RequestOptions
from tests.property.driven_scheduler import DrivenScheduler, Setting
from tests.property.random_play import RandomPlay, World, small_config, tree_world

PEER = "peer:1"
GARBAGE = [-1]
EXPECTED = {
    f"fetched from {PEER}": 50,
    "fetched from disk": 15,
    "failed": 50,
    "stored": 5,
    "not stored": 5,
    "prefetched": 5,
    "not prefetched": 5,
    "awaited by several": 5,
    "blocked": 5,
    "aborted while fetching": 1,
    "transfers without a step": 5,
}
"""What a group of worlds must have seen, at the least."""


class TieredScheduler(DrivenScheduler):
    """With a disk and another replica behind it, and slots that hold garbage until a fetch is done."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.disk: dict[bytes, list[int]] = {}
        self.truth: dict[bytes, list[int]] = {}  # of all blocks of prompts that ever came; the other replica has it
        self.fetches: list[tuple[bytes, int, str]] = []
        self.stores: list[tuple[bytes, int]] = []

    @property
    def tier(self) -> HostTier:
        assert self.scheduler.kv_cache.tiers is not None
        return self.scheduler.kv_cache.tiers.host

    def add(self, request: Request, *, now_s: float | None = None) -> bool:
        size = self.setting.block_size
        num_blocks = request.num_prompt_tokens // size
        numbers = self.memory.numbers(request.prompt_token_ids)
        for place, digest in enumerate(request.block_digests(size, num_blocks)[:num_blocks]):
            self.truth[digest] = numbers[place * size : (place + 1) * size]
        return super().add(request, now_s=now_s)

    def on_planned(self, output: SchedulerOutput) -> None:
        self._begin_transfers(output.moves)
        self.events["transfers without a step"] += output.is_empty and output.moves.has_transfers
        self.events["fetching"] += len(self.scheduler.live.fetching.requests)
        self.events["blocked"] += len(self.scheduler.live.fetching.blocked)
        awaited = [digest for one in self.scheduler.live.fetching.requests.values() for digest in one.missing]
        self.events["awaited by several"] += sum(count > 1 for count in Counter(awaited).values())

    def _begin_transfers(self, moves: BlockMoves) -> None:
        copied = {slot for _, slot in moves.moved_out} | {slot for slot, _ in moves.moved_in}
        for digest, slot, source in moves.fetched:
            assert slot not in copied, "a slot is copied and filled at once"
            self.memory.host[slot] = GARBAGE
            self.fetches.append((digest, slot, source))
        for digest, slot in moves.stored:
            assert self.memory.host[slot] != GARBAGE
            self.stores.append((digest, slot))
        self.events["fetches"] += len(moves.fetched)

    def prefetch(self, *, fails: bool) -> None:
        kv_cache = self.scheduler.kv_cache
        assert kv_cache.tiers is not None
        num_available = kv_cache.num_available_blocks
        moves = kv_cache.prefetch()
        assert kv_cache.num_available_blocks == num_available, "what is prefetched is room for others"
        self._begin_transfers(moves)
        if fails:
            self.memory.host |= {slot: GARBAGE for _, slot in moves.moved_out}
        else:
            self.memory.move_blocks(moves)
        kv_cache.tiers.landed(moves, has_failed=fails)
        self.events["not prefetched" if fails else "prefetched"] += len(moves.moved_in)
        self.check()

    def on_aborted(self, name: str) -> None:
        self.events["aborted while fetching"] += self._was_fetching

    def abort(self, name: str) -> None:
        self._was_fetching = self.requests[name].status is RequestStatus.FETCHING
        super().abort(name)

    def end_fetch(self, place: int, *, may_fail: bool, seconds: float) -> None:
        digest, slot, source = self.fetches.pop(place)
        content = (self.truth if source else self.disk).get(digest)
        ok = content is not None and not may_fail
        self.events["fetched from " + (source or "disk") if ok else "failed"] += 1
        if ok:
            assert content is not None
            self.memory.host[slot] = content
        self.scheduler.fetch_done(digest, ok, seconds=seconds)
        self.check()

    def end_store(self, place: int, *, fails: bool) -> None:
        digest, slot = self.stores.pop(place)
        content = self.memory.host[slot]
        assert digest not in self.truth or content == self.truth[digest], "something else was stored"
        self.events["not stored" if fails else "stored"] += 1
        if not fails:
            self.disk[digest] = content
        self.tier.store_done(digest, not fails)
        self.check()


class TieredPlay(RandomPlay):
    """Ends transfers at any time."""

    driven: TieredScheduler

    def __init__(self, world: World, rng: random.Random, max_in_flight: int, *, failure_rate: float) -> None:
        super().__init__(world, rng, max_in_flight, create=TieredScheduler)
        self.transfer_rate, self.transfer_failures = rng.choice([0.1, 0.5, 0.95]), failure_rate
        self.seconds = rng.choice([0.0, 0.0, 1e-5, 1.0])

    def disturb(self) -> None:
        super().disturb()
        while self.rng.random() < self.transfer_rate and self.end_transfer():
            pass
        if self.rng.random() < 0.7:
            self.driven.prefetch(fails=self.rng.random() < 0.3)
        disk = self.driven.tier.disk
        if disk is not None and self.rng.random() < 0.1:  # another engine shares the folder
            for digest, content in self.driven.truth.items():
                self.driven.disk[digest] = content
                disk.add(digest)
        if self.driven.disk and self.rng.random() < 0.05:
            digest = self.rng.choice(list(self.driven.disk))
            del self.driven.disk[digest]
            if self.rng.random() < 0.5:  # otherwise it is noticed when it is wanted
                assert disk is not None
                disk.discard(digest)

    def end_transfer(self) -> bool:
        driven, rng = self.driven, self.rng
        fails = rng.random() < self.transfer_failures
        if driven.fetches and (rng.random() < 0.7 or not driven.stores):
            driven.end_fetch(rng.randrange(len(driven.fetches)), may_fail=fails, seconds=self.seconds)
        elif driven.stores:
            driven.end_store(rng.randrange(len(driven.stores)), fails=fails)
        return bool(driven.fetches or driven.stores)

    def wait(self) -> None:
        scheduler = self.driven.scheduler
        if self.driven.fetches:
            self.driven.events["only fetching"] += not scheduler.live.waiting
            self.end_transfer()
        else:
            assert len(scheduler.live.fetching.requests) == len(scheduler.live.fetching.blocked), (
                "blocks are awaited that are not on their way"
            )
            ready_at_s = scheduler.ready_at_s()
            if ready_at_s is None or ready_at_s > self.now_s:  # another class may be first now
                super().wait()

    def _more_options(self) -> dict[str, Any]:
        return {"blocks_at": self.rng.choice(["", "", PEER])}

    def play(self, num_steps: int) -> None:
        super().play(num_steps)
        while self.end_transfer():
            pass
        self.driven.check()
        tier = self.driven.tier
        assert not tier.num_fetching and not tier.num_storing
        assert not self.driven.scheduler.live.fetching.waits_for


def tiered_world(rng: random.Random, policy: str, batching: str) -> World:
    world = tree_world(rng)
    config = dataclasses.replace(
        small_config(rng, policy=policy, batching=batching),
        preemption_mode=rng.choice(["auto", "recompute", "swap"]),
    )
    setting = dataclasses.replace(
        world.setting,
        config=config,
        num_host_slots=rng.choice([1, 2, 5, 12]),
        num_disk_blocks=rng.choice([0, 3, 1000, 1000]),
        restore_block_s=rng.choice([0.0, 0.0, 0.0, 1e-4]),
    )
    return dataclasses.replace(world, setting=setting, failure_rate=rng.choice([0.0, 0.05]))


def play(seed: int, policy: str, batching: str = "continuous") -> TieredPlay:
    rng = random.Random(seed)
    world = tiered_world(rng, policy, batching)
    played = TieredPlay(world, rng, max_in_flight=1 + seed % 3, failure_rate=rng.choice([0.0, 0.1, 0.1, 1.0]))
    played.play(100)
    return played


@pytest.mark.parametrize("group", range(4))
def test_all_requests_end_whatever_becomes_of_their_blocks(group: int) -> None:
    """Each group of worlds must really contain what the test is about."""
    events: Counter[str] = Counter()
    for seed in range(20 * group, 20 * (group + 1)):
        events.update(play(seed, SCHEDULING_POLICIES[seed % len(SCHEDULING_POLICIES)]).driven.counts())
    missing = {name: events[name] for name, least in EXPECTED.items() if events[name] < least}
    assert not missing, events


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_in_sealed_batches(batching: str) -> None:
    events: Counter[str] = Counter()
    for seed in range(1000, 1015):
        events.update(play(seed, "fcfs", batching).driven.counts())
    assert events["fetches"] >= 50
    assert events["only fetching"] >= 5


def test_no_request_waits_longer_than_the_limit() -> None:
    """A store that never answers: the request is computed, and the slots come back when it does answer."""
    rng = random.Random(1)
    world = tiered_world(rng, "fcfs", "continuous")
    setting = dataclasses.replace(world.setting, num_host_slots=5, num_disk_blocks=0, num_blocks=20, block_size=2)
    driven = TieredScheduler(setting)
    request = Request("a", [1, 0, 1, 0, 1], max_tokens=1, options=RequestOptions(blocks_at=PEER))
    assert driven.add(request, now_s=0.0)
    assert not driven.launch(lambda: 0, 0.0)
    assert request.status is RequestStatus.FETCHING and len(driven.fetches) == 2
    assert not driven.launch(lambda: 0, FETCH_LIMIT_S - 0.1)
    assert driven.launch(lambda: 0, FETCH_LIMIT_S)
    driven.end_fetch(0, may_fail=False, seconds=40.0)
    driven.end_fetch(0, may_fail=True, seconds=40.0)
    driven.land()
    assert request.status.is_finished or driven.launch(lambda: 0, FETCH_LIMIT_S + 1)
    assert not driven.tier.num_fetching


def test_prompts_that_find_no_room_wait_for_it_in_turn() -> None:
    """Room for two prompts: the third waits, and takes nothing from those whose blocks are there; it begins when one of
    them has been admitted, or has left."""
    rng = random.Random(1)
    world = tiered_world(rng, "fcfs", "continuous")
    setting = dataclasses.replace(world.setting, num_host_slots=5, num_disk_blocks=0, num_blocks=40, block_size=2)
    driven = TieredScheduler(setting)
    requests = [
        Request(name, [number] * 5, max_tokens=1, options=RequestOptions(blocks_at=PEER))
        for number, name in enumerate("abcd")
    ]
    for request in requests:
        assert driven.add(request, now_s=0.0)
    assert not driven.launch(lambda: 0, 0.0)
    assert all(request.status is RequestStatus.FETCHING for request in requests)
    assert len(driven.fetches) == 4 and list(driven.scheduler.live.fetching.blocked) == requests[2:]
    while driven.fetches:
        driven.end_fetch(0, may_fail=False, seconds=0.1)
    assert requests[0].status is RequestStatus.WAITING, "all of its blocks are there"
    driven.abort("a")
    assert driven.launch(lambda: 0, 0.1), "the second begins"
    assert len(driven.fetches) == 2 and list(driven.scheduler.live.fetching.blocked) == requests[3:]
    driven.land()
    driven.abort("d")
    while driven.fetches:
        driven.end_fetch(0, may_fail=False, seconds=0.1)
    assert len(driven.tier.find(requests[2].block_digests(2, 2))) == 2, "nobody has taken them away"
    assert driven.launch(lambda: 0, 0.2)
    driven.land()
    assert all(request.status.is_finished for request in requests)
    assert not driven.tier.pins and not driven.scheduler.live.fetching.blocked
    assert driven.tier.stats.num_fetched_blocks == 6
