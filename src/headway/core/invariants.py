"""Checks what must be true of a scheduler between any two calls, whatever is in flight. Tests check it each time."""

from __future__ import annotations

import itertools
from collections import Counter

from headway.core.kv.host_tier import PartState
from headway.core.request import Request, RequestStatus
from headway.core.scheduler import Scheduler


def check_invariants(scheduler: Scheduler) -> None:
    """Raise `AssertionError`, which names the violation, unless requests, queue, steps and blocks agree."""
    _check_places(scheduler)
    _check_in_flight(scheduler)
    _check_slots(scheduler)
    _check_blocks(scheduler)
    _check_promises(scheduler)
    _check_prefix_cache(scheduler)


def _check_places(scheduler: Scheduler) -> None:
    """Check that each live request is in exactly one place, the one that its status says."""
    live = scheduler.live
    waiting = list(live.waiting)
    in_places = sorted(request.request_id for request in [*scheduler.in_batch, *waiting, *live.fetching.requests])
    assert in_places == sorted(live.by_id), "a live request is in no place, or in two"
    assert live.num_free_seats >= 0, "more requests run than max_num_seqs"
    assert live.orders.keys() == set(live.running), "a running request has no order, or another one has"
    orders = [live.orders[request] for request in live.running]
    assert orders == sorted(orders), "running requests are out of order"
    for request in live.running:
        assert request.status is RequestStatus.RUNNING, f"{request} is in the running list"
        assert request.num_remaining_tokens >= 0, f"{request} has computed more than it has"
    for request in waiting:
        assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), f"{request} is in the queue"
        assert request.num_computed_tokens == 0, f"{request} waits but claims to be in the cache"
    for request, awaited in live.fetching.requests.items():
        assert request.status is RequestStatus.FETCHING, f"{request} waits for blocks"
        assert request.num_computed_tokens == 0 and request.has_fetched, f"{request} waits for blocks"
        assert bool(awaited.missing) != (request in live.fetching.blocked), f"{request} waits for nothing"
        assert awaited.missing <= set(awaited.chain), f"{request} waits for blocks of another"
    assert live.fetching.blocked.keys() <= live.fetching.requests.keys(), "a request is blocked that does not fetch"
    assert live.num_skips.keys() <= set(waiting), "skips are counted for a request that does not wait"
    num_computed = sum(request.num_computed_tokens for request in scheduler.in_batch)
    assert num_computed == live.num_computed_tokens, "the sum of computed tokens is wrong"
    live.waiting.check_invariants()
    live.totals.check_invariants({*waiting, *live.fetching.requests})


def _check_in_flight(scheduler: Scheduler) -> None:
    """Check that every pending token of a live request has a step in flight that samples it, and that steps keep only
    shares of requests that still have their blocks."""
    num_pending: dict[Request, int] = {}
    for step in scheduler.in_flight:
        assert step.keeps.keys() <= set(step.requests), "a request is kept that is not in the step"
        for request, share in zip(step.requests, step.output.scheduled, strict=True):
            if share.samples and request not in step.dropped:
                num_pending[request] = num_pending.get(request, 0) + 1 + len(share.drafts)
        for request in step.keeps:
            has_blocks = request.status is RequestStatus.RUNNING or request.status.is_finished
            assert has_blocks, f"{request} has lost its blocks, and they are kept"
    for request in scheduler.live.by_id.values():
        if request.status.is_finished:
            continue  # its pending tokens are dropped
        expected = num_pending.get(request, 0)
        assert request.num_pending_tokens == expected, f"{request}: steps in flight sample {expected} tokens"
        num_known = request.num_prompt_tokens + request.num_output_tokens
        assert request.num_tokens == num_known + request.num_pending_tokens, f"{request}: wrong number of tokens"
        assert request.num_tokens <= request.max_total_tokens, f"{request} will have more tokens than it may"
        assert num_known < request.max_total_tokens, f"{request} should have finished"


def _check_slots(scheduler: Scheduler) -> None:
    kv_cache, block_size = scheduler.kv_cache, scheduler.kv_cache.block_size
    slots = {
        (table[position // block_size], position % block_size)
        for request in scheduler.in_batch
        for table in [kv_cache.block_table(request.request_id)]
        for position in range(request.num_computed_tokens)
    }
    assert scheduler.num_used_slots == len(slots), "the sum of used slots is wrong"


def _check_blocks(scheduler: Scheduler) -> None:
    kv_cache = scheduler.kv_cache
    pool, kept = kv_cache.device.pool, [*kv_cache.device.cached]
    in_batch = scheduler.in_batch
    max_drafts = 0 if scheduler.speculation is None else 2 * scheduler.config.max_draft_tokens
    assert sorted(kv_cache.holdings) == sorted(r.request_id for r in in_batch), (
        "a request that does not run has a block table, or one that runs has none"
    )
    owners: Counter[int] = Counter()
    for request in in_batch:
        table = kv_cache.block_table(request.request_id)
        num_blocks = kv_cache.blocks_for(request.num_computed_tokens)
        most = kv_cache.blocks_for(request.num_computed_tokens + max_drafts)  # rejected drafts leave their blocks
        assert num_blocks <= len(table) <= most, f"{request} has {len(table)} blocks"
        assert len(set(table)) == len(table), f"{request} has a block twice"
        owners.update(table)
    if kv_cache.tiers is not None:
        kept += kv_cache.tiers.prefetched.values()
    assert len({*kept}) == len(kept), "a block is kept twice"
    for block_id in range(pool.num_blocks):
        assert pool.ref_count(block_id) == owners[block_id], f"block {block_id}: wrong reference count"
        is_taken = owners[block_id] > 0 or block_id in kept
        assert pool.is_free(block_id) != is_taken, f"block {block_id}: used and free, or neither"
    assert kv_cache.num_used_blocks == len(owners), "the number of used blocks is wrong"
    assert kv_cache.num_table_entries == owners.total(), "the sum of table lengths is wrong"


def _check_promises(scheduler: Scheduler) -> None:
    kv_cache = scheduler.kv_cache
    promised = sum(holding.promised for holding in kv_cache.holdings.values())
    assert promised == kv_cache.num_promised_blocks, "the sum of promised blocks is wrong"


def _check_prefix_cache(scheduler: Scheduler) -> None:
    """Check that cached blocks form a tree, that a request that uses one uses all above it, and that announced blocks
    are being computed."""
    kv_cache, cache = scheduler.kv_cache, scheduler.kv_cache.prefix_cache
    if cache is None:
        assert not kv_cache.device.cached and not kv_cache.device.num_idle and not kv_cache.uncached
        return
    assert kv_cache.uncached.keys() <= set(scheduler.in_batch), "a request lands that is not in the batch"
    kept, children = kv_cache.device.cached, Counter(block.parent for block in cache)
    assert len(cache) == len(kept), "a cached block is unknown to the manager, or the other way round"
    for block in cache:
        assert kept[block.block_id] is block, f"{block} is not the one that its id stands for"
        is_used = kv_cache.device.pool.ref_count(block.block_id) > 0
        assert block.is_idle != is_used, f"{block}: idle and in use, or neither"
        assert block.num_children == children[block], f"{block} has {children[block]} children"
        assert block.parent is None or kept.get(block.parent.block_id) is block.parent, f"{block}: a split chain"
    assert cache.num_idle_blocks == sum(block.is_idle for block in cache), "the number of idle blocks is wrong"
    announced = cache.announced
    for request in scheduler.in_batch:
        holding = kv_cache.holdings[request.request_id]
        cached = [kv_cache.device.nodes[block_id] for block_id in holding.table[: holding.num_cached]]
        assert all(block.is_cached for block in cached), f"{request} lost a cached block"
        assert all(below.parent is above for above, below in itertools.pairwise(cached)), f"{request}: no chain"
        num_announced = holding.num_announced
        for digest in request.block_digests(kv_cache.block_size, num_announced)[len(cached) : num_announced]:
            if announced.get(digest) == request.request_id:
                del announced[digest]
    assert not announced, "blocks are announced that no request computes"
    cache.eviction.check_invariants(cache)
    tiers = kv_cache.tiers
    if tiers is not None:
        tiers.check_invariants()
        assert tiers.pinned_for.keys() <= scheduler.live.by_id.keys(), "blocks are pinned for one that has ended"
    awaited = set().union(*(one.missing for one in scheduler.live.fetching.requests.values()))
    fetching = {digest for digest in awaited if tiers is not None and tiers.host.state_of(digest) is PartState.FETCHING}
    assert awaited == fetching, "a block is awaited and not fetched"
