from __future__ import annotations

import time

import pytest

from headway.core import BlockPool


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


def test_freeing_twice_and_sharing_a_free_block_raise() -> None:
    pool = BlockPool(2)
    with pytest.raises(RuntimeError, match="no owner"):
        pool.drop(0)
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.put_back(0)
    with pytest.raises(RuntimeError, match="cannot be shared"):
        pool.share(0)


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
