from __future__ import annotations

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
from headway.core.kv.tiered_cache import TieredCache
from headway.core.queue import GuardedQueue, KeyedQueue
from headway.core.request_options import RequestOptions
from headway.core.step_time import StepTimeModel

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


def tiers_of(scheduler: Scheduler) -> TieredCache:
    assert scheduler.kv_cache.tiers is not None
    return scheduler.kv_cache.tiers


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
        scheduler.pace.step_time.observe(0, StepTimeModel.TOKENS_PER_BASE * token_s)
    request = Request("a", range(12), max_tokens=1)
    request.num_preemptions = num_preemptions
    tier = tiers_of(scheduler).host
    for digest in request.block_digests(BLOCK_SIZE, 2):
        tier.put(digest)
    scheduler.add_request(request)
    output = scheduler.schedule()
    check_invariants(scheduler)
    assert len(output.moves.moved_in) == (2 if is_restored else 0)
    assert output.new_requests[0].num_computed_tokens == (8 if is_restored else 0)


@pytest.mark.parametrize(
    ("duration_s", "has_prepared", "is_learnt"), [(0.029, False, False), (0.031, False, True), (0.031, True, False)]
)
def test_what_is_learnt_from_steps(duration_s: float, has_prepared: bool, is_learnt: bool) -> None:
    """Nothing of one that waited for a graph, or for copies longer than a tenth of its time."""
    scheduler = make(restore_block_s=1e-3)
    run(scheduler, "a", range(12))
    scheduler.add_request(Request("b", range(100, 113), max_tokens=1))
    output = scheduler.schedule()
    assert len(output.moves.moved_out) == 3
    done = ModelRunnerOutput({"b": SampledTokens((7,))}, {}, has_prepared=has_prepared)
    scheduler.update(output, done, duration_s=duration_s)
    assert (scheduler.pace.step_time.base_s is not None) == is_learnt


# ---- disk and other replicas ----------------------------------------------------------------------------------------


def disk_with(*digests: bytes) -> DiskIndex:
    disk = DiskIndex(100)
    for digest in digests:
        disk.add(digest)
    return disk


def tier_with_disk(num_slots: int, *on_disk: bytes) -> HostTier:
    return HostTier(num_slots, disk=disk_with(*on_disk))


def landed_put(tier: HostTier, digest: bytes) -> int:
    slot = tier.put(digest)
    assert slot is not None
    tier.copied_out([slot])
    return slot


def test_a_fetched_block_is_found_when_it_has_come() -> None:
    tier = tier_with_disk(2, b"a", b"b")
    assert tier.fetch(b"a", "") and tier.fetch(b"b", "")
    ((digest, slot, source), _), stored = tier.take_transfers()
    assert (digest, source, stored) == (b"a", "", ()) and b"a" not in tier
    assert tier.take_transfers() == ((), ()), "begun once"
    assert tier.put(b"c") is None, "slots that are being filled are not given away"
    assert tier.put(b"a") is None, "it is on its way"
    tier.fetch_done(b"a", True, seconds=0.5)
    tier.fetch_done(b"b", False)
    assert tier.read(b"a") == slot and tier.find([b"b"]) == []
    assert tier.disk is not None and b"b" not in tier.disk, "it is not there after all"
    assert (tier.stats.num_fetched_blocks, tier.stats.num_failed_fetches) == (1, 1)
    tier.check_invariants()


def test_blocks_that_are_pinned_keep_their_slots() -> None:
    tier = tier_with_disk(3, b"a", b"b", b"c", b"d")
    for digest in (b"a", b"b"):
        assert tier.fetch(digest, "")
    tier.pin([b"a", b"b"])
    tier.pin([b"b"])
    for digest in (b"a", b"b"):
        tier.fetch_done(digest, True)
    assert tier.num_takeable == 1 and tier.fetch(b"c", "") and not tier.fetch(b"d", "")
    assert tier.put(b"evicted") is None
    tier.unpin([b"a", b"b"])
    assert tier.pins == {b"b": 1} and tier.num_takeable == 1
    assert tier.fetch(b"d", "") and b"a" not in tier and not tier.fetch(b"a", "")
    tier.check_invariants()


def test_a_fetch_takes_no_slot_that_is_needed() -> None:
    tier = HostTier(3)
    read, kept = landed_put(tier, b"read"), landed_put(tier, b"kept")
    being_copied = tier.put(b"new")
    assert being_copied is not None
    tier.read(b"read")
    assert not tier.fetch(b"a", "there", keep={b"kept"})
    assert tier.fetch(b"a", "there")
    assert tier.take_transfers()[0] == ((b"a", kept, "there"),)
    tier.discard([being_copied])  # its step has failed, and another one may be copying to its slot
    assert not tier.fetch(b"b", "there")
    tier.copied_out([being_copied])
    assert tier.fetch(b"b", "there") and not tier.fetch(b"c", "there")
    tier.step_planned()
    assert tier.fetch(b"c", "there")
    assert [slot for _, slot, _ in tier.take_transfers()[0]] == [being_copied, read]
    tier.check_invariants()


def test_the_oldest_blocks_are_stored_once_slots_become_scarce() -> None:
    tier = tier_with_disk(8, b"4")
    for number in range(5):
        landed_put(tier, str(number).encode())
    assert tier.take_transfers() == ((), ())
    tier.touch([b"0"])
    landed_put(tier, b"5")
    stored = dict(tier.take_transfers()[1])
    assert list(stored) == [b"1", b"2", b"3", b"0", b"5"], "4 is on disk already"
    for digest in (b"1", b"2"):
        tier.store_done(digest, digest == b"1")
    assert tier.put(b"6") is not None and tier.put(b"7") is not None  # the last free ones
    assert [tier.put(name) for name in (b"8", b"9")] == [stored[b"1"], stored[b"2"]], "3 is being stored"
    assert tier.put(b"10") is not None and b"4" not in tier
    assert tier.stats.num_dropped_blocks == 0
    for name in (b"11", b"12"):
        assert tier.put(name) is not None
    assert tier.stats.num_dropped_blocks == 2, "the disk is too slow"
    assert (tier.stats.num_stored_blocks, tier.stats.num_failed_stores) == (1, 1)
    tier.check_invariants()


def test_what_a_step_in_flight_copies_out_is_not_stored() -> None:
    tier = tier_with_disk(1)
    slot = tier.put(b"a")
    assert slot is not None and tier.take_transfers() == ((), ())
    tier.copied_out([slot])
    assert tier.take_transfers() == ((), ((b"a", slot),))


def test_a_block_of_another_replica_goes_to_disk_too() -> None:
    tier = tier_with_disk(1)
    tier.fetch(b"a", "there")
    tier.take_transfers()
    tier.fetch_done(b"a", True)
    assert [digest for digest, _ in tier.take_transfers()[1]] == [b"a"]


def test_the_index_of_the_disk_is_bounded() -> None:
    disk = DiskIndex(2)
    for digest in (b"a", b"b", b"a", b"c"):
        disk.add(digest)
    assert len(disk) == 2 and b"a" in disk and b"b" not in disk
    disk.discard(b"b")
    disk.discard(b"a")
    assert len(disk) == 1


def test_fetches_are_compared_with_computing_and_tried_again_some_time() -> None:
    disk = DiskIndex(4)
    assert disk.is_worth_fetching(1e-9), "not known yet"
    disk.note_fetched(1.0)
    assert disk.is_worth_fetching(1.1)
    assert sum(not disk.is_worth_fetching(0.9) for _ in range(100)) == 11


@pytest.mark.parametrize(("block_s", "is_fetched"), [(1.1e-3, True), (0.9e-3, False)])
@pytest.mark.parametrize("slower", ["fetch", "restore"])
def test_blocks_are_copied_in_while_others_are_read(slower: str, block_s: float, is_fetched: bool) -> None:
    """So what counts is the slower of both."""
    scheduler = make(restore_block_s=1e-3 if slower == "restore" else 0.9e-3)
    tier = tiers_of(scheduler).host
    tier.disk = DiskIndex(100)
    tier.disk.block_s = 1e-3 if slower == "fetch" else 0.9e-3
    scheduler.pace.step_time.observe(0, StepTimeModel.TOKENS_PER_BASE * block_s / BLOCK_SIZE)
    request = Request("a", range(12), max_tokens=1)
    for digest in request.block_digests(BLOCK_SIZE, 2):
        tier.disk.add(digest)
    scheduler.add_request(request)
    output = scheduler.schedule()
    assert len(output.moves.fetched) == (2 if is_fetched else 0)
    assert output.is_empty == is_fetched


@pytest.mark.parametrize("num_slots", [16, 3])
def test_what_lies_on_disk_between_blocks_that_are_here_is_fetched(num_slots: int) -> None:
    """With three slots, the last ones make room for the first."""
    scheduler = make(num_blocks=16, num_slots=num_slots)
    request = Request("a", range(25), max_tokens=1)
    digests = request.block_digests(BLOCK_SIZE, 6)[:6]
    tier = tiers_of(scheduler).host
    tier.disk = disk_with(*digests)
    for number in (5, 2, 0):  # used longest ago first
        landed_put(tier, digests[number])
    scheduler.add_request(request)
    fetched = scheduler.schedule().moves.fetched
    check_invariants(scheduler)
    assert [digests.index(digest) for digest, _, _ in fetched] == ([1, 3, 4] if num_slots == 16 else [1])
    for digest, _, _ in fetched:
        scheduler.fetch_done(digest, True)
    check_invariants(scheduler)
    output = scheduler.schedule()
    assert output.new_requests[0].num_computed_tokens == BLOCK_SIZE * (6 if num_slots == 16 else 3)
    assert not tier.pins


def test_what_was_used_last_is_fetched_before_it_is_asked_for() -> None:
    tiers = tiers_of(make(num_slots=8))
    tier = tiers.host
    assert tiers.fetch_latest(3) == [], "there is no disk"
    tier.disk = disk_with(*(str(number).encode() for number in range(9)))
    landed_put(tier, b"7")
    assert tier.fetch(b"5", "")
    assert tiers.fetch_latest(3) == [b"8", b"6", b"4"]
    assert tiers.fetch_latest(3) == [b"3"], "a quarter of the slots stays free"
    assert tiers.fetch_latest(3) == []
    for digest in (b"5", b"8", b"4", b"3"):
        tier.fetch_done(digest, True)
    tier.fetch_done(b"6", False)
    tiers.note_latest([b"8", b"6", b"4", b"3"])
    assert tiers.fetch_latest(8) == [b"2"], "in place of the one that did not come"
    tier.fetch_done(b"2", True)
    tiers.note_latest([b"8", b"4", b"3", b"2"])
    order = [landed_put(tier, name) for name in (b"x", b"y", b"z")]
    assert len(set(order)) == 3 and b"7" not in tier, "used longest ago of all that are here"
    landed_put(tier, b"w")
    landed_put(tier, b"v")
    assert b"2" not in tier and b"3" in tier and b"8" in tier
    assert tier.disk.latest(4) == [b"8", b"4", b"3", b"2"]
    tier.check_invariants()


@pytest.mark.parametrize("num_blocks", [4, 32, 320])
def test_blocks_that_come_together_have_a_part_of_their_time_each(num_blocks: int) -> None:
    """With many readers one block seems to take all the time, and those beside it none."""
    digests, num_readers = [number.to_bytes(4, "big") for number in range(num_blocks)], min(16, num_blocks)
    tier = tier_with_disk(num_blocks, *digests)
    for number, digest in enumerate(digests):
        tier.fetch(digest, "")
        tier.fetch_done(digest, True, seconds=0.0 if number % num_readers else 1.0)
    assert tier.disk is not None and tier.disk.block_s == pytest.approx(1 / num_readers, rel=0.3)


def test_a_request_is_fetched_from_disk_or_from_the_replica_it_names() -> None:
    """What is on the device or the host is not asked for; chains are not asked for behind a hole."""
    scheduler = make(num_blocks=20)
    run(scheduler, "a", range(5))  # one block on the device
    tier = tiers_of(scheduler).host
    tier.disk = DiskIndex(10)
    digests = Request("x", range(17), max_tokens=1).block_digests(BLOCK_SIZE, 4)
    for place in (0, 1, 3):
        tier.disk.add(digests[place])
    scheduler.add_request(Request("disk", range(17), max_tokens=1))
    moves = scheduler.schedule().moves
    check_invariants(scheduler)
    assert [(digest, source) for digest, _, source in moves.fetched] == [(digests[1], "")]
    named = Request("named", range(17), max_tokens=1, options=RequestOptions(blocks_at="there"))
    scheduler.add_request(named)
    moves = scheduler.schedule().moves
    check_invariants(scheduler)
    assert [(digest, source) for digest, _, source in moves.fetched] == [(one, "there") for one in digests[2:]]
    assert len(scheduler.live.fetching.requests) == scheduler.num_waiting == 2
    scheduler.fetch_done(digests[1], True)
    assert len(scheduler.live.fetching.requests) == 1
    (new,) = scheduler.schedule().new_requests
    assert (new.request_id, new.num_computed_tokens) == ("disk", 8)
    scheduler.fetch_done(digests[3], True)
    scheduler.fetch_done(digests[2], False)
    check_invariants(scheduler)
    assert len(scheduler.live.fetching.requests) == 0 and named.has_fetched


def test_a_request_that_was_away_is_still_guarded_against_starvation() -> None:
    queue = GuardedQueue(
        KeyedQueue(lambda request: request.num_prompt_tokens, front_size=4),
        grace_s=1.0,
        stretch=1.0,
        promise_s=lambda request: 0.0,
    )
    away, short = Request("away", range(9), max_tokens=1), Request("short", range(2), max_tokens=1)
    for index, request in enumerate((away, short)):
        request.arrive(index, now_s=0.0)
        queue.push(request)
    queue.remove(away)
    queue.advance(2.0)
    queue.admit(short)
    queue.push(away)
    assert queue.lift_at_s(away) == 3.0
    queue.check_invariants()
