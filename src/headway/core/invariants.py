"""What must be true of a scheduler between any two calls, whatever is in flight. Tests check it after every call."""

from __future__ import annotations

from collections import Counter

from headway.core.request import RequestStatus
from headway.core.scheduler import Scheduler


def check_invariants(scheduler: Scheduler) -> None:
    """Raise `AssertionError`, naming what broke, unless requests, queue, blocks and promises all agree."""
    _check_requests(scheduler)
    _check_tokens(scheduler)
    _check_blocks(scheduler)
    _check_promises(scheduler)
    scheduler.waiting.check_invariants()


def _check_requests(scheduler: Scheduler) -> None:
    running, waiting = scheduler.running, list(scheduler.waiting)
    assert Counter(r.request_id for r in [*running, *waiting]) == Counter(scheduler.requests.keys()), (
        "a live request is neither waiting nor running, or is both"
    )
    assert len(running) <= scheduler.limits.max_num_seqs, "more requests run than max_num_seqs"
    keys = [(scheduler.policy.key(r), r.arrival_index) for r in running]
    assert keys == sorted(keys), "running requests are out of policy order"
    for request in running:
        assert request.status is RequestStatus.RUNNING, f"{request} is in the running list"
        assert request.num_remaining_tokens >= 0, f"{request} has computed more than it has"
    for request in waiting:
        assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), f"{request} is in the queue"
        assert request.num_computed_tokens == 0, f"{request} waits but claims to be in the cache"
    assert scheduler.num_used_slots == sum(request.num_computed_tokens for request in running), (
        "the sum of used slots is wrong"
    )


def _check_tokens(scheduler: Scheduler) -> None:
    """Every pending token has a step in flight that samples it, and nobody has more tokens than allowed."""
    pending = Counter(
        request
        for step in scheduler.in_flight
        for request, share in zip(step.requests, step.output.scheduled, strict=True)
        if share.samples
    )
    for request in scheduler.requests.values():
        assert request.num_pending_tokens == pending[request], f"{request}: {pending[request]} tokens are on their way"
        num_known = request.num_prompt_tokens + request.num_output_tokens
        assert request.num_tokens == num_known + request.num_pending_tokens, f"{request}: wrong number of tokens"
        assert request.num_tokens <= request.max_total_tokens, f"{request} will have more tokens than it may"
        assert num_known < request.max_total_tokens, f"{request} should have finished"


def _check_blocks(scheduler: Scheduler) -> None:
    kv_cache = scheduler.kv_cache
    pool = kv_cache.pool
    assert sorted(kv_cache.requests_with_blocks) == sorted(r.request_id for r in scheduler.running), (
        "a request that does not run has a block table, or one that runs has none"
    )
    owners: Counter[int] = Counter()
    for request in scheduler.running:
        table = kv_cache.block_table(request.request_id)
        assert len(table) == kv_cache.blocks_for(request.num_computed_tokens), f"{request} has {len(table)} blocks"
        assert len(set(table)) == len(table), f"{request} has a block twice"
        owners.update(table)
    for block_id in range(pool.num_blocks):
        assert pool.ref_count(block_id) == owners[block_id], f"block {block_id}: wrong reference count"
        assert pool.is_free(block_id) == (owners[block_id] == 0), f"block {block_id}: used and free, or neither"


def _check_promises(scheduler: Scheduler) -> None:
    kv_cache = scheduler.kv_cache
    promised = sum(kv_cache.num_promised_to(request.request_id) for request in scheduler.running)
    assert promised == kv_cache.num_promised_blocks, "the sum of promised blocks is wrong"
