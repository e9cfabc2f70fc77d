"""Corners of policies and batching that random worlds seldom come to."""

from __future__ import annotations

import pytest

from headway.core import PrefixCache
from tests.unit.core.driver import make_scheduler, request, step


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
