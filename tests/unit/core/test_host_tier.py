from __future__ import annotations

import pytest

from headway.config import SchedulerConfig
from headway.core import (
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
from headway.core.step_time import TOKENS_PER_BASE

BLOCK_SIZE = 4


def make(*, num_blocks: int = 4, num_slots: int = 8, restore_block_s: float = 0.0, **options: object) -> Scheduler:
    kv_cache = KVCacheManager(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        prefix_cache=PrefixCache(),
        host_tier=HostTier(num_slots),
        restore_block_s=restore_block_s,
    )
    return Scheduler(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, **options).resolve("cpu"), kv_cache)  # type: ignore[arg-type]


def run(scheduler: Scheduler, name: str, tokens: range, *, max_tokens: int = 1) -> list[SchedulerOutput]:
    """One request alone, to its end."""
    scheduler.add_request(Request(name, tokens, max_tokens=max_tokens))
    steps = []
    while scheduler.has_unfinished_requests:
        steps.append(scheduler.schedule())
        check_invariants(scheduler)
        sampled = {share.request_id: SampledTokens((7,)) for share in steps[-1].scheduled if share.samples}
        scheduler.update(steps[-1], ModelRunnerOutput(sampled, {}))
        check_invariants(scheduler)
    return steps


def test_what_leaves_the_device_goes_to_the_host_and_comes_back() -> None:
    scheduler = make()
    (first,) = run(scheduler, "a", range(12))
    blocks_of_a = first.scheduled[0].new_block_ids
    (second,) = run(scheduler, "b", range(100, 113))
    moved_out = dict(second.moves.moved_out)
    assert set(moved_out) <= set(blocks_of_a), "only full blocks that were kept"
    assert len(moved_out) == 3
    (again,) = run(scheduler, "a again", range(12))
    assert again.new_requests[0].num_computed_tokens == 8, "the last block is computed: something must be sampled"
    assert [slot for slot, _ in again.moves.moved_in] == [moved_out[block] for block in blocks_of_a[:2]]
    assert [block for _, block in again.moves.moved_in] == list(again.new_requests[0].block_ids)


def test_what_is_on_the_device_is_not_taken_from_the_host() -> None:
    """Leaves go first, so the beginning of the chain is still there."""
    scheduler = make(num_blocks=4)
    (first,) = run(scheduler, "a", range(12))
    (second,) = run(scheduler, "b", range(100, 112))
    assert len(second.moves.moved_out) == 2
    (again,) = run(scheduler, "a again", range(12))
    assert again.new_requests[0].num_computed_tokens == 8
    assert again.new_requests[0].block_ids[0] == first.scheduled[0].new_block_ids[0]
    assert [block for _, block in again.moves.moved_in] == [again.new_requests[0].block_ids[1]]


def test_without_a_tier_nothing_moves() -> None:
    kv_cache = KVCacheManager(num_blocks=4, block_size=BLOCK_SIZE, prefix_cache=PrefixCache())
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64).resolve("cpu"), kv_cache)
    for name, first in (("a", 0), ("b", 100), ("c", 0)):
        for step in run(scheduler, name, range(first, first + 12)):
            assert not any(step.moves)


def test_the_slot_that_was_used_longest_ago_is_taken() -> None:
    tier = HostTier(2)
    assert [tier.put(b"a"), tier.put(b"b"), tier.put(b"a")] == [0, 1, None]
    assert tier.put(b"c") == 1
    assert b"b" not in tier
    assert tier.find([b"a", b"c", b"b"]) == [b"a", b"c"]
    assert tier.find([b"b", b"a"]) == [], "a chain is found from its first block on, or not at all"
    assert tier.stats.num_forgotten == 1
    tier.check_invariants()


def test_a_slot_that_the_next_step_reads_is_not_overwritten_before() -> None:
    tier = HostTier(1)
    slot = tier.put(b"a")
    assert tier.read(b"a") == slot
    assert tier.put(b"b") is None
    tier.step_planned()
    assert tier.put(b"b") == slot


def test_a_slot_that_cannot_be_trusted_is_a_miss() -> None:
    tier = HostTier(1)
    tier.put(b"a")
    tier.discard(b"a")
    tier.discard(b"never there")
    assert tier.find([b"a"]) == []
    tier.check_invariants()


@pytest.mark.parametrize(
    ("mode", "num_preemptions", "token_s", "is_restored"),
    [
        ("auto", 0, 1e-3, True),
        ("auto", 1, 1e-6, False),
        ("auto", 1, None, True),
        ("swap", 1, 1e-6, True),
        ("recompute", 1, 1e-3, False),
        ("recompute", 0, 1e-3, True),
        ("swap", 0, 1e-6, False),
    ],
)
def test_the_faster_way_back_unless_one_is_asked_for(
    mode: str, num_preemptions: int, token_s: float | None, is_restored: bool
) -> None:
    scheduler = make(preemption_mode=mode, restore_block_s=1e-3)
    if token_s is not None:
        scheduler.pace.step_time.observe(0, TOKENS_PER_BASE * token_s)
    request = Request("a", range(12), max_tokens=1)
    request.num_preemptions = num_preemptions
    tier = scheduler.kv_cache.host_tier
    assert tier is not None
    for digest in request.block_digests(BLOCK_SIZE, 2):
        tier.put(digest)
    scheduler.add_request(request)
    output = scheduler.schedule()
    check_invariants(scheduler)
    assert len(output.moves.moved_in) == (2 if is_restored else 0)
    assert output.new_requests[0].num_computed_tokens == (8 if is_restored else 0)
