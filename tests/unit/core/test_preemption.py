"""What preemption gives back, and how often it may come to one request."""

from __future__ import annotations

from tests.unit.core.driver import finish, make_scheduler, request, step


def test_what_a_preempted_request_had_of_the_step_goes_to_another() -> None:
    scheduler = make_scheduler(num_blocks=9, block_size=2, max_num_batched_tokens=6, scheduling_policy="srpt")
    scheduler.add_request(request("done", 3, max_tokens=1))
    scheduler.add_request(request("long", 2, max_tokens=8))
    scheduler.add_request(request("short", 16, max_tokens=1))
    assert step(scheduler) == {"done": 3, "long": 2}
    assert step(scheduler) == {"short": 6}, "one of them had been meant for the request that it displaces"
    assert scheduler.requests["long"].num_preemptions == 1


def test_a_request_that_has_given_way_often_enough_is_spared_while_there_are_others() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=2, max_num_batched_tokens=8, max_num_seqs=3, max_preemptions=1)
    for name, num_prompt_tokens, max_tokens in (("a", 2, 5), ("b", 3, 9), ("c", 3, 6)):
        scheduler.add_request(request(name, num_prompt_tokens, max_tokens=max_tokens))
    preempted: list[str] = []
    while scheduler.has_unfinished_requests:
        output = scheduler.schedule()
        preempted += output.preempted_request_ids
        finish(scheduler, output)
    assert preempted == ["c", "b"]
