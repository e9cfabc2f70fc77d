"""Replicas that are started when requests wait, and ended when they are not needed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from headway.errors import ConfigError
from headway.rpc import engine_client
from headway.rpc.engine_client import EngineClient
from headway.rpc.ray_cluster import cores_each
from headway.rpc.supervision import RESTING, Backoff, Patience, ScalingRule
from headway.server.server_config import ServerConfig
from tests.unit.rpc.served import FACTORY, ROOT, add, read, until


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


def run(test: Callable[[EngineClient], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setattr(engine_client, "SCALING_TICK_S", 0.1)
    monkeypatch.setattr(engine_client, "SCALING_DRAIN_S", 0.2)

    async def with_client() -> None:
        client = EngineClient(
            {"step_s": 0.005, "num_kv_blocks": 512, "max_num_seqs": 2},
            factory=FACTORY,
            patience=Patience(),
            backoff=lambda: Backoff(first_s=0.05),
            log_level="CRITICAL",
            scaling=ScalingRule(1, 3, up_s=0.3, down_s=0.5),
        )
        async with asyncio.timeout(90):
            await client.start()
            try:
                await test(client)
            finally:
                await client.shutdown()

    asyncio.run(with_client())


def num_awake(client: EngineClient) -> int:
    return sum(replica.is_ready for replica in client.replicas)


async def text_of(client: EngineClient, name: str, num_tokens: int) -> str:
    return "".join(delta.text for delta in await read(client.submit(add(name, max_tokens=num_tokens))))


def expected(num_tokens: int) -> str:
    return "".join("abcdefghijklmnopqrstuvwxyz"[(3 + number) % 26] for number in range(num_tokens))


def test_replicas_come_with_the_load_and_go_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer is whole, also of requests whose replica is not needed any more while they run."""

    async def test(client: EngineClient) -> None:
        assert num_awake(client) == 1 and client.health.ok
        assert [replica.problem for replica in client.replicas[1:]] == [RESTING] * 2
        reading = [asyncio.create_task(text_of(client, f"r{number}", 300)) for number in range(10)]
        await until(lambda: num_awake(client) == 3)
        assert await asyncio.gather(*reading) == [expected(300)] * 10
        late = asyncio.create_task(text_of(client, "late", 600))
        await until(lambda: num_awake(client) == 1)
        assert await late == expected(600)
        assert client.health.ok and [replica.problem for replica in client.replicas[1:]] == [RESTING] * 2
        again = [asyncio.create_task(text_of(client, f"s{number}", 300)) for number in range(10)]
        await until(lambda: num_awake(client) > 1)
        pid = client.replicas[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert await asyncio.gather(*again) == [expected(300)] * 10

    run(test, monkeypatch)
