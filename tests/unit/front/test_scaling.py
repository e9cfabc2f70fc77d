"""Replicas that are started when requests wait, and ended when they are not needed."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from headway.errors import ConfigError
from headway.front import engine_client
from headway.front.engine_client import EngineClient
from headway.front.ray_cluster import cores_each
from headway.front.scaling import ScalingRule
from headway.front.supervision import RESTING
from headway.server.server_config import ServerConfig
from tests.unit.front.served import expected, kill, started, text_of, until


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


def num_awake(client: EngineClient) -> int:
    return sum(replica.is_ready for replica in client.replicas)


async def load(client: EngineClient, name: str, enough: asyncio.Event) -> None:
    """Ten requests at a time, each with a whole answer."""

    async def ask(number: int) -> None:
        for turn in itertools.count():
            assert await text_of(client, f"{name}{number}-{turn}", 60) == expected(60)
            if enough.is_set():
                return

    await asyncio.gather(*map(ask, range(10)))


async def test_replicas_come_with_the_load_and_go_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer is whole, also of requests whose replica is not needed any more while they run."""
    monkeypatch.setattr(engine_client, "SCALING_TICK_S", 0.1)
    monkeypatch.setattr(engine_client, "SCALING_DRAIN_S", 0.2)
    rule = ScalingRule(1, 3, up_s=0.2, down_s=0.3)
    async with started(resumes=True, scaling=rule, step_s=0.005, num_kv_blocks=512, max_num_seqs=2) as client:
        assert num_awake(client) == 1 and client.health.ok
        assert [replica.problem for replica in client.replicas[1:]] == [RESTING] * 2
        enough = asyncio.Event()
        asking = asyncio.create_task(load(client, "r", enough))
        await until(lambda: num_awake(client) == 3)
        enough.set()
        await asking
        late = asyncio.create_task(text_of(client, "late", 300))
        await until(lambda: num_awake(client) == 1)
        assert await late == expected(300)
        assert client.health.ok and [replica.problem for replica in client.replicas[1:]] == [RESTING] * 2
        killed = asyncio.Event()
        again = asyncio.create_task(load(client, "s", killed))
        await until(lambda: num_awake(client) > 1)
        kill(client.replicas[1])
        killed.set()
        await again
