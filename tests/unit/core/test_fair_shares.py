"""What a tenant keeps beside one that sends more: how long steps may get for it, and whose prompt goes first."""

from __future__ import annotations

import math

import pytest

from headway.core import ModelRunnerOutput, Request, SampledTokens, Scheduler
from headway.core.policy.fair import SLACK
from headway.core.step_time import GAINING_STEPS, STRETCH
from tests.unit.core.driver import make_scheduler, request

BASE_S, ROW_S, TOKEN_S = 0.004, 4e-5, 2e-5


class Engine:
    """A scheduler whose steps take as long as on a device with these times."""

    def __init__(self, policy: str = "fair", **options: object) -> None:
        sizes: dict[str, object] = {"max_num_seqs": 64, "max_num_batched_tokens": 8192, "target_itl_ms": 20.0}
        self.scheduler: Scheduler = make_scheduler(
            num_blocks=400, block_size=512, scheduling_policy=policy, **(sizes | options)
        )

    def add(self, *requests: Request) -> None:
        for one in requests:
            self.scheduler.add_request(one)

    def step(self) -> tuple[dict[str, int], float]:
        """What everybody computed, and how long it took."""
        output = self.scheduler.schedule()
        shares = {share.request_id: share.num_tokens for share in output.scheduled}
        num_chunk_tokens = sum(shares.values()) - len(shares)
        duration_s = BASE_S + ROW_S * len(shares) + TOKEN_S * num_chunk_tokens
        sampled = {share.request_id: SampledTokens((0,)) for share in output.scheduled if share.samples}
        self.scheduler.update(output, ModelRunnerOutput(sampled, {}), duration_s=duration_s)
        return shares, duration_s

    def steps(self, count: int) -> list[tuple[dict[str, int], float]]:
        return [self.step() for _ in range(count)]


def flood(tenant: str, count: int = 100) -> list[Request]:
    return [request(f"{tenant} {index}", 1000, 500, tenant=tenant) for index in range(count)]


@pytest.mark.parametrize("num_light", [1, 3])
def test_steps_are_not_much_longer_than_at_its_share_for_a_tenant_that_generates(num_light: int) -> None:
    engine = Engine()
    engine.add(*[request(f"light {index}", 10, 400, tenant=f"light {index}") for index in range(num_light)])
    engine.steps(50)
    engine.add(*flood("heavy"))
    share_s = (num_light + 1) * (BASE_S + ROW_S)
    steps = engine.steps(200)
    assert all(duration_s < 1.05 * SLACK * share_s for _, duration_s in steps)
    assert sum(duration_s for _, duration_s in steps[:40]) > 40 * 0.7 * SLACK * share_s, "some of it was wasted"


def test_alone_a_flood_makes_steps_longer() -> None:
    engine = Engine()
    engine.add(request("first", 10, 400))
    engine.steps(50)
    engine.add(*flood(""))
    longest_s = max(duration_s for _, duration_s in engine.steps(20))
    assert 0.03 < longest_s < 1.05 * STRETCH * 0.02


def test_a_flood_of_its_own_makes_them_longer_for_every_tenant() -> None:
    engine = Engine()
    engine.add(request("a", 10, 400, tenant="a"), request("b", 10, 400, tenant="b"))
    engine.steps(50)
    engine.add(*flood("a"), *flood("b"))
    assert max(duration_s for _, duration_s in engine.steps(20)) > 0.03


def test_one_tenant_has_the_schedule_of_fcfs() -> None:
    engines = [Engine(policy) for policy in ("fcfs", "fair")]
    for engine in engines:
        engine.add(request("first", 10, 40), *flood("", 30))
    first, second = (engine.steps(300) for engine in engines)
    assert first == second


def test_when_the_other_has_gone_the_limit_has_too() -> None:
    engine = Engine()
    engine.add(request("light", 10, 60, tenant="light"))
    engine.steps(20)
    engine.add(*flood("heavy"))
    limit_s = 1.05 * SLACK * 2 * (BASE_S + ROW_S)
    durations = [duration_s for shares, duration_s in engine.steps(80)]
    assert max(durations[:40]) < limit_s < max(durations[40:])


def test_a_prompt_under_way_leaves_room_for_one_of_a_tenant_that_has_had_less() -> None:
    engine = Engine(max_num_batched_tokens=100, target_itl_ms=0.0)
    engine.add(request("long", 1000, 8, tenant="heavy"))
    assert engine.step()[0] == {"long": 100}
    engine.add(request("short", 30, 8, tenant="light"), request("later", 30, 8, tenant="heavy"))
    assert engine.step()[0] == {"long": 70, "short": 30}
    assert engine.step()[0] == {"short": 1, "long": 99}


def test_no_room_is_left_for_one_that_cannot_enter() -> None:
    engine = Engine(max_num_batched_tokens=100, max_num_seqs=1, target_itl_ms=0.0)
    engine.add(request("long", 1000, 8, tenant="heavy"))
    engine.step()
    engine.add(request("short", 30, 8, tenant="light"))
    assert engine.step()[0] == {"long": 100}


def test_without_a_target_steps_are_as_long_as_they_gain() -> None:
    engine = Engine(target_itl_ms=0.0)
    engine.add(request("light", 10, 400, tenant="light"))
    engine.steps(20)
    engine.add(*flood("heavy"))
    assert engine.scheduler.policy.step_limit_s([]) == math.inf
    gaining_s = GAINING_STEPS * (BASE_S + ROW_S)
    assert 0.9 * gaining_s < engine.steps(3)[-1][1] < 1.1 * gaining_s
