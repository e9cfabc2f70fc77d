"""The prefix cache: what it costs, and what only one request at a time shows. Whatever is found, copied, pinned and
given up is compared with a brute-force model in `tests/property`."""

from __future__ import annotations

import time

import pytest

from headway.core import PrefixCache, Request, RequestStatus, Scheduler
from headway.core.kv.blocks import CachedBlock
from tests.unit.core.driver import finish, make_scheduler, request, step


def key(name: str) -> bytes:
    return name.encode()


def insert(cache: PrefixCache, name: str, parent: CachedBlock | None = None) -> CachedBlock:
    block = CachedBlock(len(cache))
    assert cache.insert(block, key(name), parent)
    return block


def chain(cache: PrefixCache, *names: str) -> list[CachedBlock]:
    """Blocks below each other, all in use; those that are there already are used."""
    blocks: list[CachedBlock] = []
    for name in names:
        found = cache.find([key(name)])
        cache.use(found)
        blocks.append(found[0] if found else insert(cache, name, blocks[-1] if blocks else None))
    return blocks


def release(cache: PrefixCache, blocks: list[CachedBlock]) -> None:
    for block in reversed(blocks):
        cache.release(block)


def evict_all(cache: PrefixCache) -> list[str]:
    names = []
    while blocks := cache.evict(1):
        names.append(blocks[0].digest.decode())
        cache.eviction.check_invariants(cache)
    return names


class CountingDict(dict[bytes, CachedBlock]):
    num_lookups = 0

    def get(self, *args: object) -> CachedBlock | None:
        self.num_lookups += 1
        return super().get(*args)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("length", [1, 10, 1_000])
def test_finding_a_prefix_looks_once_per_block_and_not_past_the_first_miss(length: int) -> None:
    cache = PrefixCache()
    chain(cache, *(str(number) for number in range(length)))
    counting = cache._blocks = CountingDict(cache._blocks)
    assert len(cache.find(key(str(number)) for number in range(10 * length))) == length
    assert counting.num_lookups == length + 1


def test_cost_of_using_and_giving_up_does_not_grow_with_the_cache() -> None:
    def cost(num_blocks: int) -> float:
        cache = PrefixCache()
        blocks = [chain(cache, str(number)) for number in range(num_blocks)]
        for block in blocks:
            release(cache, block)
        best = 1.0
        for turn in range(5):
            started = time.perf_counter()
            for number in range(200):
                cache.use(blocks[-1])
                release(cache, blocks[-1])
                cache.evict(1)
                release(cache, chain(cache, f"{turn} {number}"))
            best = min(best, time.perf_counter() - started)
        return best

    assert cost(50_000) < 8 * cost(1_000)


def test_lists_stay_as_short_as_the_tree_however_often_blocks_are_used() -> None:
    """Also pins, which may last for a day."""
    cache = PrefixCache()
    (block,) = chain(cache, "a")
    for _ in range(1_000):
        cache.pin(block, 86_400)
        cache.release(block)
        cache.use([block])
    assert len(cache.eviction._candidates) < 100 and len(cache.eviction._pins) < 100
    for number in range(1_000):
        blocks = chain(cache, f"short-lived {number}")
        cache.pin(blocks[0], 86_400)
        release(cache, blocks)
        cache.evict(1)
    assert len(cache.eviction._candidates) < 100 and len(cache.eviction._pins) < 100


def test_a_block_that_comes_back_begins_anew_and_what_was_planned_for_it_is_void() -> None:
    """Whoever holds a block's memory next has the same `CachedBlock`: old hits, pins and candidates are not its own."""
    cache = PrefixCache()
    (block,) = chain(cache, "old")
    tail = CachedBlock(1)
    assert cache.insert_tail(tail, block.digest, (1,), block)
    cache.pin(tail, 60)
    release(cache, [block, tail])
    cache.use([block, tail])
    assert tail.num_hits == 1
    cache.drop_tail(tail)
    assert not tail.is_cached
    assert cache.insert(tail, b"new", None)
    assert (tail.num_hits, tail.pinned_until_s, tail.depth, tail.tail, tail.parent) == (0, 0.0, 0, None, None)
    release(cache, [block])
    assert evict_all(cache) == ["old"], "the other is in use"


def sharing(**options: object) -> tuple[Scheduler, PrefixCache]:
    cache = PrefixCache()
    return make_scheduler(prefix_cache=cache, max_num_batched_tokens=64, **options), cache


def test_what_a_request_finds_of_its_own_is_no_hit_of_its_prompt() -> None:
    scheduler, _ = sharing(num_blocks=6, max_num_seqs=2)
    first, second = request("first", 7, 12), Request("second", range(50, 57), max_tokens=12)
    for one in (first, second):
        scheduler.add_request(one)
    while not second.num_preemptions:
        step(scheduler)
    while second.status is not RequestStatus.RUNNING:
        output = scheduler.schedule()
        finish(scheduler, output)
    (back,) = output.new_requests
    assert first.status.is_finished
    assert back.num_computed_tokens >= 4
    assert second.num_cached_tokens == 0
