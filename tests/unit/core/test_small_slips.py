"""Slips that random play finds slowly, each in the smallest case that shows it."""

from __future__ import annotations

from headway.core import ModelRunnerOutput, PrefixCache, RequestStatus
from tests.unit.core.driver import finish, make_scheduler, request, step


def test_few_requests_pass_a_large_one() -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_batched_tokens=64, max_num_seqs=8, max_head_skips=2)
    scheduler.add_request(request("runs", 12))
    step(scheduler)
    scheduler.add_request(request("large", 24))
    for number in range(4):
        scheduler.add_request(request(f"small {number}", 2, max_tokens=2))
    assert step(scheduler) == {"runs": 1, "small 0": 2, "small 1": 2}
    step(scheduler)
    assert step(scheduler) == {"runs": 1}, "both are gone, and nobody passes it any more"


def test_a_request_enters_where_those_that_run_can_grow() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    scheduler.add_request(request("a", 3, max_tokens=3))
    step(scheduler)
    scheduler.add_request(request("b", 3, max_tokens=3))
    assert step(scheduler) == {"a": 1}, "the two blocks that b needs are not all for it"


def test_nothing_is_found_of_a_request_that_failed() -> None:
    scheduler = make_scheduler(prefix_cache=PrefixCache())
    scheduler.add_request(request("a", 9))
    step(scheduler)
    scheduler.update(scheduler.schedule(), ModelRunnerOutput({}, {"a": "broken"}))
    scheduler.add_request(request("b", 9))
    assert step(scheduler) == {"b": 9}


def test_a_preempted_request_waits_for_its_token_that_is_on_its_way() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    for name in ("a", "b"):
        scheduler.add_request(request(name, 3, max_tokens=6))
    in_flight = [scheduler.schedule(), scheduler.schedule()]
    finish(scheduler, in_flight.pop(0))
    in_flight.append(scheduler.schedule())
    assert in_flight[-1].preempted_request_ids == ("b",) and scheduler.requests["b"].num_pending_tokens == 1
    scheduler.finish_request("a", RequestStatus.FINISHED_ABORTED)
    assert scheduler.schedule().is_empty, "there is room for b, but not all of it is known"
    for output in in_flight:
        finish(scheduler, output)
    assert step(scheduler) == {"b": 3 + 2}
