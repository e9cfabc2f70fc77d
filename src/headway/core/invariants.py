"""What must be true of a scheduler between any two calls, whatever is in flight. Tests check it after every call."""

from __future__ import annotations

import itertools
from collections import Counter

from headway.core.request import Request
from headway.core.scheduler import Scheduler


def check_invariants(scheduler: Scheduler) -> None:
    """Raise `AssertionError`, naming what broke, unless requests, queue, steps in flight, blocks and promises agree."""
    scheduler.live.check_invariants()
    scheduler.landing.check_invariants()
    _check_slots(scheduler)
    _check_blocks(scheduler)
    _check_promises(scheduler)
    _check_prefix_cache(scheduler)


def _in_batch(scheduler: Scheduler) -> list[Request]:
    return [*scheduler.live.running, *scheduler.live.held]


def _check_slots(scheduler: Scheduler) -> None:
    kv_cache, block_size = scheduler.kv_cache, scheduler.kv_cache.block_size
    slots = {
        (table[position // block_size], position % block_size)
        for request in _in_batch(scheduler)
        for table in [kv_cache.block_table(request.request_id)]
        for position in range(request.num_computed_tokens)
    }
    assert scheduler.num_used_slots == len(slots), "the sum of used slots is wrong"


def _check_blocks(scheduler: Scheduler) -> None:
    kv_cache = scheduler.kv_cache
    pool = kv_cache.pool
    in_batch = _in_batch(scheduler)
    assert sorted(kv_cache.requests_with_blocks) == sorted(r.request_id for r in in_batch), (
        "a request that does not run has a block table, or one that runs has none"
    )
    owners: Counter[int] = Counter()
    for request in in_batch:
        table = kv_cache.block_table(request.request_id)
        assert len(table) == kv_cache.blocks_for(request.num_computed_tokens), f"{request} has {len(table)} blocks"
        assert len(set(table)) == len(table), f"{request} has a block twice"
        owners.update(table)
    kept = kv_cache.kept_blocks
    for block_id in range(pool.num_blocks):
        assert pool.ref_count(block_id) == owners[block_id], f"block {block_id}: wrong reference count"
        is_taken = owners[block_id] > 0 or block_id in kept
        assert pool.is_free(block_id) != is_taken, f"block {block_id}: used and free, or neither"
    assert kv_cache.num_used_blocks == len(owners), "the number of used blocks is wrong"
    assert kv_cache.num_table_entries == owners.total(), "the sum of table lengths is wrong"


def _check_promises(scheduler: Scheduler) -> None:
    kv_cache = scheduler.kv_cache
    promised = sum(kv_cache.num_promised_to(request.request_id) for request in _in_batch(scheduler))
    assert promised == kv_cache.num_promised_blocks, "the sum of promised blocks is wrong"


def _check_prefix_cache(scheduler: Scheduler) -> None:
    """Cached blocks form a tree; a request that uses one uses all above it; what is announced is being computed."""
    kv_cache, cache = scheduler.kv_cache, scheduler.kv_cache.prefix_cache
    if cache is None:
        assert not kv_cache.kept_blocks and not kv_cache.num_idle_blocks and not kv_cache.unlanded
        return
    assert kv_cache.unlanded.keys() <= set(_in_batch(scheduler)), "a request lands that is not in the batch"
    kept, children = kv_cache.kept_blocks, Counter(block.parent for block in cache)
    assert len(cache) == len(kept), "a cached block is unknown to the manager, or the other way round"
    for block in cache:
        assert kept[block.block_id] is block, f"{block} is not the one that its id stands for"
        assert block.is_idle == (kv_cache.pool.ref_count(block.block_id) == 0), f"{block}: idle and in use, or neither"
        assert block.num_children == children[block], f"{block} has {children[block]} children"
        assert block.parent is None or kept.get(block.parent.block_id) is block.parent, f"{block}: a split chain"
    assert cache.num_idle_blocks == sum(block.is_idle for block in cache), "the number of idle blocks is wrong"
    announced = cache.announced
    for request in _in_batch(scheduler):
        table, cached = kv_cache.block_table(request.request_id), kv_cache.cached_blocks(request.request_id)
        assert [block.block_id for block in cached] == list(table[: len(cached)]), f"{request} lost a cached block"
        assert all(below.parent is above for above, below in itertools.pairwise(cached)), f"{request}: no chain"
        num_announced = kv_cache.num_announced_blocks(request.request_id)
        for digest in request.block_digests(kv_cache.block_size, num_announced)[len(cached) : num_announced]:
            if announced.get(digest) == request.request_id:
                del announced[digest]
    assert not announced, "blocks are announced that no request computes"
    cache.check_candidates()
    if kv_cache.host_tier is not None:
        kv_cache.host_tier.check_invariants()
