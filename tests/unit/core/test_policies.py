"""A corner of displacement that random worlds seldom come to."""

from __future__ import annotations

from headway.core import PrefixCache
from tests.unit.core.driver import make_scheduler, request, step


def test_nobody_is_displaced_for_a_request_that_waits_for_a_block() -> None:
    scheduler = make_scheduler(prefix_cache=PrefixCache(), max_num_seqs=2, max_chunk_tokens=3, scheduling_policy="srpt")
    scheduler.add_request(request("long", 2, 100, predicted_tokens=100, cache_salt="other"))
    step(scheduler)
    scheduler.add_request(request("first", 12, 1, predicted_tokens=50))
    step(scheduler)
    scheduler.add_request(request("same", 12, 1, predicted_tokens=1))
    assert set(step(scheduler)) == {"long", "first"}, "what `same` needs is being computed by `first`"
