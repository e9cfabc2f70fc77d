"""Corners of policies and batching that random worlds seldom come to."""

from __future__ import annotations

import pytest

from headway.core import PrefixCache, RequestStatus
from tests.unit.core.driver import finish, make_scheduler, request, step


def test_what_must_be_computed_again_speaks_against_displacing() -> None:
    """256 times 32 tokens, which count as 256 that are generated: too many for a rest of 90."""
    for num_prompt_tokens, is_displaced in ((8192, False), (16, True)):
        scheduler = make_scheduler(
            num_blocks=2200, max_num_seqs=1, max_num_batched_tokens=8192, scheduling_policy="srpt"
        )
        scheduler.add_request(request("long", num_prompt_tokens, 100, predicted_tokens=90))
        step(scheduler)
        scheduler.add_request(request("short", 2, 4, predicted_tokens=2))
        assert ("short" in step(scheduler)) == is_displaced


def test_nobody_is_displaced_for_a_request_that_waits_for_a_block() -> None:
    scheduler = make_scheduler(prefix_cache=PrefixCache(), max_num_seqs=2, max_chunk_tokens=3, scheduling_policy="srpt")
    scheduler.add_request(request("long", 2, 100, predicted_tokens=100, cache_salt="other"))
    step(scheduler)
    scheduler.add_request(request("first", 12, 1, predicted_tokens=50))
    step(scheduler)
    scheduler.add_request(request("same", 12, 1, predicted_tokens=1))
    assert set(step(scheduler)) == {"long", "first"}, "what `same` needs is being computed by `first`"


@pytest.mark.parametrize(("num_prompt_tokens", "expected"), [(24, {"long", "other"}), (16, {"other", "short"})])
def test_nobody_is_displaced_in_vain(num_prompt_tokens: int, expected: set[str]) -> None:
    """`long` would go, but that is not enough for a prompt of 6 blocks, and `other` would not."""
    scheduler = make_scheduler(num_blocks=10, max_num_batched_tokens=64, scheduling_policy="srpt")
    scheduler.add_request(request("long", 13, 12, predicted_tokens=100))
    scheduler.add_request(request("other", 13, 12, predicted_tokens=3))
    step(scheduler)
    scheduler.add_request(request("short", num_prompt_tokens, 4, predicted_tokens=1))
    assert set(step(scheduler)) == expected
    assert scheduler.requests["long"].num_preemptions == ("long" not in expected)


def test_the_pace_is_that_of_requests_that_run() -> None:
    scheduler = make_scheduler(scheduling_policy="slo", target_itl_ms=50)
    scheduler.add_request(request("fast", 2, tpot_target_s=0.01))
    scheduler.add_request(request("slow", 2, tpot_target_s=0.04))
    assert scheduler.policy.pace_s(0.05) == 0.05, "they only wait"
    step(scheduler)
    assert scheduler.policy.pace_s(0.05) == 0.01
    assert scheduler.policy.pace_s(0.0) == 0.01, "also where there is no other target"
    scheduler.finish_request("fast", RequestStatus.FINISHED_ABORTED)
    assert scheduler.policy.pace_s(0.05) == 0.04
    scheduler.finish_request("slow", RequestStatus.FINISHED_ABORTED)
    assert scheduler.policy.pace_s(0.05) == 0.05


def test_a_batch_without_a_free_seat_is_sealed_although_the_step_was_full() -> None:
    scheduler = make_scheduler(batching="static", max_num_seqs=2, max_num_batched_tokens=2)
    for name in "abc":
        scheduler.add_request(request(name, 1, 5))
    assert set(step(scheduler)) == {"a", "b"}
    scheduler.finish_request("a", RequestStatus.FINISHED_ABORTED)
    assert set(step(scheduler)) == {"b"}


def test_a_batch_goes_on_being_formed_where_a_prompt_did_not_fit_into_the_rest_of_a_step() -> None:
    scheduler = make_scheduler(batching="static", prefill_mode="prefill-first", max_num_batched_tokens=16)
    for name in "abc":
        scheduler.add_request(request(name, 10, 3))
    assert [step(scheduler) for _ in range(3)] == [{"a": 10}, {"b": 10}, {"c": 10}]
    assert step(scheduler) == {"a": 1, "b": 1, "c": 1}


def test_a_request_of_a_sealed_batch_ends_with_the_batch() -> None:
    scheduler = make_scheduler(batching="static")
    scheduler.add_request(request("short", 2, 1))
    scheduler.add_request(request("long", 2, 2))
    (first,) = [u for u in finish(scheduler, scheduler.schedule()) if u.request_id == "short"]
    assert first.new_token_ids == (0,) and first.finish_status is None
    updates = finish(scheduler, scheduler.schedule())
    assert {u.request_id for u in updates if u.finish_status is not None} == {"short", "long"}
