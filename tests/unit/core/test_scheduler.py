from __future__ import annotations

import pytest

from headway.core import ModelRunnerOutput, RequestStatus, SampledTokens, check_invariants, create_policy
from headway.core.step_time import TILE_TOKENS
from headway.errors import ConfigError, InvalidRequestError, RequestNotFoundError, RequestTooLargeError
from tests.unit.core.driver import finish, make_scheduler, request, step


def test_a_prompt_is_cut_into_chunks_that_share_steps_with_decodes() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add_request(request("short", 3))
    assert step(scheduler) == {"short": 3}
    scheduler.add_request(request("long", 20))
    assert step(scheduler) == {"short": 1, "long": 7}
    assert step(scheduler) == {"short": 1, "long": 7}
    assert step(scheduler) == {"short": 1, "long": 6}
    assert step(scheduler) == {"short": 1, "long": 1}


def test_decodes_never_wait_for_a_chunk_however_early_its_request_came() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4, max_num_seqs=3)
    scheduler.add_request(request("long", 40))
    for name in ("a", "b"):
        scheduler.add_request(request(name, 1))
    step(scheduler)  # only chunks of "long" fit
    for _ in range(20):
        tokens = step(scheduler)
        for name in ("a", "b"):
            live = scheduler.requests.get(name)
            if live is not None and live.num_output_tokens > 0:
                assert tokens.get(name) == 1


def test_no_more_requests_run_than_allowed() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add_request(request(name, 2, max_tokens=2))
    assert step(scheduler) == {"a": 2, "b": 2}
    assert step(scheduler) == {"a": 1, "b": 1}
    assert step(scheduler) == {"c": 2}


def test_the_chunk_limit_holds_for_each_request() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, max_chunk_tokens=5)
    scheduler.add_request(request("a", 9))
    scheduler.add_request(request("b", 9))
    assert step(scheduler) == {"a": 5, "b": 5}
    assert step(scheduler) == {"a": 4, "b": 4}


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


def test_when_blocks_run_out_the_last_in_order_gives_way_and_keeps_its_place() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=2, max_num_batched_tokens=8)
    scheduler.add_request(request("a", 2, max_tokens=6))
    scheduler.add_request(request("b", 2, max_tokens=6))
    scheduler.add_request(request("c", 1, max_tokens=2))
    preempted = []
    for _ in range(30):
        output = scheduler.schedule()
        check_invariants(scheduler)
        preempted += output.preempted_request_ids
        if output.preempted_request_ids:
            assert scheduler.waiting.peek().request_id == output.preempted_request_ids[0]
        finish(scheduler, output)
    assert preempted
    assert "a" not in preempted
    assert not scheduler.requests


def test_a_preempted_request_comes_back_with_all_its_tokens() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=2, max_num_batched_tokens=8, max_num_seqs=2)
    scheduler.add_request(request("a", 3, max_tokens=5))
    scheduler.add_request(request("b", 2, max_tokens=6))
    tokens_at_preemption = None
    while scheduler.requests:
        output = scheduler.schedule()
        if "b" in output.preempted_request_ids:
            tokens_at_preemption = tuple(scheduler.requests["b"].output_token_ids)
        for new in output.new_requests:
            if tokens_at_preemption is not None and new.request_id == "b":
                assert new.output_token_ids == tokens_at_preemption
                assert scheduler.requests["b"].num_preemptions == 1
                return
        finish(scheduler, output, token=5)
    pytest.fail("b was never preempted")


def test_small_requests_pass_a_large_one_that_does_not_fit_but_only_so_often() -> None:
    scheduler = make_scheduler(
        num_blocks=10, block_size=2, max_num_seqs=3, max_num_batched_tokens=16, max_head_skips=4, skip_window=4
    )
    scheduler.add_request(request("first", 8, max_tokens=2))
    step(scheduler)
    scheduler.add_request(request("large", 18, max_tokens=2))
    order = []
    for index in range(40):
        scheduler.add_request(request(f"small{index}", 1, max_tokens=3))
        output = scheduler.schedule()
        order += [new.request_id for new in output.new_requests]
        finish(scheduler, output)
    assert order.index("large") == 4, "exactly max_head_skips requests may pass"


def test_with_no_skips_allowed_the_order_is_strict() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=2, max_head_skips=0)
    scheduler.add_request(request("a", 8, max_tokens=4))
    step(scheduler)
    scheduler.add_request(request("large", 12, max_tokens=2))
    scheduler.add_request(request("small", 1, max_tokens=1))
    assert "small" not in step(scheduler)


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


def test_priority_goes_before_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=1, scheduling_policy="priority")
    scheduler.add_request(request("later", 2, max_tokens=1, priority=5))
    scheduler.add_request(request("soon", 2, max_tokens=1, priority=1))
    scheduler.add_request(request("soon too", 2, max_tokens=1, priority=1))
    assert [list(step(scheduler)) for _ in range(3)] == [["soon"], ["soon too"], ["later"]]


def test_beside_decodes_prompts_get_what_keeps_the_target_and_alone_they_get_all() -> None:
    scheduler = make_scheduler(num_blocks=1000, max_num_batched_tokens=2000, target_itl_ms=10)
    scheduler.add_request(request("long", 1900, max_tokens=50))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == 1900, "nobody has to wait for it"
    finish(scheduler, output, duration_s=0.020)
    for _ in range(5):
        finish(scheduler, scheduler.schedule(), duration_s=0.002)
    scheduler.add_request(request("other", 1900))
    tokens = step(scheduler)
    assert tokens["long"] == 1
    fits = int(1900 * (10 - 2) / (20 - 2))
    assert tokens["other"] == (fits + 1) // TILE_TOKENS * TILE_TOKENS - 1


def test_an_unknown_policy_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'priority'"):
        create_policy("prioriti", make_scheduler().view)
