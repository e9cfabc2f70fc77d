"""Replicas on a Ray cluster of two nodes on this machine; skipped where Ray is not installed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from headway.errors import ConfigError, EngineStartError
from headway.front import prefills
from headway.front.deployment import Deployment
from headway.front.engine_client import EngineClient
from headway.front.ray_cluster import RayCluster
from headway.front.roles import Roles
from headway.front.supervision import Backoff, Patience
from headway.sampling_params import SamplingParams
from headway.wire.messages import AddRequest
from tests.unit.front.served import FACTORY, ROOT, all_ready, expected, kill, read, text_of

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

OPTIONS = {"step_s": 0.003, "num_kv_blocks": 512}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        cluster.add_node(num_cpus=1)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


def client(
    nodes: Any, *, replicas: int = 2, name: str = "test", roles: Roles | None = None, **options: Any
) -> EngineClient:
    deployment = Deployment(
        options or OPTIONS,
        factory=FACTORY,
        log_level="CRITICAL",
        num_replicas=replicas,
        roles=roles,
        cluster=RayCluster(nodes.address, name=name),
    )
    return EngineClient(
        deployment, patience=Patience(hang_timeout_s=4.0), backoff=lambda: Backoff(first_s=0.1, longest_s=1.0)
    )


def test_engines_die_and_nodes_go_and_come(nodes: Any) -> None:
    async def test() -> None:
        engine = client(nodes)
        await engine.start()
        try:
            reading = [asyncio.create_task(text_of(engine, f"r{number}", 2000)) for number in range(8)]
            await asyncio.sleep(1)
            for replica, kind in zip(engine.replicas, (signal.SIGKILL, signal.SIGSTOP), strict=True):
                kill(replica, kind)
                await asyncio.sleep(1)
            assert await asyncio.gather(*reading) == [expected(2000)] * 8
            await all_ready(engine)
            reading = [asyncio.create_task(text_of(engine, f"s{number}", 2000)) for number in range(8)]
            await asyncio.sleep(1)
            (other,) = nodes.worker_nodes
            await asyncio.to_thread(nodes.remove_node, other, allow_graceful=False)
            assert await asyncio.gather(*reading) == [expected(2000)] * 8
            nodes.add_node(num_cpus=1)  # in the main thread: it sets a signal handler
            await all_ready(engine)
            assert await text_of(engine, "after", 20) == expected(20)
        finally:
            await engine.shutdown()

    asyncio.run(asyncio.wait_for(test(), 200))


def test_prefill_and_decode_apart_on_two_nodes(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefills, "computes_elsewhere", lambda choice: True)

    async def test() -> None:
        engine = client(nodes, name="apart", roles=Roles(1, 1), **OPTIONS)
        await engine.start()
        try:
            numbers = iter(range(5, 2000, 3))

            async def ask(name: str) -> str:
                first = next(numbers)
                prompt = [first + number % 3 for number in range(401)]
                request = AddRequest(name, prompt, SamplingParams(max_tokens=50, temperature=0.0))
                return "".join(delta.text for delta in await read(engine.submit(request)))

            texts = await asyncio.gather(*(ask(f"r{number}") for number in range(8)))
            assert len(set(texts)) == 1 and len(texts[0]) == 50
            assert engine.prefill_outcomes["elsewhere"] == 8, engine.prefill_outcomes
            asking = [asyncio.create_task(ask(f"s{number}")) for number in range(8)]
            await asyncio.sleep(0.1)
            kill(engine.replicas[1])
            assert await asyncio.gather(*asking) == [texts[0]] * 8
            await all_ready(engine)
            assert await ask("after") == texts[0]
        finally:
            await engine.shutdown()

    asyncio.run(asyncio.wait_for(test(), 200))


def test_two_front_ends_and_the_end_of_their_engines(nodes: Any) -> None:
    import ray

    async def test() -> None:
        first, second = client(nodes, name="shared"), client(nodes, name="shared")
        await first.start()
        await second.start()
        pids = [replica.pid for replica in first.replicas]
        assert pids == [replica.pid for replica in second.replicas], "the same engines"
        reading = [asyncio.create_task(text_of(each, "same", 1000)) for each in (first, second)]
        other = client(nodes, name="shared", num_kv_blocks=100)
        with pytest.raises(EngineStartError, match="other options"):
            await other.start()
        assert await reading[0] == expected(1000)
        await first.shutdown()
        assert await reading[1] == expected(1000)
        await second.shutdown()

        def num_left() -> int:
            return sum(name.startswith("shared-") for name in ray.util.list_named_actors())

        for _ in range(100):
            if not await asyncio.to_thread(num_left):
                break
            await asyncio.sleep(0.1)
        assert not num_left(), "actors go with their engines"

    asyncio.run(asyncio.wait_for(test(), 200))


def test_an_engine_that_cannot_be_built_says_why(nodes: Any) -> None:
    async def test() -> None:
        engine = client(nodes, replicas=1, name="bad", refuse="no such luck")
        with pytest.raises(EngineStartError, match="no such luck"):
            await engine.start()

    asyncio.run(asyncio.wait_for(test(), 100))


def test_a_cluster_without_room_says_so(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.front.ray_cluster.PLACED_S", 3.0)

    async def test() -> None:
        engine = client(nodes, replicas=3, name="many")
        with pytest.raises(EngineStartError, match="has no room for 'many-"):
            await engine.start()

    asyncio.run(asyncio.wait_for(test(), 100))


def test_no_cluster_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ConfigError, match="pip install 'ray>="):
        RayCluster()
