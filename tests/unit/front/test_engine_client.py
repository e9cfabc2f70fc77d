"""The client and a real engine process: streams, aborts, a killed engine, a stalled one, shutdown."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from headway.errors import EngineStartError, EngineUnavailableError, InvalidRequestError
from headway.front import engine_client, supervision
from headway.front.engine_client import EngineClient
from headway.front.streams import SnapshotStream
from headway.front.supervision import Patience
from headway.sampling_params import SamplingParams
from headway.wire.engine_stats import EngineStats
from headway.wire.messages import AddRequest, BlockSnapshot, StepSnapshot
from tests.unit.front.served import add, kill, read, serving, small_client, started, until


@pytest.fixture(scope="module")
def client(runner: asyncio.Runner) -> Iterator[EngineClient]:
    """Steps take 2 ms, so that there is a middle to do something in."""
    with serving(runner, step_s=0.002, num_kv_blocks=2048) as client:
        yield client


def state(stats: EngineStats) -> tuple[int, int, int]:
    return stats.batch.num_running, stats.batch.num_waiting, stats.blocks.num_used_blocks


async def test_before_its_first_step_all_blocks_of_an_engine_are_free() -> None:
    async with started(num_kv_blocks=64) as client:
        blocks = client.stats.blocks
        assert (blocks.num_free_blocks, blocks.num_used_blocks, blocks.num_cached_blocks) == (64, 0, 0)


async def test_parameters_that_several_requests_share_travel_once(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = client.replicas[0]._connection
    assert connection is not None
    send, sent = connection.send, []

    def note(message: Any) -> None:
        send(message)
        sent.append(message.params)

    monkeypatch.setattr(connection, "send", note)
    shared, other = SamplingParams(max_tokens=3), SamplingParams(max_tokens=3)
    with pytest.raises(InvalidRequestError):
        client.submit(AddRequest("unsendable-\ud800", [5], shared))  # the engine has not got them
    streams = [client.submit(AddRequest(f"shared-{number}", [5], shared)) for number in range(3)]
    streams.append(client.submit(AddRequest("other", [5], other)))
    assert sent == [shared, None, None, other]
    for stream in streams:
        assert sum(len(delta.token_ids) for delta in await read(stream)) == 3


async def test_what_the_engine_refuses_ends_the_stream_with_an_error(client: EngineClient) -> None:
    (refusal,) = await read(client.submit(AddRequest("far", [10**6], SamplingParams(max_tokens=1))))
    assert refusal.error_status == 400 and refusal.error_param == "prompt"
    assert refusal.error is not None and "vocabulary" in refusal.error
    with pytest.raises(InvalidRequestError):
        client.submit(add("surrogate", stop=["\ud800"]))
    with pytest.raises(InvalidRequestError):
        client.submit(add("huge", seed=2**70))
    stream = client.submit(add("twice", max_tokens=4000))
    with pytest.raises(InvalidRequestError):
        client.submit(add("twice"))
    stream.close()


async def test_closing_a_stream_aborts_its_request_and_frees_its_blocks(client: EngineClient) -> None:
    streams = [client.submit(add(f"left-{index}", max_tokens=4000)) for index in range(20)]
    for stream in streams:
        assert await anext(stream)
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


async def recovered(client: EngineClient, request_id: str) -> None:
    await until(lambda: client.health.ok)
    assert (await read(client.submit(add(request_id))))[-1].finish_reason == "length"


async def test_a_killed_engine_ends_streams_and_is_started_again(client: EngineClient) -> None:
    steps_before = client.stats.batch.num_steps
    restarts_before = client.num_restarts
    viewer = client.watch()
    streams = [client.submit(add(f"doomed-{index}", max_tokens=4000)) for index in range(5)]
    await anext(streams[0])
    kill(client.replicas[0])
    for stream in streams:
        last = (await read(stream))[-1]
        assert (last.finish_reason, last.error_status, last.is_last) == ("error", 503, True)
        assert last.error == "the engine stopped; please retry"
    assert not client.health.ok and "restarted" in client.health.reason and client.engine_pid is None
    with pytest.raises(EngineUnavailableError):
        client.submit(add("too-early"))
    streams[0].close()
    await recovered(client, "after-kill")
    assert client.num_restarts == restarts_before + 1
    assert client.stats.batch.num_steps > steps_before
    while "after-kill" not in [row.request_id for row in (await next_step(viewer)).rows]:
        pass
    viewer.close()


@pytest.fixture(scope="module")
def quick(runner: asyncio.Runner) -> Iterator[EngineClient]:
    """Given up soon."""
    patience = Patience(slow_step_s=0.4, step_timeout_s=2.0, hang_timeout_s=2.0)
    with serving(runner, patience, step_s=0.002) as client:
        yield client


async def test_a_loop_that_is_stuck_in_a_step_is_noticed_and_replaced(quick: EngineClient) -> None:
    restarts_before = quick.num_restarts
    await recovered(quick, f"first-{restarts_before}")
    stream = quick.submit(add("stuck-1"))
    await until(lambda: not quick.health.ok)
    assert "no progress" in quick.health.reason, "its heartbeats go on"
    assert (await read(stream))[-1].error_status == 503
    await recovered(quick, "after-stuck")
    assert quick.num_restarts == restarts_before + 1


async def test_a_pause_of_this_process_is_not_taken_for_one_of_the_engine(quick: EngineClient) -> None:
    restarts_before = quick.num_restarts
    await recovered(quick, f"first-{restarts_before}")
    time.sleep(2.3)  # the whole event loop
    await asyncio.sleep(0.3)
    assert quick.health.ok and quick.num_restarts == restarts_before


@pytest.mark.parametrize("fate", ["stopped", "stuck", "asked twice"])
async def test_shutdown_does_not_wait_for_ever(fate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "SILENT_S", 0.5)
    monkeypatch.setattr(supervision, "EXIT_GRACE_S", 0.3)
    async with started(step_s=0.002) as client:
        await read(client.submit(add("first")))
        stream = client.submit(add("stuck-1", max_tokens=4000) if fate == "stuck" else add("long", max_tokens=4000))
        pid = client.engine_pid
        assert pid is not None
        if fate == "stopped":
            await anext(stream)
            os.kill(pid, signal.SIGSTOP)
        if fate == "asked twice":
            draining = asyncio.create_task(client.shutdown(drain_s=1000.0))
            await asyncio.sleep(0)
            draining.cancel()
        await client.shutdown(drain_s=1000.0 if fate == "stopped" else 0.1)
        assert (await read(stream))[-1].error_status == 503
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_nonsense_in_either_direction_restarts_the_engine(client: EngineClient) -> None:
    for direction in ("to", "from"):
        stream = client.submit(add(f"garbled-{direction}", max_tokens=4000))
        await anext(stream)
        connection = client.replicas[0]._connection
        assert connection is not None and connection._transport is not None
        if direction == "to":
            connection._transport.write(b"\x02\x00\x00\x00\xc1\xc1")
        else:
            connection.data_received(b"\xff" * 64)
        assert (await read(stream))[-1].error_status == 503
        await recovered(client, f"after-nonsense-{direction}")


async def test_sigterm_to_the_engine_alone_drains_it_and_it_comes_back(client: EngineClient) -> None:
    stream = client.submit(add("running", max_tokens=50))
    await anext(stream)
    kill(client.replicas[0], signal.SIGTERM)
    assert (await read(stream))[-1].finish_reason == "length"
    await until(lambda: not client.health.ok)
    await recovered(client, "after-sigterm")


async def test_an_engine_that_cannot_start_says_why() -> None:
    with pytest.raises(EngineStartError, match="there is no such model"):
        await small_client(refuse="there is no such model").start()


async def test_each_replica_is_watched_by_itself() -> None:
    async with started(num_replicas=2, router="round-robin") as client:
        async with client.watch(1) as viewer:
            for number in range(4):  # in turn
                await read(client.submit(add(f"turn-{number}")))
            seen: set[str] = set()
            while len(seen) < 2:
                seen |= {row.request_id for row in (await next_step(viewer)).rows}
            assert seen == {"turn-1", "turn-3"}
        assert await ended(viewer)


async def test_prompts_go_where_their_beginning_is_cached() -> None:
    """With the router that the simulator has, too."""
    assert importlib.import_module("headway_lab.sim.simulate").Router is engine_client.Router
    async with started(num_replicas=2, router="prefix-aware", num_kv_blocks=256) as client:
        known = client._router.index.blocks_of
        for first in range(5, 13):
            for turn in range(3):
                prompt = [first] * 40 + [first + turn] * 8
                last = (await read(client.submit(AddRequest(f"{first}-{turn}", prompt, SamplingParams()))))[-1]
                assert last.timings is not None and (last.timings.num_cached_tokens >= 40) == (turn > 0)
                await until(lambda place=first: len({*known(0), *known(1)}) >= 12 * (place - 4))
        assert known(0) and known(1), "both are used"
