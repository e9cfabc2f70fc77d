"""Planning while earlier steps are under way: what is counted, what is dropped, and who never gets somebody else's."""

from __future__ import annotations

import pytest

from headway.core import ModelRunnerOutput, PromptLogprobs, RequestStatus, SampledTokens, Scheduler, check_invariants
from headway.core.scheduler_output import SchedulerOutput
from tests.unit.core.driver import finish, make_scheduler, request


def plan(scheduler: Scheduler) -> SchedulerOutput:
    output = scheduler.schedule()
    check_invariants(scheduler)
    return output


def shares(output: SchedulerOutput) -> dict[str, int]:
    return {share.request_id: share.num_tokens for share in output.scheduled}


def test_a_decode_is_planned_on_a_token_that_is_not_known_yet() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(request("a", 3))
    first, second = plan(scheduler), plan(scheduler)
    assert shares(first) == {"a": 3}
    assert shares(second) == {"a": 1}
    assert second.scheduled[0].num_computed_tokens == 3
    assert scheduler.requests["a"].num_pending_tokens == 2
    (update,) = finish(scheduler, first, token=5)
    assert update.new_token_ids == (5,)
    (update,) = finish(scheduler, second, token=6)
    assert scheduler.requests["a"].output_token_ids == [5, 6]
    assert scheduler.requests["a"].num_pending_tokens == 0


def test_a_request_that_will_end_by_length_is_not_planned_again_and_runs_until_it_ends() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(request("a", 3, max_tokens=2))
    first, second = plan(scheduler), plan(scheduler)
    assert plan(scheduler).is_empty
    finish(scheduler, first)
    assert plan(scheduler).is_empty
    assert scheduler.requests["a"].status is RequestStatus.RUNNING
    (update,) = finish(scheduler, second)
    assert update.finish_status is RequestStatus.FINISHED_LENGTH
    assert scheduler.kv_cache.num_used_blocks == 0


def test_the_surplus_token_of_a_request_that_a_stop_token_ended_is_dropped() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(request("a", 3, stop_token_ids=frozenset([9])))
    first, second = plan(scheduler), plan(scheduler)
    (update,) = finish(scheduler, first, token=9)
    assert update.finish_status is RequestStatus.FINISHED_STOPPED
    assert finish(scheduler, second, token=5) == []
    assert not scheduler.has_unfinished_requests


def test_results_are_taken_in_the_order_of_the_steps_and_once() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(request("a", 3))
    first, second = plan(scheduler), plan(scheduler)
    with pytest.raises(RuntimeError, match="step 1 came out of order"):
        finish(scheduler, second)
    finish(scheduler, first)
    with pytest.raises(RuntimeError, match="step 0 came out of order or twice"):
        finish(scheduler, first)


@pytest.mark.parametrize("error", [None, "boom"])
def test_a_stale_result_never_reaches_a_new_request_with_the_same_id(error: str | None) -> None:
    scheduler = make_scheduler()
    scheduler.add_request(request("a", 3))
    stale = plan(scheduler)
    scheduler.finish_request("a", RequestStatus.FINISHED_ABORTED)
    scheduler.add_request(request("a", 2))
    fresh = plan(scheduler)
    assert fresh.finished_request_ids == ("a",)
    assert [new.request_id for new in fresh.new_requests] == ["a"]
    tokens = SampledTokens((5,) if error is None else (), error=error)
    logprobs = PromptLogprobs(1, ("of the old one",))
    assert scheduler.update(stale, ModelRunnerOutput({"a": tokens}, {"a": logprobs})) == []
    check_invariants(scheduler)
    (update,) = finish(scheduler, fresh, token=6)
    assert update.new_token_ids == (6,)
    assert scheduler.requests["a"].output_token_ids == [6]


def preempt_b(max_tokens: int = 6, **options: object) -> tuple[Scheduler, SchedulerOutput, SchedulerOutput]:
    """`b` is preempted by the plan of step 2 while step 1, which samples for it, is under way. Returns both steps."""
    scheduler = make_scheduler(num_blocks=3, block_size=2, max_num_batched_tokens=8, max_num_seqs=2)
    scheduler.add_request(request("a", 2, max_tokens=4))
    scheduler.add_request(request("b", 1, max_tokens=max_tokens, **options))
    finish(scheduler, plan(scheduler))
    under_way, preempting = plan(scheduler), plan(scheduler)
    assert shares(under_way) == {"a": 1, "b": 1}
    assert shares(preempting) == {"a": 1}
    assert preempting.preempted_request_ids == ("b",)
    return scheduler, under_way, preempting


def test_a_preempted_request_gets_the_token_that_was_on_its_way() -> None:
    scheduler, under_way, _ = preempt_b()
    assert scheduler.requests["b"].num_pending_tokens == 1
    finish(scheduler, under_way, token=5)
    assert scheduler.requests["b"].output_token_ids == [0, 5]
    assert scheduler.requests["b"].status is RequestStatus.PREEMPTED


def test_it_is_not_admitted_again_before_that_token_is_known() -> None:
    scheduler, under_way, preempting = preempt_b()
    scheduler.finish_request("a", RequestStatus.FINISHED_ABORTED)  # now there is room for it
    assert plan(scheduler).is_empty
    finish(scheduler, under_way, token=5)
    back = plan(scheduler)
    assert [(new.request_id, new.output_token_ids) for new in back.new_requests] == [("b", (0, 5))]
    assert back.finished_request_ids == ("a",)
    assert finish(scheduler, preempting) == []
    (update,) = finish(scheduler, back, token=6)
    assert update.new_token_ids == (6,)


def test_that_token_may_end_it_by_a_stop_token() -> None:
    scheduler, under_way, _ = preempt_b(stop_token_ids=frozenset([5]))
    ended = [update for update in finish(scheduler, under_way, token=5) if update.finish_status is not None]
    assert [(update.request_id, update.finish_status) for update in ended] == [("b", RequestStatus.FINISHED_STOPPED)]
    assert list(scheduler.requests) == ["a"]


def test_that_token_may_end_it_by_length() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=2, max_num_batched_tokens=8, max_num_seqs=2)
    scheduler.add_request(request("a", 3, max_tokens=4))
    scheduler.add_request(request("b", 2, max_tokens=2))
    finish(scheduler, plan(scheduler))
    under_way, preempting = plan(scheduler), plan(scheduler)
    assert preempting.preempted_request_ids == ("b",), "a needed a block, b waited for its last token"
    ended = [update for update in finish(scheduler, under_way) if update.finish_status is not None]
    assert [(update.request_id, update.finish_status) for update in ended] == [("b", RequestStatus.FINISHED_LENGTH)]
    finish(scheduler, preempting)


def test_a_failed_step_ends_its_requests_also_those_preempted_since_and_no_other() -> None:
    scheduler, under_way, preempting = preempt_b()
    scheduler.add_request(request("c", 1, max_tokens=2))
    failed = SampledTokens((), error="boom")
    updates = scheduler.update(under_way, ModelRunnerOutput({"a": failed, "b": failed}, {}))
    assert {update.request_id: update.error for update in updates} == {"a": "boom", "b": "boom"}
    assert finish(scheduler, preempting) == []
    assert list(scheduler.requests) == ["c"]


def test_an_empty_plan_keeps_who_left_for_the_next_one() -> None:
    scheduler = make_scheduler(num_blocks=3, block_size=2, max_num_batched_tokens=8, max_num_seqs=2)
    scheduler.add_request(request("a", 1, max_tokens=2))
    scheduler.add_request(request("b", 2, max_tokens=4))
    steps = [plan(scheduler) for _ in range(3)]
    empty = plan(scheduler)  # a waits for its last token; b needs a block and can only take its own
    assert empty.is_empty and not empty.preempted_request_ids
    assert scheduler.requests["b"].status is RequestStatus.PREEMPTED
    for output in steps:
        finish(scheduler, output)
    back = plan(scheduler)
    assert back.preempted_request_ids == ("b",)
    assert back.finished_request_ids == ("a",)
    assert shares(back) == {"b": 5}


def test_a_request_without_a_promised_token_fails_and_holds_nobody_up() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(request("a", 3))
    (update,) = scheduler.update(plan(scheduler), ModelRunnerOutput({}, {}))
    assert update.finish_status is RequestStatus.FINISHED_ERROR
    assert update.error is not None and "no token" in update.error
