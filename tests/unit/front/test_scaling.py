"""Replicas that are started when requests wait, and stopped when they are not needed."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from headway.errors import ConfigError, EngineStartError
from headway.front.ray_cluster import cores_each
from headway.front.replica import IDLE
from headway.front.scaling import DRAIN_S, FAILED_START_S, TICK_S, Autoscaler, Load, ScalingRule
from headway.server.server_config import ServerConfig
from tests.unit.front.fake_engines import FakeEngines, serving
from tests.unit.front.served import expected, text_of, until
from tests.unit.front.virtual_time import runner  # noqa: F401


def after(rule: ScalingRule, seconds: float, **load: int) -> int:
    given = {"num_replicas": 2, "num_running": 0, "num_waiting": 0, "max_num_seqs": 10, **load}
    return rule.wanted(**given, seconds=seconds)


def test_requests_that_wait_for_long_bring_one_more() -> None:
    rule = ScalingRule(1, 3)
    assert after(rule, 4, num_running=20, num_waiting=1) == 2
    assert after(rule, 4, num_running=20) == 2, "one that waits now and then is no reason"
    assert after(rule, 4, num_running=20, num_waiting=1) == 2
    assert after(rule, 1, num_running=20, num_waiting=9) == 3
    assert after(rule, 4, num_replicas=3, num_waiting=9) == 3, "the new one has not had its time"
    assert after(rule, 9, num_replicas=3, num_waiting=9) == 3, "no more than the most"


def test_seats_that_are_not_needed_for_long_go() -> None:
    rule = ScalingRule(1, 3)
    assert after(rule, 59, num_running=6) == 2
    assert after(rule, 1, num_running=7) == 2, "seven would be a bit much for one"
    assert after(rule, 59, num_running=6) == 2
    assert after(rule, 1, num_running=6) == 1
    assert after(rule, 500, num_replicas=1) == 1, "no fewer than the least"


@pytest.mark.parametrize(("least", "most"), [(0, 2), (3, 2), (-1, -1)])
def test_limits_that_are_none(least: int, most: int) -> None:
    with pytest.raises(ConfigError, match="no range"):
        ScalingRule(least, most)


@pytest.mark.parametrize(
    ("options", "scaling"),
    [
        ({}, None),
        ({"replicas": 2}, None),
        ({"replicas": 2, "max_replicas": 4}, (2, 4)),
        ({"replicas": 2, "min_replicas": 1}, (1, 2)),
        ({"min_replicas": 1, "max_replicas": 1}, None),
    ],
)
def test_what_the_options_mean(options: dict[str, int], scaling: tuple[int, int] | None) -> None:
    assert ServerConfig(**options).scaling == scaling


@pytest.mark.parametrize(
    "options", [{"min_replicas": 2}, {"replicas": 3, "max_replicas": 2}, {"max_replicas": -1}, {"address": "a:1"}]
)
def test_options_that_contradict_each_other(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServerConfig(**options)


@pytest.mark.parametrize(
    ("cores", "replicas", "each"),
    [([1, 1], 1, 1), ([8], 3, 2), ([8, 8], 2, 8), ([8, 8], 3, 4), ([16, 4], 3, 5), ([2], 5, 1), ([], 1, 1)],
)
def test_cores_on_nodes(cores: list[int], replicas: int, each: int) -> None:
    assert cores_each(cores, replicas) == each


# ---- replicas that do as they are told ------------------------------------------------------------------------------


class Replica:
    """Notes when it was started and stopped."""

    def __init__(self, place: int, *, is_idle: bool = True) -> None:
        self.place = place
        self.is_idle = is_idle
        self.can_start = True
        self.events: list[tuple[str, float]] = []

    async def start(self) -> None:
        self._note("start")
        if not self.can_start:
            raise EngineStartError("no room")
        self.is_idle = False

    async def stop(self, drain_s: float) -> None:
        self._note(f"stop {drain_s:g}")
        self.is_idle = True

    def _note(self, what: str) -> None:
        self.events.append((what, round(asyncio.get_running_loop().time() - self.since_s, 3)))

    since_s = 0.0


async def followed(loads: list[Load | None], replicas: list[Replica], rule: ScalingRule) -> None:
    """One load after the other, a tick each."""
    Replica.since_s = asyncio.get_running_loop().time()
    left = iter(loads)
    scaler = Autoscaler(rule, replicas, lambda: next(left))
    with pytest.raises(RuntimeError):  # what a coroutine makes of the end of an iterator
        await scaler.run()


BUSY, QUIET = Load(2, 3, 2), Load(1, 0, 2)


async def test_one_replica_at_a_time_comes_and_the_last_goes() -> None:
    first, second, third = replicas = [Replica(0, is_idle=False), Replica(1), Replica(2)]
    rule = ScalingRule(1, 3, up_s=2 * TICK_S, down_s=3 * TICK_S)
    await followed([None, None, *[BUSY] * 6, *[QUIET] * 6], replicas, rule)
    assert first.events == []
    assert second.events == [("start", 4.0), (f"stop {DRAIN_S:g}", 14.0)]
    assert third.events == [("start", 6.0), (f"stop {DRAIN_S:g}", 11.0)]


async def test_one_that_cannot_be_started_is_tried_again_later() -> None:
    first, second = replicas = [Replica(0, is_idle=False), Replica(1)]
    second.can_start = False
    await followed([BUSY] * 3, replicas, ScalingRule(1, 2, up_s=TICK_S))
    assert second.events == [
        ("start", 1.0),
        ("stop 0", 1.0),
        ("start", 2.0 + FAILED_START_S),
        ("stop 0", 2.0 + FAILED_START_S),
        ("start", 3.0 + 2 * FAILED_START_S),
        ("stop 0", 3.0 + 2 * FAILED_START_S),
    ]
    assert second.is_idle and not first.events


async def test_answers_are_whole_while_replicas_come_and_go() -> None:
    """Also of requests whose replica is stopped while they run, or dies."""
    engines = FakeEngines(max_num_seqs=2, step_s=0.1)
    rule = ScalingRule(1, 3, up_s=3.0, down_s=5.0)
    async with serving(engines, scaling=rule) as client:

        def num_ready() -> int:
            return sum(replica.is_ready for replica in client.replicas)

        def ask(name: str, num_tokens: int) -> asyncio.Task[str]:
            return asyncio.create_task(text_of(client, name, num_tokens))

        assert num_ready() == 1 and client.health.ok
        assert [replica.problem for replica in client.replicas[1:]] == [IDLE] * 2
        asking = [ask(f"r{number}", 60) for number in range(10)]
        await until(lambda: num_ready() == 3)
        assert await asyncio.gather(*asking) == [expected(60)] * 10
        late = ask("late", 600)
        await until(lambda: num_ready() == 1)
        assert await late == expected(600)
        assert client.health.ok and [replica.problem for replica in client.replicas[1:]] == [IDLE] * 2
        again = [ask(f"s{number}", 60) for number in range(10)]
        await until(lambda: num_ready() == 2)
        engines.kill(1, signal.SIGKILL)
        assert await asyncio.gather(*again) == [expected(60)] * 10
