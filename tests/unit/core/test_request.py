from __future__ import annotations

import itertools

import pytest

from headway.core import Request, RequestStatus

S = RequestStatus
FINAL = [S.FINISHED_STOPPED, S.FINISHED_LENGTH, S.FINISHED_ABORTED, S.FINISHED_ERROR]
LEGAL = {
    (S.WAITING, S.RUNNING),
    (S.WAITING, S.FINISHED_ABORTED),
    (S.WAITING, S.FINISHED_ERROR),
    (S.RUNNING, S.PREEMPTED),
    *((S.RUNNING, final) for final in FINAL),
    (S.PREEMPTED, S.RUNNING),
    *((S.PREEMPTED, final) for final in FINAL),
    *((S.FETCHING, after) for after in (S.WAITING, S.FINISHED_ABORTED, S.FINISHED_ERROR)),
    (S.WAITING, S.FETCHING),
}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(S, S)))
def test_only_legal_moves_are_made(before: S, after: S) -> None:
    request = Request("r", [1, 2], max_tokens=3)
    request.status = before
    if (before, after) in LEGAL:
        request.move_to(after)
        assert request.status is after
    else:
        with pytest.raises(RuntimeError, match="illegal move"):
            request.move_to(after)
        assert request.status is before


def test_a_stop_token_ends_a_request_but_not_before_min_tokens() -> None:
    request = Request("r", [1], max_tokens=10, min_tokens=3, stop_token_ids=frozenset([7]))
    assert request.append_output_token(7) is None
    assert request.append_output_token(7) is None
    assert request.append_output_token(7) is S.FINISHED_STOPPED


def test_the_last_token_ends_a_request_by_length_unless_it_is_a_stop_token() -> None:
    request = Request("r", [1], max_tokens=1, stop_token_ids=frozenset([7]))
    assert request.append_output_token(5) is S.FINISHED_LENGTH
    request = Request("r", [1], max_tokens=1, stop_token_ids=frozenset([7]))
    assert request.append_output_token(7) is S.FINISHED_STOPPED


def test_the_last_token_needs_no_kv_slot() -> None:
    assert Request("r", [1, 2, 3], max_tokens=4).max_kv_tokens == 6


def test_a_pending_token_counts_as_one_of_the_requests_tokens() -> None:
    request = Request("r", [1, 2], max_tokens=3)
    request.advance(1, 0)
    assert (request.num_tokens, request.num_remaining_tokens) == (2, 1)
    request.advance(1, 1)
    assert (request.num_tokens, request.num_remaining_tokens) == (3, 1)
    request.advance(1, 1)
    assert (request.num_tokens, request.num_pending_tokens, request.num_output_tokens) == (4, 2, 0)
    assert request.append_output_token(7) is None
    assert (request.num_tokens, request.num_pending_tokens, request.num_output_tokens) == (4, 1, 1)


def test_a_request_whose_last_token_is_pending_has_nothing_left_to_compute() -> None:
    request = Request("r", [1, 2], max_tokens=1)
    request.advance(2, 1)
    assert request.num_remaining_tokens == 0
    assert request.append_output_token(7) is S.FINISHED_LENGTH


@pytest.mark.parametrize(("prompt", "max_tokens"), [([], 1), ([1], 0), ([1], -3)])
def test_a_request_that_makes_no_sense_is_refused(prompt: list[int], max_tokens: int) -> None:
    with pytest.raises(ValueError, match="request r"):
        Request("r", prompt, max_tokens=max_tokens)
