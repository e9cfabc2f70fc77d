"""What a scheduler says and refuses. What it plans is in `tests/property` and `tests/golden`."""

from __future__ import annotations

import pytest

from headway.core import (
    ModelRunnerOutput,
    PromptLogprobs,
    RequestStatus,
    SampledTokens,
    check_invariants,
    create_policy,
)
from headway.errors import ConfigError, InvalidRequestError, RequestNotFoundError, RequestTooLargeError
from tests.unit.core.driver import finish, make_scheduler, request


def test_a_request_that_can_never_fit_is_refused_with_the_reason() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    scheduler.add_request(request("just", 9, max_tokens=8))
    with pytest.raises(RequestTooLargeError, match=r"17 tokens of KV cache.*holds 16"):
        scheduler.add_request(request("over", 10, max_tokens=8))
    assert "over" not in scheduler.requests


def test_an_id_cannot_be_used_twice() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(request("a", 2))
    with pytest.raises(InvalidRequestError, match="already in use"):
        scheduler.add_request(request("a", 2))


def test_an_aborted_request_frees_its_blocks_at_once_in_any_state() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add_request(request("running", 9))
    scheduler.add_request(request("waiting", 9))
    output = scheduler.schedule()
    scheduler.finish_request("running", RequestStatus.FINISHED_ABORTED)
    scheduler.finish_request("waiting", RequestStatus.FINISHED_ABORTED)
    check_invariants(scheduler)
    assert scheduler.kv_cache.num_used_blocks == 0
    assert finish(scheduler, output) == []
    assert scheduler.schedule().is_empty
    scheduler.add_request(request("next", 1))
    assert scheduler.schedule().finished_request_ids == ("running",), "an empty plan does not use the news up"
    with pytest.raises(RequestNotFoundError, match="running"):
        scheduler.finish_request("running", RequestStatus.FINISHED_ABORTED)


def test_an_error_ends_one_request_and_no_other() -> None:
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add_request(request(name, 2))
    output = scheduler.schedule()
    result = ModelRunnerOutput({"a": SampledTokens((), error="boom"), "b": SampledTokens((3,))}, {})
    updates = {update.request_id: update for update in scheduler.update(output, result)}
    assert updates["a"].finish_status is RequestStatus.FINISHED_ERROR
    assert updates["a"].error == "boom"
    assert updates["b"].finish_status is None
    assert list(scheduler.requests) == ["b"]


@pytest.mark.parametrize("is_preempted", [False, True])
def test_a_request_that_may_choose_nothing_more_stops_without_a_token(is_preempted: bool) -> None:
    scheduler = make_scheduler(num_blocks=3, block_size=2) if is_preempted else make_scheduler()
    for name in "ab":
        scheduler.add_request(request(name, 2, max_tokens=2))
    output = scheduler.schedule()
    if is_preempted:  # one of them gives its block to the other, before it is known that it has stopped
        assert scheduler.schedule().preempted_request_ids == ("b",)
    stopped = "b"
    tokens = {name: SampledTokens((3,)) for name in "ab"}
    updates = scheduler.update(output, ModelRunnerOutput(tokens, {}, stopped=frozenset(stopped)))
    check_invariants(scheduler)
    ends = {update.request_id: (update.new_token_ids, update.finish_status) for update in updates}
    assert ends == {"a": ((3,), None), "b": ((), RequestStatus.FINISHED_STOPPED)}
    assert list(scheduler.requests) == ["a"]


def test_an_unknown_policy_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'priority'"):
        create_policy("prioriti", make_scheduler().policy.view)


def test_results_are_taken_in_the_order_of_the_steps_and_once() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(request("a", 3))
    first, second = scheduler.schedule(), scheduler.schedule()
    with pytest.raises(RuntimeError, match="step 1 came out of order"):
        finish(scheduler, second)
    finish(scheduler, first)
    with pytest.raises(RuntimeError, match="step 0 came out of order or twice"):
        finish(scheduler, first)


@pytest.mark.parametrize("error", [None, "boom"])
def test_a_stale_result_never_reaches_a_new_request_with_the_same_id(error: str | None) -> None:
    scheduler = make_scheduler()
    scheduler.add_request(request("a", 3))
    stale = scheduler.schedule()
    scheduler.finish_request("a", RequestStatus.FINISHED_ABORTED)
    scheduler.add_request(request("a", 2))
    fresh = scheduler.schedule()
    assert fresh.finished_request_ids == ("a",)
    assert [new.request_id for new in fresh.new_requests] == ["a"]
    tokens = SampledTokens((5,) if error is None else (), error=error)
    logprobs = PromptLogprobs(1, ("of the old one",))
    assert scheduler.update(stale, ModelRunnerOutput({"a": tokens}, {"a": logprobs})) == []
    check_invariants(scheduler)
    (update,) = finish(scheduler, fresh, token=6)
    assert update.new_token_ids == (6,)
    assert scheduler.requests["a"].output_token_ids == [6]


def test_a_request_without_a_promised_token_fails_and_holds_nobody_up() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(request("a", 3))
    (update,) = scheduler.update(scheduler.schedule(), ModelRunnerOutput({}, {}))
    assert update.finish_status is RequestStatus.FINISHED_ERROR
    assert update.error is not None and "no token" in update.error
