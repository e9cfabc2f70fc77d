"""The prefix cache in the scheduler: who starts from what, who waits for whom, and what must never be found again."""

from __future__ import annotations

import pytest

from headway.config import SchedulerConfig
from headway.core import (
    HostTier,
    KVCacheManager,
    ModelRunnerOutput,
    PrefixCache,
    Request,
    RequestStatus,
    SampledTokens,
    Scheduler,
    SchedulerOutput,
    check_invariants,
)
from tests.unit.core.driver import finish, make_request, make_scheduler, step

BLOCK = 4


def make(**options: object) -> Scheduler:
    return make_scheduler(block_size=BLOCK, prefix_cache=PrefixCache(), **{"max_num_batched_tokens": 64} | options)


def cache_of(scheduler: Scheduler) -> PrefixCache:
    assert scheduler.kv_cache.prefix_cache is not None
    return scheduler.kv_cache.prefix_cache


def add(scheduler: Scheduler, name: str, tokens: range | list[int], max_tokens: int = 1, **options: object) -> Request:
    request = make_request(name, tokens, max_tokens=max_tokens, **options)
    scheduler.add_request(request)
    return request


def plan(scheduler: Scheduler, now_s: float = 0.0) -> SchedulerOutput:
    output = scheduler.schedule(now_s=now_s)
    check_invariants(scheduler)
    return output


def run(scheduler: Scheduler, name: str, tokens: range | list[int], max_tokens: int = 1, **options: object) -> Request:
    """One request to its end, whatever else runs; it says 0 all the time."""
    request = add(scheduler, name, tokens, max_tokens, **options)
    while not request.status.is_finished:
        step(scheduler)
    return request


# ------------------------------------------------------------------------------------------------- what is started from


@pytest.mark.parametrize(
    ("num_tokens", "num_cached"),
    [(3, 2), (4, 0), (5, 4), (8, 4), (9, 8), (11, 10), (12, 8), (13, 12)],
)
def test_all_but_one_token_of_the_same_prompt_is_found(num_tokens: int, num_cached: int) -> None:
    """The last full block is never shared whole: something must be computed, or nothing could be sampled."""
    scheduler = make()
    run(scheduler, "first", range(num_tokens))
    again = run(scheduler, "again", range(num_tokens))
    assert again.num_cached_tokens == num_cached


def test_shared_blocks_are_the_same_blocks() -> None:
    scheduler = make()
    add(scheduler, "a", range(9), max_tokens=5)
    step(scheduler)
    add(scheduler, "b", [*range(8), 77, 78], max_tokens=5)
    step(scheduler)
    tables = [scheduler.kv_cache.block_table(name) for name in "ab"]
    assert tables[0][:2] == tables[1][:2] and tables[0][2] != tables[1][2]
    assert scheduler.kv_cache.num_used_blocks == 4
    assert scheduler.kv_cache.num_table_entries == 6


def test_the_next_turn_of_a_conversation_starts_from_the_answer() -> None:
    scheduler = make()
    first = run(scheduler, "turn 1", range(6), max_tokens=7)
    history = [*first.prompt_token_ids, *first.output_token_ids]
    second = run(scheduler, "turn 2", [*history, 50, 51, 52])
    assert second.num_cached_tokens == len(history) - 1, "the last token of an answer is never computed"


def test_branches_start_from_where_they_part() -> None:
    scheduler = make()
    run(scheduler, "a", [*range(8), *range(100, 108)])
    run(scheduler, "b", [*range(8), *range(200, 208)])
    assert run(scheduler, "c", [*range(8), *range(100, 109)]).num_cached_tokens == 16
    assert run(scheduler, "d", [*range(8), *range(200, 209)]).num_cached_tokens == 16
    assert run(scheduler, "e", [*range(4), *range(100, 109)]).num_cached_tokens == 4


def test_a_tail_is_copied_not_shared() -> None:
    scheduler = make()
    add(scheduler, "a", range(6), max_tokens=5)
    step(scheduler)
    add(scheduler, "b", [*range(6), 9], max_tokens=5)
    output = plan(scheduler)
    (source, target), *others = output.moves.copied
    assert not others
    assert source == scheduler.kv_cache.block_table("a")[1]
    assert target == scheduler.kv_cache.block_table("b")[1]
    assert output.new_requests[0].num_computed_tokens == 6


def test_preempted_requests_find_what_they_had_computed() -> None:
    scheduler = make(num_blocks=6, max_num_seqs=2)
    first, second = (
        add(scheduler, name, range(start, start + 7), 12) for name, start in (("first", 0), ("second", 50))
    )
    while not second.num_preemptions:
        step(scheduler)
    while second.status is not RequestStatus.RUNNING:
        output = plan(scheduler)
        finish(scheduler, output)
    (back,) = output.new_requests
    assert first.status.is_finished
    assert back.num_computed_tokens >= BLOCK
    assert second.num_cached_tokens == 0, "what a request finds of its own is no hit of its prompt"


def test_requests_that_need_every_token_computed_read_nothing_but_leave_theirs() -> None:
    scheduler = make()
    run(scheduler, "first", range(9))
    whole = run(scheduler, "whole", range(13), reads_cache=False)
    assert whole.num_cached_tokens == 0
    assert cache_of(scheduler).stats.num_queried_tokens == 9
    run(scheduler, "another", range(100, 109), reads_cache=False)
    assert run(scheduler, "reader", range(100, 109)).num_cached_tokens == 8


def test_counters() -> None:
    scheduler = make(num_blocks=4)
    run(scheduler, "a", range(9))
    run(scheduler, "b", [*range(8), 70, 71])
    stats = cache_of(scheduler).stats
    assert (stats.num_queried_tokens, stats.num_hit_tokens) == (19, 8)
    assert stats.hit_rate == 8 / 19
    assert stats.num_evicted_blocks == 0
    run(scheduler, "c", range(100, 116))
    assert stats.num_evicted_blocks == 4
    assert run(scheduler, "d", range(9)).num_cached_tokens == 0


# ---------------------------------------------------------------------------------------------------------------- salts


def test_only_requests_with_the_same_salt_share() -> None:
    scheduler = make()
    salts = [None, "x", "y", None, "x", "y"]
    found = [run(scheduler, f"r{i}", range(9), cache_salt=salt).num_cached_tokens for i, salt in enumerate(salts)]
    assert found == [0, 0, 0, 8, 8, 8]


def test_nobody_waits_for_another_salt() -> None:
    scheduler = make()
    for name in ("x", "y"):
        add(scheduler, name, range(9), cache_salt=name)
    assert len(plan(scheduler).new_requests) == 2


# ------------------------------------------------------------------------------------------------- waiting for a prefix


def test_who_needs_what_is_being_computed_waits_and_others_pass() -> None:
    scheduler = make()
    for name, start in (("a", 0), ("same", 0), ("other", 50)):
        add(scheduler, name, range(start, start + 9), max_tokens=3)
    output = plan(scheduler)
    assert [new.request_id for new in output.new_requests] == ["a", "other"]
    assert plan(scheduler).new_requests == (), "also while the step runs"
    finish(scheduler, output)
    (late,) = plan(scheduler).new_requests
    assert (late.request_id, late.num_computed_tokens) == ("same", 8)


def test_it_waits_through_all_chunks_of_what_it_needs_and_for_no_more() -> None:
    scheduler = make(max_chunk_tokens=4)
    add(scheduler, "long", range(40))
    add(scheduler, "short", range(10))
    steps = [step(scheduler) for _ in range(4)]
    assert [list(shares) for shares in steps] == [["long"], ["long"], ["long", "short"], ["long"]]
    assert steps[2]["short"] == 2, "its two full blocks were there after two chunks"


@pytest.mark.parametrize("max_head_skips", [0, 5])
def test_it_does_not_wait_for_one_that_is_gone(max_head_skips: int) -> None:
    scheduler = make(max_head_skips=max_head_skips)
    add(scheduler, "a", range(9))
    add(scheduler, "same", range(9))
    plan(scheduler)
    scheduler.finish_request("a", RequestStatus.FINISHED_ABORTED)
    (new,) = plan(scheduler).new_requests
    assert (new.request_id, new.num_computed_tokens) == ("same", 0)


def test_waiting_for_a_prefix_holds_nobody_up_who_does_not() -> None:
    scheduler = make(max_head_skips=0, skip_window=2)
    for name, start in (("a", 0), ("same", 0), ("b", 50), ("c", 90)):
        add(scheduler, name, range(start, start + 9))
    assert [new.request_id for new in plan(scheduler).new_requests] == ["a", "b", "c"]


# ----------------------------------------------------------------------------------------- what must not be found again


def test_a_block_that_two_requests_have_computed_is_kept_once() -> None:
    """The second could share but the last block, which it computes again; its copy is free when it is gone."""
    scheduler = make()
    run(scheduler, "a", range(8))
    run(scheduler, "b", range(8))
    assert len(cache_of(scheduler)) == 2
    assert scheduler.kv_cache.pool.num_taken_blocks == 2


@pytest.mark.parametrize("result", ["failed", "forgotten"])
def test_a_failed_step_leaves_nothing(result: str) -> None:
    scheduler = make()
    add(scheduler, "a", range(9), max_tokens=3)
    sampled = {"a": SampledTokens((), error="boom")} if result == "failed" else {}
    scheduler.update(plan(scheduler), ModelRunnerOutput(sampled, {}))
    check_invariants(scheduler)
    stats = cache_of(scheduler).stats
    assert (len(cache_of(scheduler)), stats.num_inserted_blocks) == (0, 0)
    assert run(scheduler, "again", range(9)).num_cached_tokens == 0


def test_a_request_that_fails_takes_what_it_had_computed_with_it_but_not_what_others_use() -> None:
    scheduler = make(max_chunk_tokens=8)
    add(scheduler, "other", range(5), max_tokens=9)
    step(scheduler)
    add(scheduler, "bad", range(17), max_tokens=9)
    step(scheduler)
    output = plan(scheduler)
    sampled = {"other": SampledTokens((0,)), "bad": SampledTokens((), error="boom")}
    scheduler.update(output, ModelRunnerOutput(sampled, {}))
    check_invariants(scheduler)
    assert run(scheduler, "reader", range(17)).num_cached_tokens == 5, "the other's prompt"


def test_what_a_step_computes_for_a_request_that_was_aborted_meanwhile_is_not_found() -> None:
    scheduler = make()
    add(scheduler, "a", range(9))
    output = plan(scheduler)
    scheduler.finish_request("a", RequestStatus.FINISHED_ABORTED)
    finish(scheduler, output)
    assert len(cache_of(scheduler)) == 0


@pytest.mark.parametrize("is_back", [False, True])
def test_what_a_step_computes_for_a_request_that_was_preempted_meanwhile_is_not_found(is_back: bool) -> None:
    """The step fills a block of `new`, which is taken away before the result comes. If it is back by then, it has
    another block in its place, which is not full yet."""
    scheduler = make(num_blocks=5, max_num_seqs=2, max_chunk_tokens=1)
    add(scheduler, "old", [0], max_tokens=20)
    step(scheduler)
    new = add(scheduler, "new", range(100, 109))
    under_way, latest = plan(scheduler), plan(scheduler)
    while not latest.preempted_request_ids:
        finish(scheduler, under_way)
        under_way, latest = latest, plan(scheduler)
    (share,) = [share for share in under_way.scheduled if share.request_id == "new"]
    num_blocks = (share.num_computed_tokens + share.num_tokens) // BLOCK
    assert num_blocks > share.num_computed_tokens // BLOCK, "it fills a block"
    if is_back:
        scheduler.finish_request("old", RequestStatus.FINISHED_ABORTED)
        assert [again.request_id for again in plan(scheduler).new_requests] == ["new"]
    finish(scheduler, under_way)
    assert len(cache_of(scheduler).find(new.block_digests(BLOCK, 0))) == num_blocks - 1


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_failed_step_was_to_move_to_the_host_is_not_there(fails: bool) -> None:
    """The step may not even have been submitted."""
    kv_cache = KVCacheManager(num_blocks=4, block_size=BLOCK, prefix_cache=PrefixCache(), host_tier=HostTier(8))
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64).resolve("cpu"), kv_cache)
    run(scheduler, "a", range(13))
    add(scheduler, "b", range(100, 113))
    output = plan(scheduler)
    assert len(output.moves.moved_out) == 3
    sampled = SampledTokens((), error="boom") if fails else SampledTokens((0,))
    scheduler.update(output, ModelRunnerOutput({"b": sampled}, {}))
    check_invariants(scheduler)
    assert run(scheduler, "a again", range(13)).num_cached_tokens == (0 if fails else 12)


def test_a_stale_result_does_not_cache_blocks_of_a_new_request_with_the_same_id() -> None:
    scheduler = make()
    add(scheduler, "a", range(9))
    stale = plan(scheduler)
    scheduler.finish_request("a", RequestStatus.FINISHED_ABORTED)
    add(scheduler, "a", range(50, 63))
    plan(scheduler)
    finish(scheduler, stale)
    assert len(cache_of(scheduler)) == 0


# ----------------------------------------------------------------------------------------------------------------- room


def test_kept_blocks_count_as_room() -> None:
    scheduler = make(num_blocks=4)
    run(scheduler, "a", range(16))
    assert scheduler.kv_cache.pool.num_free_blocks == 0
    assert scheduler.kv_cache.num_available_blocks == 4
    run(scheduler, "b", range(100, 116))


def test_what_a_request_would_start_from_is_no_room_for_it() -> None:
    """All idle blocks are those that it shares, so none is left for the one that it needs besides."""
    scheduler = make(num_blocks=4, max_num_seqs=2)
    run(scheduler, "a", range(12))
    add(scheduler, "long", range(100, 104), max_tokens=9)
    step(scheduler)
    assert scheduler.kv_cache.num_available_blocks == 3
    assert not scheduler.kv_cache.can_admit(Request("b", range(13), max_tokens=1), num_spare_blocks=0)
    assert scheduler.kv_cache.can_admit(Request("c", range(50, 62), max_tokens=1), num_spare_blocks=0)


def test_blocks_in_use_are_never_given_up() -> None:
    scheduler = make(num_blocks=6)
    add(scheduler, "a", range(6), max_tokens=8)
    step(scheduler)
    table = scheduler.kv_cache.block_table("a")
    run(scheduler, "b", range(100, 107))
    run(scheduler, "c", range(200, 207))
    assert scheduler.kv_cache.block_table("a")[: len(table)] == table


# ----------------------------------------------------------------------------------------------------------------- pins


def test_a_pinned_prompt_outlives_others_and_never_keeps_anyone_out() -> None:
    scheduler = make(num_blocks=4)
    run(scheduler, "system", range(8), cache_ttl_s=60)
    run(scheduler, "a", range(100, 108))
    run(scheduler, "b", range(200, 208))
    assert run(scheduler, "user", range(9)).num_cached_tokens == 8
    run(scheduler, "all of it", range(300, 316))
    assert run(scheduler, "user", range(9)).num_cached_tokens == 0


def test_a_prompt_that_is_found_is_pinned_like_one_that_is_computed() -> None:
    scheduler = make(num_blocks=4)
    run(scheduler, "by chance", range(9))
    run(scheduler, "on purpose", range(9), cache_ttl_s=60)
    for number in range(3):
        run(scheduler, f"r{number}", range(100 * number + 100, 100 * number + 108))
    assert run(scheduler, "user", range(9)).num_cached_tokens == 8


def test_a_pin_lasts_as_long_as_it_was_asked_for() -> None:
    scheduler = make(num_blocks=4)
    run(scheduler, "system", range(8), cache_ttl_s=60)
    run(scheduler, "a", range(100, 108))
    add(scheduler, "b", range(200, 208))
    finish(scheduler, plan(scheduler, now_s=61.0))
    assert run(scheduler, "user", range(9)).num_cached_tokens == 0


def test_only_the_prompt_is_pinned_not_the_answer() -> None:
    scheduler = make(num_blocks=6)
    request = run(scheduler, "a", range(8), max_tokens=9, cache_ttl_s=60)
    run(scheduler, "b", range(100, 116))
    assert run(scheduler, "next", [*request.prompt_token_ids, *request.output_token_ids]).num_cached_tokens == 8
