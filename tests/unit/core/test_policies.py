"""Corners of policies that random worlds seldom come to."""

from __future__ import annotations

from headway.core import PrefixCache, RequestStatus
from tests.unit.core.driver import make_scheduler, request, step


def test_nobody_is_displaced_for_a_request_that_waits_for_a_block() -> None:
    scheduler = make_scheduler(prefix_cache=PrefixCache(), max_num_seqs=2, max_chunk_tokens=3, scheduling_policy="srpt")
    scheduler.add_request(request("long", 2, 100, predicted_tokens=100, cache_salt="other"))
    step(scheduler)
    scheduler.add_request(request("first", 12, 1, predicted_tokens=50))
    step(scheduler)
    scheduler.add_request(request("same", 12, 1, predicted_tokens=1))
    assert set(step(scheduler)) == {"long", "first"}, "what `same` needs is being computed by `first`"


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
