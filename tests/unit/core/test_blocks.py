from __future__ import annotations

import time

import pytest

from headway.core import BlockPool, KVCacheManager
from tests.unit.core.driver import request


def release(pool: BlockPool, *block_ids: int) -> None:
    for block_id in block_ids:
        if pool.drop(block_id):
            pool.put_back(block_id)


def test_the_oldest_freed_block_is_taken_first() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    release(pool, 1, 0)
    assert pool.allocate(3) == [3, 1, 0]
    assert pool.allocate(1) is None
    assert pool.num_free_blocks == 0


def test_a_shared_block_is_free_only_when_its_last_owner_is_gone() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1) or []
    pool.share(block)
    release(pool, block)
    assert not pool.is_free(block)
    release(pool, block)
    assert pool.is_free(block)


def test_a_block_that_is_kept_is_neither_free_nor_lost() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1) or []
    assert pool.drop(block)
    assert not pool.is_free(block)
    assert (pool.num_taken_blocks, pool.num_free_blocks) == (1, 1)
    pool.share(block)
    assert pool.ref_count(block) == 1


def test_freeing_twice_and_sharing_a_free_block_raise() -> None:
    pool = BlockPool(2)
    with pytest.raises(RuntimeError, match="no owner"):
        pool.drop(0)
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.put_back(0)
    with pytest.raises(RuntimeError, match="cannot be shared"):
        pool.share(0)


def test_taking_too_many_takes_none() -> None:
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.num_free_blocks == 3


def test_cost_of_allocation_does_not_grow_with_the_pool() -> None:
    def cost(num_blocks: int) -> float:
        pool = BlockPool(num_blocks)
        best = 1.0
        for _ in range(5):
            started = time.perf_counter()
            for _ in range(200):
                release(pool, *(pool.allocate(10) or []))
            best = min(best, time.perf_counter() - started)
        return best

    assert cost(1_000_000) < 8 * cost(1_000)


def test_blocks_are_taken_only_as_tokens_need_them() -> None:
    cache = KVCacheManager(num_blocks=8, block_size=4)
    r = request("r", 10)
    cache.admit(r)
    assert cache.allocate(r, 3) == [0]
    r.num_computed_tokens = 3
    assert cache.allocate(r, 1) == []
    r.num_computed_tokens = 4
    assert cache.allocate(r, 6) == [1, 2]
    assert cache.block_table("r") == (0, 1, 2)


def test_what_is_promised_to_one_request_is_not_given_to_the_next() -> None:
    cache = KVCacheManager(num_blocks=5, block_size=4)
    first, second = request("first", 12), request("second", 9)
    cache.admit(first)
    cache.allocate(first, 4)
    assert cache.pool.num_free_blocks == 4
    assert cache.num_promised_blocks == 2
    assert not cache.can_admit(second, num_spare_blocks=0)
    assert cache.can_admit(request("third", 8), num_spare_blocks=0)
    assert not cache.can_admit(request("third", 8), num_spare_blocks=1)
    cache.free(first)
    assert cache.num_promised_blocks == 0
    assert cache.can_admit(second, num_spare_blocks=0)


def test_a_failed_allocation_changes_nothing() -> None:
    cache = KVCacheManager(num_blocks=2, block_size=4)
    r = request("r", 20)
    cache.admit(r)
    assert cache.allocate(r, 12) is None
    assert cache.block_table("r") == ()
    assert cache.num_tokens_that_fit(r) == 8
