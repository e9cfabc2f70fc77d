"""Nobody starves, whatever steps take: with the guard on, who has waited too long enters before all others.

No model here, only what must be true. That also covers what the brute-force model leaves out: the order of `slo` while
the usual time of a step changes.
"""

from __future__ import annotations

import math
import random

import pytest

from headway.core import POLICIES, Request, check_invariants
from headway.core.queue import GuardedQueue
from headway.core.request_options import RequestOptions
from tests.unit.core.driver import finish, make_scheduler

GUARDED = [name for name, policy in POLICIES.items() if policy.can_starve]
GRACE_S, STRETCH = 0.5, 2.0


def draw(rng: random.Random, name: str) -> Request:
    max_tokens = rng.choice([1, 3, 20, 60])
    return Request(
        name,
        range(rng.randint(1, 12)),
        max_tokens=max_tokens,
        options=RequestOptions(
            predicted_tokens=rng.choice([None, max_tokens]),
            ttft_target_s=rng.choice([None, rng.uniform(0.05, 2.0)]),
            tpot_target_s=rng.choice([None, 0.01]),
        ),
    )


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("policy", GUARDED)
def test_who_has_waited_too_long_goes_first_and_everybody_ends(policy: str, seed: int) -> None:
    """More comes than can be served, for a while; there is memory enough for all."""
    rng = random.Random(seed)
    scheduler = make_scheduler(
        num_blocks=400,
        scheduling_policy=policy,
        starvation_ms=1e3 * GRACE_S,
        starvation_stretch=STRETCH,
        max_preemptions=rng.choice([1, 3]),
    )
    guard = scheduler.waiting
    assert isinstance(guard, GuardedQueue)
    requests: list[Request] = []
    waiting: set[Request] = set()
    now_s, num_steps, num_lifted = 0.0, 0, 0
    while scheduler.has_unfinished_requests or num_steps < 300:
        if num_steps < 300 and rng.random() < 0.3:
            requests.append(draw(rng, f"r{num_steps}"))
            scheduler.add_request(requests[-1], now_s=now_s)
        waiting = set(scheduler.waiting)
        due = {request for request in waiting if (guard.lift_at_s(request) or math.inf) <= now_s}
        output = scheduler.schedule(now_s=now_s)
        check_invariants(scheduler)
        entered = waiting - set(scheduler.waiting)
        if due - entered:
            assert entered <= due, "somebody has passed one that was lifted"
        num_lifted += len(due & entered)
        duration_s = rng.choice([0.005, 0.02, 0.2])
        finish(scheduler, output, duration_s=duration_s)
        now_s += duration_s
        num_steps += 1
        assert num_steps < 10_000
    assert num_lifted >= 5
    for request in requests:
        assert request.num_output_tokens == request.max_total_tokens - request.num_prompt_tokens
        assert request.num_preemptions <= scheduler.config.max_preemptions, "nobody had to give way for want of room"
