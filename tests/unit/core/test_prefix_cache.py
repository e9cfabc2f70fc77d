"""The tree of cached blocks: what is given up in which order, what pins do, and what it all costs."""

from __future__ import annotations

import random
import time

import pytest

from headway.core import PrefixCache
from headway.core.blocks import CachedBlock
from headway.core.prefix_cache import MAX_TAILS


def key(name: str) -> bytes:
    return name.encode()


def insert(cache: PrefixCache, name: str, parent: CachedBlock | None = None) -> CachedBlock:
    block = CachedBlock(len(cache))
    assert cache.insert(block, key(name), parent)
    return block


def insert_tail(
    cache: PrefixCache, before: bytes, tokens: tuple[int, ...], parent: CachedBlock | None = None
) -> CachedBlock | None:
    block = CachedBlock(len(cache))
    return block if cache.insert_tail(block, before, tokens, parent) else None


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


# ------------------------------------------------------------------------------------------------------- order of going


def test_the_end_of_a_chain_goes_before_its_beginning() -> None:
    cache = PrefixCache()
    release(cache, chain(cache, "a", "b", "c"))
    assert evict_all(cache) == ["c", "b", "a"]


def test_the_chain_that_was_used_longest_ago_goes_first() -> None:
    cache = PrefixCache()
    release(cache, chain(cache, "a", "b"))
    release(cache, chain(cache, "c", "d"))
    release(cache, chain(cache, "a", "b"))
    assert evict_all(cache) == ["d", "c", "b", "a"]


def test_a_block_that_others_hang_below_goes_after_all_of_them() -> None:
    cache = PrefixCache()
    left = chain(cache, "root", "left")
    right = insert(cache, "right", left[0])
    cache.release(left[1])
    assert evict_all(cache) == ["left"], "right is in use, and so is what it hangs below"
    release(cache, [left[0], right])
    assert evict_all(cache) == ["right", "root"]


def test_nothing_in_use_is_given_up() -> None:
    cache = PrefixCache()
    used, idle = chain(cache, "a", "b"), chain(cache, "c")
    release(cache, idle)
    assert evict_all(cache) == ["c"]
    assert cache.evict(1) == []
    release(cache, used)
    assert evict_all(cache) == ["b", "a"]


def test_a_random_tree_is_never_split() -> None:
    """Whatever is used, let go and given up: every block that is left can be found from the root."""
    rng, cache = random.Random(0), PrefixCache()
    in_use: list[list[CachedBlock]] = []
    for _ in range(3_000):
        if rng.random() < 0.5 and len(in_use) < 6:
            path = "".join(rng.choice("01") for _ in range(rng.randint(1, 6)))
            wanted = chain(cache, *(path[:end] for end in range(1, len(path) + 1)))
            in_use.append([block for block in wanted if not any(block in other for other in in_use)])
        elif in_use and rng.random() < 0.6:
            blocks = in_use.pop()  # the last one: nobody uses what hangs below its own blocks
            release(cache, blocks)
        else:
            cache.evict(rng.randint(1, 3))
        names = {block.digest.decode() for block in cache}
        assert all(name[:-1] in names for name in names if len(name) > 1), "a chain is split"
        assert cache.num_idle_blocks == sum(block.is_idle for block in cache)
        cache.eviction.check_invariants(cache)
    assert cache.stats.num_evicted_blocks > 300


# ----------------------------------------------------------------------------------------------------------------- pins


def test_what_is_pinned_goes_last_but_it_goes() -> None:
    cache = PrefixCache()
    pinned, plain = chain(cache, "p", "q"), chain(cache, "a", "b")
    for block in pinned:
        cache.pin(block, 10)
    release(cache, pinned)
    release(cache, plain)
    assert evict_all(cache) == ["b", "a", "q", "p"]


def test_a_pin_expires() -> None:
    cache = PrefixCache()
    pinned, plain = chain(cache, "p"), chain(cache, "a")
    cache.pin(pinned[0], 10)
    release(cache, pinned)
    release(cache, plain)
    cache.advance(10.0)
    assert evict_all(cache) == ["p", "a"]


@pytest.mark.parametrize(("now_s", "first"), [(19.9, "a"), (20.0, "p")])
def test_the_longest_pin_counts(now_s: float, first: str) -> None:
    cache = PrefixCache()
    pinned, plain = chain(cache, "p"), chain(cache, "a")
    for seconds in (5, 20, 10):
        cache.pin(pinned[0], seconds)
    release(cache, pinned)
    release(cache, plain)
    cache.advance(now_s)
    assert evict_all(cache)[0] == first


def test_a_pin_holds_what_is_above_it() -> None:
    cache = PrefixCache()
    old, young = chain(cache, "a", "p"), chain(cache, "x")
    cache.pin(old[1], 10)
    release(cache, old)
    release(cache, young)
    assert evict_all(cache) == ["x", "p", "a"]


def test_a_pin_that_is_renewed_in_use_counts_when_the_block_is_let_go_again() -> None:
    cache = PrefixCache()
    pinned, plain = chain(cache, "p"), chain(cache, "a")
    cache.pin(pinned[0], 5)
    release(cache, pinned)
    release(cache, plain)
    cache.use(pinned)
    cache.pin(pinned[0], 50)
    release(cache, pinned)
    cache.advance(10.0)
    assert evict_all(cache) == ["a", "p"]


# ---------------------------------------------------------------------------------------------------------------- tails


def test_the_tail_with_most_tokens_in_common_is_found_and_the_oldest_of_equals() -> None:
    cache = PrefixCache()
    for tokens in [(1, 2), (1, 2, 3), (1, 2, 9), (7,)]:
        insert_tail(cache, b"before", tokens)
    block, num_equal = cache.find_tail(b"before", (1, 2, 5, 5))
    assert block is not None and (block.block_id, num_equal) == (0, 2)
    block, num_equal = cache.find_tail(b"before", (1, 2, 9))
    assert block is not None and (block.block_id, num_equal) == (2, 3)
    assert cache.find_tail(b"before", (2,)) == (None, 0)
    assert cache.find_tail(b"elsewhere", (1, 2)) == (None, 0)


def test_a_tail_goes_before_the_block_it_hangs_below() -> None:
    cache = PrefixCache()
    (block,) = chain(cache, "a")
    tail = insert_tail(cache, block.digest, (1, 2), block)
    assert tail is not None
    release(cache, [block, tail])
    assert cache.evict(1) == [tail]
    assert cache.find_tail(block.digest, (1, 2)) == (None, 0)
    assert cache.evict(1) == [block]


def test_there_are_never_too_many_tails_to_look_through() -> None:
    cache = PrefixCache()
    tails = [insert_tail(cache, b"before", (number,)) for number in range(MAX_TAILS)]
    assert insert_tail(cache, b"before", (MAX_TAILS,)) is None, "all are in use"
    assert tails[3] is not None
    cache.release(tails[3])
    assert insert_tail(cache, b"before", (MAX_TAILS,)) is not None
    assert cache.surplus_tail(b"before") is tails[3]


# ----------------------------------------------------------------------------------------------------------- on the way


def test_a_block_is_announced_from_who_said_so_first_until_that_one_is_done() -> None:
    cache = PrefixCache()
    insert(cache, "there")
    cache.announce([b"there", b"next"], "first")
    cache.announce([b"next"], "second")
    assert cache.announced == {b"next": "first"}
    cache.withdraw([b"next"], "second")
    assert cache.is_announced(b"next")
    cache.withdraw([b"there", b"next"], "first")
    assert not cache.is_announced(b"next")


def test_the_same_block_is_kept_once() -> None:
    cache = PrefixCache()
    first = insert(cache, "a")
    assert not cache.insert(CachedBlock(7), b"a", None)
    assert cache.find([b"a"]) == [first]
    assert cache.stats.num_inserted_blocks == 1


# ----------------------------------------------------------------------------------------------------------------- cost


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
    tail = insert_tail(cache, block.digest, (1,), block)
    assert tail is not None
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


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 5, 9])
def test_giving_up_many_at_once_is_giving_up_one_after_another(num_blocks: int) -> None:
    def filled() -> PrefixCache:
        rng, cache = random.Random(3), PrefixCache()
        for number in range(12):
            path = "".join(rng.choice("01") for _ in range(rng.randint(1, 5)))
            blocks = chain(cache, *(path[:end] for end in range(1, len(path) + 1)))
            if number % 4 == 0:
                cache.pin(blocks[-1], 10)
            release(cache, blocks)
        return cache

    together, cache = [], filled()
    while blocks := cache.evict(num_blocks):
        together += [block.digest.decode() for block in blocks]
        cache.eviction.check_invariants(cache)
    assert together == evict_all(filled())
    assert cache.stats.num_evicted_blocks == len(together)
