"""What must be true of a scheduler between any two calls, whatever is in flight. Tests check it after every call."""

from __future__ import annotations

import itertools
from collections import Counter

from headway.core.request import RequestStatus
from headway.core.scheduler import Scheduler


def check_invariants(scheduler: Scheduler) -> None:
    """Raise `AssertionError`, naming what broke, unless requests, queue, blocks and promises all agree."""
    _check_requests(scheduler)
    _check_tokens(scheduler)
    _check_blocks(scheduler)
    _check_promises(scheduler)
    _check_prefix_cache(scheduler)
    scheduler.waiting.check_invariants()


def _check_requests(scheduler: Scheduler) -> None:
    running, waiting, held = scheduler.running, list(scheduler.waiting), list(scheduler.held)
    assert Counter(r.request_id for r in [*running, *waiting, *held]) == Counter(scheduler.requests.keys()), (
        "a live request is neither waiting nor running nor held, or is two of these"
    )
    assert len(running) + len(held) <= scheduler.config.max_num_seqs, "more requests run than max_num_seqs"
    keys = [(r.entry_key, r.queue_place, r.arrival_index) for r in running]
    assert keys == sorted(keys), "running requests are out of order"
    for request in held:
        assert request.status is RequestStatus.HELD, f"{request} is held"
    for request in running:
        assert request.status is RequestStatus.RUNNING, f"{request} is in the running list"
        assert request.num_remaining_tokens >= 0, f"{request} has computed more than it has"
    for request in waiting:
        assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), f"{request} is in the queue"
        assert request.num_computed_tokens == 0, f"{request} waits but claims to be in the cache"
    slots = {
        (table[position // block_size], position % block_size)
        for request in [*running, *held]
        for table in [scheduler.kv_cache.block_table(request.request_id)]
        for block_size in [scheduler.kv_cache.block_size]
        for position in range(request.num_computed_tokens)
    }
    assert scheduler.num_used_slots == len(slots), "the sum of used slots is wrong"


def _check_tokens(scheduler: Scheduler) -> None:
    """Every pending token has a step in flight that samples it, and nobody has more tokens than allowed."""
    pending = Counter(
        request
        for step in scheduler.in_flight
        for request, share in zip(step.requests, step.output.scheduled, strict=True)
        if share.samples
    )
    for request in scheduler.requests.values():
        if request in scheduler.held:
            continue  # what is on its way to it is dropped
        assert request.num_pending_tokens == pending[request], f"{request}: {pending[request]} tokens are on their way"
        num_known = request.num_prompt_tokens + request.num_output_tokens
        assert request.num_tokens == num_known + request.num_pending_tokens, f"{request}: wrong number of tokens"
        assert request.num_tokens <= request.max_total_tokens, f"{request} will have more tokens than it may"
        assert num_known < request.max_total_tokens, f"{request} should have finished"


def _check_blocks(scheduler: Scheduler) -> None:
    kv_cache = scheduler.kv_cache
    pool = kv_cache.pool
    in_batch = [*scheduler.running, *scheduler.held]
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


def _check_prefix_cache(scheduler: Scheduler) -> None:
    """Cached blocks form a tree; who uses one uses all above it; what is announced has somebody who computes it."""
    kv_cache, cache = scheduler.kv_cache, scheduler.kv_cache.prefix_cache
    if cache is None:
        assert not kv_cache.kept_blocks and not kv_cache.num_idle_blocks
        return
    kept, children = kv_cache.kept_blocks, Counter(block.parent for block in cache)
    assert len(cache) == len(kept), "a cached block is unknown to the manager, or the other way round"
    for block in cache:
        assert kept[block.block_id] is block, f"{block} is not the one that its id stands for"
        assert block.is_idle == (kv_cache.pool.ref_count(block.block_id) == 0), f"{block}: idle and in use, or neither"
        assert block.num_children == children[block], f"{block} has {children[block]} children"
        assert block.parent is None or kept.get(block.parent.block_id) is block.parent, f"{block}: a split chain"
    assert cache.num_idle_blocks == sum(block.is_idle for block in cache), "the number of idle blocks is wrong"
    announced = cache.announced
    for request in [*scheduler.running, *scheduler.held]:
        table, cached = kv_cache.block_table(request.request_id), kv_cache.cached_blocks(request.request_id)
        assert [block.block_id for block in cached] == list(table[: len(cached)]), f"{request} lost a cached block"
        assert all(below.parent is above for above, below in itertools.pairwise(cached)), f"{request}: no chain"
        own = request.block_digests[len(cached) : kv_cache.num_announced_blocks(request.request_id)]
        for digest in own:
            if announced.get(digest) == request.request_id:
                del announced[digest]
    assert not announced, "blocks are on their way that nobody computes"
    cache.check_candidates()
    if kv_cache.host_tier is not None:
        kv_cache.host_tier.check_invariants()


def _check_promises(scheduler: Scheduler) -> None:
    kv_cache = scheduler.kv_cache
    in_batch = [*scheduler.running, *scheduler.held]
    promised = sum(kv_cache.num_promised_to(request.request_id) for request in in_batch)
    assert promised == kv_cache.num_promised_blocks, "the sum of promised blocks is wrong"
