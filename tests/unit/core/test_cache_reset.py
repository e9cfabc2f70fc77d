"""A reset of the cache, at any time: what requests use stays, all else is forgotten, and the books agree."""

from __future__ import annotations

import random

import pytest

from headway.config import SchedulerConfig
from headway.core import (
    DiskIndex,
    HostTier,
    KVCacheManager,
    ModelRunnerOutput,
    PrefixCache,
    Request,
    SampledTokens,
    Scheduler,
    SchedulerOutput,
    check_invariants,
)
from headway.core.kv.manager import CacheReset
from headway.core.request_options import RequestOptions

BLOCK_SIZE = 4


def make(num_blocks: int, num_slots: int) -> Scheduler:
    kv_cache = KVCacheManager(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        prefix_cache=PrefixCache(),
        host_tier=HostTier(num_slots) if num_slots else None,
    )
    return Scheduler(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24).resolve("cpu"), kv_cache)


def update(scheduler: Scheduler, output: SchedulerOutput) -> None:
    sampled = {share.request_id: SampledTokens((7,)) for share in output.scheduled if share.samples}
    scheduler.update(output, ModelRunnerOutput(sampled, {}))


def reset(scheduler: Scheduler) -> CacheReset:
    """Reset, and check what is left."""
    kv_cache = scheduler.kv_cache
    assert kv_cache.prefix_cache is not None
    tables = {name: kv_cache.block_table(name) for name in kv_cache.holdings}
    outcome = kv_cache.forget_idle()
    check_invariants(scheduler)
    in_use = {block_id for table in tables.values() for block_id in table}
    assert {name: kv_cache.block_table(name) for name in kv_cache.holdings} == tables
    assert all(block.block_id in in_use for block in kv_cache.prefix_cache)
    num_on_host = 0 if kv_cache.tiers is None else len(kv_cache.tiers.host)
    assert outcome.num_kept == len(kv_cache.prefix_cache) + num_on_host
    return outcome


@pytest.mark.parametrize("num_slots", [0, 8])
@pytest.mark.parametrize("seed", range(10))
def test_at_any_time(seed: int, num_slots: int) -> None:
    chance = random.Random(seed)
    scheduler = make(20, num_slots)
    stems = [[chance.randrange(50) for _ in range(20)] for _ in range(3)]
    num_resets = num_forgotten = number = 0
    while number < 60 or scheduler.has_unfinished_requests:
        if number < 60 and chance.random() < 0.5:
            prompt = [*chance.choice(stems)[: chance.randrange(1, 21)], chance.randrange(50)]
            options = RequestOptions(cache_ttl_s=chance.choice([0.0, 100.0]))
            scheduler.add_request(Request(f"r{number}", prompt, max_tokens=chance.randrange(1, 9), options=options))
            number += 1
        output = scheduler.schedule()
        if chance.random() < 0.15:  # while a step is in flight
            num_forgotten += reset(scheduler).num_forgotten
            num_resets += 1
        if not output.is_empty:
            update(scheduler, output)
            check_invariants(scheduler)
        if chance.random() < 0.15:  # between two steps
            num_forgotten += reset(scheduler).num_forgotten
            num_resets += 1
    assert num_resets > 3 and num_forgotten > 0
    assert reset(scheduler).num_kept == 0
    assert scheduler.kv_cache.device.pool.num_free_blocks == 20
    hits = scheduler.kv_cache.prefix_cache.stats  # type: ignore[union-attr]
    before = hits.num_hit_tokens
    scheduler.add_request(Request("again", stems[0], max_tokens=1))
    update(scheduler, scheduler.schedule())
    assert hits.num_hit_tokens == before, "nothing of before is found"


@pytest.mark.parametrize("state", ["pinned", "being stored", "read by the next step"])
def test_blocks_in_host_memory_that_are_needed_stay(state: str) -> None:
    tier = HostTier(4, disk=DiskIndex(4))
    needed, idle = b"n" * 32, b"i" * 32
    for digest in (needed, idle):
        slot = tier.put(digest)
        assert slot is not None
        tier.copied_out([slot])
    if state == "pinned":
        tier.pin([needed])
    elif state == "being stored":
        tier.touch([idle])
        tier.store_some(1)
    else:
        tier.read(needed)
    assert tier.forget_idle() == 1
    tier.check_invariants()
    assert needed in tier and idle not in tier
    if state == "pinned":
        tier.unpin([needed])
    elif state == "being stored":
        tier.store_done(needed, True)
    else:
        tier.step_planned()
    assert tier.forget_idle() == 1 and len(tier) == 0
    tier.check_invariants()


def test_what_is_being_fetched_still_comes() -> None:
    tier = HostTier(4, disk=DiskIndex(4))
    assert tier.fetch(b"f" * 32, "")
    assert tier.forget_idle() == 0
    tier.fetch_done(b"f" * 32, True)
    tier.check_invariants()
    assert b"f" * 32 in tier
