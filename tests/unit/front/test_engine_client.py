"""The client and real engine processes. What becomes of a request in every case is tested without them: see
`test_resumption` and `test_replica`."""

from __future__ import annotations

import asyncio
import importlib
import signal
from collections.abc import Iterator

import pytest

from headway.errors import InvalidRequestError
from headway.front import deployment
from headway.front.engine_client import EngineClient
from headway.front.supervision import Patience
from headway.front.watch_streams import SnapshotStream
from headway.sampling_params import SamplingParams
from headway.wire.engine_stats import EngineStats
from headway.wire.messages import AddRequest, BlockSnapshot, StepSnapshot
from tests.unit.front.served import add, all_ready, expected, kill, read, serving, started, text_of, until

QUICK = Patience(slow_step_s=0.4, step_timeout_s=1.0)


@pytest.fixture(scope="module")
def client(runner: asyncio.Runner) -> Iterator[EngineClient]:
    """Steps take 2 ms, so that there is a middle to do something in. A process that is stuck is replaced soon."""
    with serving(runner, QUICK, resumes=True, step_s=0.002, num_kv_blocks=2048) as client:
        yield client


def state(stats: EngineStats) -> tuple[int, int, int]:
    return stats.batch.num_running, stats.batch.num_waiting, stats.blocks.num_used_blocks


async def test_what_the_engine_refuses_ends_the_stream_with_an_error(client: EngineClient) -> None:
    (refusal,) = await read(client.submit(AddRequest("far", [10**6], SamplingParams(max_tokens=1))))
    assert refusal.error_status == 400 and refusal.error_param == "prompt"
    assert refusal.error is not None and "vocabulary" in refusal.error
    with pytest.raises(InvalidRequestError):
        client.submit(add("surrogate", stop=["\ud800"]))


async def test_closing_a_stream_aborts_its_request_and_frees_its_blocks(client: EngineClient) -> None:
    streams = [client.submit(add(f"left-{index}", max_tokens=4000)) for index in range(20)]
    for stream in streams:
        assert await anext(stream) or await anext(stream), "the first read may bring nothing but a forecast"
    assert state(client.stats)[0] == 20
    for stream in streams[:10]:
        await stream.aclose()
        stream.close()
    await until(lambda: state(client.stats)[0] == 10)
    assert [deltas async for deltas in streams[0]] == []
    for stream in streams:
        stream.close()
    await until(lambda: state(client.stats) == (0, 0, 0))
    assert client.num_open_streams == 0


async def test_steps_are_shown_only_while_somebody_watches(client: EngineClient) -> None:
    seen: list[EngineStats] = []
    client.add_step_listener(lambda stats: seen.append(stats))
    async with client.watch() as one, client.watch() as other:
        await read(client.submit(add("watched")))
        for viewer in (one, other):
            assert isinstance(await anext(viewer), BlockSnapshot), "the blocks as they are come first"
            snapshot = await next_step(viewer)
            assert [row.request_id for row in snapshot.rows] == ["watched"]
    assert len(seen) >= 8 and seen[-1] is client.stats
    assert await ended(one) and await ended(other)


async def next_step(viewer: SnapshotStream) -> StepSnapshot:
    while not isinstance(snapshot := await anext(viewer), StepSnapshot):
        pass
    return snapshot


async def ended(viewer: SnapshotStream) -> bool:
    return [snapshot async for snapshot in viewer] == []


@pytest.mark.parametrize("death", ["killed", "stuck", "told to end", "sent nonsense"])
async def test_answers_are_whole_although_their_engine_ends(death: str, client: EngineClient) -> None:
    """A viewer sees steps of the next process, and no counter falls."""
    (replica,) = client.replicas
    await text_of(client, f"before {death}", 5)
    num_restarts, num_steps, pid = client.num_restarts, client.stats.batch.num_steps, replica.pid
    viewer = client.watch()
    reading = [asyncio.create_task(text_of(client, f"{death} {number}", 200 + number)) for number in range(5)]
    await until(lambda: client.stats.batch.num_steps > num_steps)
    if death == "killed":
        kill(replica)
    elif death == "told to end":
        kill(replica, signal.SIGTERM)
    elif death == "stuck":
        stuck = client.submit(add(f"stuck-{num_restarts}"))
        await until(lambda: not client.health.ok)
        assert "no progress" in client.health.reason, "its heartbeats go on"
        stuck.close()
    else:
        assert replica._connection is not None and replica._connection._transport is not None
        replica._connection._transport.write(b"\x02\x00\x00\x00\xc1\xc1")
    assert await asyncio.gather(*reading) == [expected(200 + number) for number in range(5)]
    await until(lambda: client.num_restarts == num_restarts + 1 and client.health.ok)
    assert replica.pid not in (None, pid) and client.stats.batch.num_steps > num_steps
    reading = [asyncio.create_task(text_of(client, f"after {death}", 20))]
    while f"after {death}" not in [row.request_id for row in (await next_step(viewer)).rows]:
        pass
    assert await reading[0] == expected(20)
    viewer.close()


async def test_requests_go_on_in_the_other_replica_when_one_dies_and_when_all_are_replaced() -> None:
    async with started(Patience(), resumes=True, num_replicas=2, step_s=0.002, num_kv_blocks=2048) as client:
        before = [replica.pid for replica in client.replicas]
        reading = [asyncio.create_task(text_of(client, f"a{number}", 150)) for number in range(8)]
        await until(lambda: all(replica.stats.batch.num_running for replica in client.replicas))
        kill(client.replicas[1])
        await until(lambda: not client.replicas[1].is_ready)
        assert client.health.ok and client.num_resumed == 4
        assert await asyncio.gather(*reading) == [expected(150)] * 8
        await all_ready(client)
        reading = [asyncio.create_task(text_of(client, f"b{number}", 20 + 60 * number)) for number in range(6)]
        await client.restart(drain_s=0.1)
        assert await asyncio.gather(*reading) == [expected(20 + 60 * number) for number in range(6)]
        assert not {*before} & {replica.pid for replica in client.replicas} and client.num_open_streams == 0


async def test_prompts_go_where_their_beginning_is_cached() -> None:
    """With the router that the simulator has, too."""
    assert importlib.import_module("headway_lab.sim.simulate").Router is deployment.Router
    async with started(num_replicas=2, router="prefix-aware", num_kv_blocks=256) as client:
        known = client._routers[0].index.blocks_of
        for first in range(5, 13):
            for turn in range(3):
                prompt = [first] * 40 + [first + turn] * 8
                last = (await read(client.submit(AddRequest(f"{first}-{turn}", prompt, SamplingParams()))))[-1]
                assert last.timings is not None and (last.timings.num_cached_tokens >= 40) == (turn > 0)
                await until(lambda place=first: len({*known(0), *known(1)}) >= 12 * (place - 4))
        assert known(0) and known(1), "both are used"
