"""A replica's process in good and bad days: started, watched, replaced and ended, in a time that the test owns."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Iterator

import pytest

from headway.errors import EngineStartError, InvalidRequestError
from headway.front.replica import EXIT_GRACE_S
from headway.front.supervision import START_SILENT_S, TICK_S, Patience
from headway.sampling_params import SamplingParams
from headway.wire.messages import AbortRequests, AddRequest
from tests.unit.front.fake_engines import READY, FakeEngines, serving
from tests.unit.front.served import add, read, until
from tests.unit.front.virtual_time import VirtualTimeLoop, runner, settle  # noqa: F401

PATIENCE = Patience(slow_step_s=5.0, step_timeout_s=20.0, hang_timeout_s=10.0)


def now_s() -> float:
    return asyncio.get_running_loop().time()


@pytest.fixture
def engines() -> FakeEngines:
    return FakeEngines()


async def test_before_its_first_step_all_blocks_of_an_engine_are_free(engines: FakeEngines) -> None:
    async with serving(engines) as client:
        blocks = client.stats.blocks
        assert (blocks.num_free_blocks, blocks.num_used_blocks, blocks.num_cached_blocks) == (READY.num_blocks, 0, 0)


async def test_parameters_that_several_requests_share_travel_once(engines: FakeEngines) -> None:
    async with serving(engines) as client:
        shared, other = SamplingParams(max_tokens=3), SamplingParams(max_tokens=3)
        with pytest.raises(InvalidRequestError):
            client.submit(AddRequest("unsendable-\ud800", [5], shared))  # the engine has not got them
        with pytest.raises(InvalidRequestError):
            client.submit(add("huge", seed=2**70))
        streams = [client.submit(AddRequest(f"r{number}", [5], shared)) for number in range(3)]
        streams.append(client.submit(AddRequest("other", [5], other)))
        for stream in streams:
            assert sum(len(delta.token_ids) for delta in await read(stream)) == 3
        sent = [message.params for message in engines.engines[0].received if isinstance(message, AddRequest)]
        assert sent == [shared, None, None, other]
        engines.kill(0)
        await until(lambda: client.num_restarts == 1)
        await read(client.submit(AddRequest("again", [5], other)))
        sent = [message.params for message in engines.engines[0].received if isinstance(message, AddRequest)]
        assert sent == [other], "another process does not know them"


async def test_aborts_of_one_turn_travel_together(engines: FakeEngines) -> None:
    async with serving(engines) as client:
        streams = [client.submit(add(f"r{number}", max_tokens=4000)) for number in range(5)]
        await anext(streams[0])
        for stream in streams[:3]:
            stream.close()
        await settle()
        streams[3].close()
        await settle()
        aborts = [message.request_ids for message in engines.engines[0].received if isinstance(message, AbortRequests)]
        assert aborts == [["r0", "r1", "r2"], ["r3"]]
        assert client.num_open_streams == 1 and client.stats.batch.num_running == 1


async def test_one_that_is_silent_is_unwell_and_then_replaced(engines: FakeEngines) -> None:
    async with serving(engines, PATIENCE) as client:
        await read(client.submit(add("first")))
        stopped, since_s = engines.engines[0], now_s()
        engines.kill(0, signal.SIGSTOP)
        await until(lambda: not client.health.ok)
        assert "no sign of life" in client.health.reason and now_s() - since_s < 5.0
        await until(lambda: stopped.returncode is not None)
        assert 10.0 < now_s() - since_s < 12.0
        await until(lambda: client.health.ok)
        assert client.num_restarts == 1 and (await read(client.submit(add("again"))))[-1].is_last


async def test_one_that_is_stuck_in_a_step_is_unwell_and_then_replaced(engines: FakeEngines) -> None:
    async with serving(engines, PATIENCE, resumes=False) as client:
        await read(client.submit(add("first")))
        since_s = now_s()
        stream = client.submit(add("stuck-1"))
        await until(lambda: not client.health.ok)
        assert "no progress for" in client.health.reason and 5.0 < now_s() - since_s < 8.0, "its heartbeats go on"
        assert (await read(stream))[-1].error_status == 503
        assert 20.0 < now_s() - since_s < 23.0
        await until(lambda: client.health.ok)
        assert client.num_restarts == 1


async def test_a_pause_of_this_process_is_not_taken_for_one_of_the_engine(engines: FakeEngines) -> None:
    async with serving(engines, PATIENCE) as client:
        await read(client.submit(add("first")))
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        for _ in range(5):
            loop.advance(20.0)  # the whole event loop stands still
            await asyncio.sleep(TICK_S)
            assert client.health.ok
        await asyncio.sleep(5.0)
        assert client.health.ok and client.num_restarts == 0


async def test_delays_grow_while_it_cannot_be_started(engines: FakeEngines) -> None:
    async with serving(engines) as client:
        engines.refuses = "no memory"
        pid = client.engine_pid
        engines.kill(0)
        await asyncio.sleep(30.0)
        assert client.engine_pid is None and "restarted" in client.health.reason
        engines.refuses = ""
        await until(lambda: client.health.ok)
        assert client.num_restarts == 1 and client.engine_pid not in (pid, None)


async def test_an_engine_that_cannot_start_says_why(engines: FakeEngines) -> None:
    engines.refuses = "there is no such model"
    with pytest.raises(EngineStartError, match="there is no such model"):
        async with serving(engines):
            pass


async def test_one_that_gives_no_sign_of_life_while_it_starts_is_given_up(engines: FakeEngines) -> None:
    engines.start_s, since_s = 1e6, now_s()
    with pytest.raises(EngineStartError, match="ended while it was starting"):
        async with serving(engines):
            pass
    assert START_SILENT_S < now_s() - since_s < START_SILENT_S + 2.0


async def test_if_one_of_several_cannot_start_none_is_left(engines: FakeEngines) -> None:
    engines.start_s = 1.0

    async def refuse() -> None:
        await asyncio.sleep(0.5)
        engines.engines[1].kill()

    refusing = asyncio.create_task(refuse())
    with pytest.raises(EngineStartError):
        async with serving(engines, num_replicas=3):
            pass
    await refusing
    assert all(engine.returncode is not None for engine in engines.engines.values())


async def test_what_is_no_message_ends_the_engine(engines: FakeEngines) -> None:
    async with serving(engines) as client:
        engine = engines.engines[0]
        assert engine._transport is not None
        engine._transport.write(b"\x02\x00\x00\x00\xc1\xc1")
        await until(lambda: client.num_restarts == 1)
        assert engine.returncode is not None and client.health.ok


@pytest.mark.parametrize(
    ("fate", "drain_s", "took_s"),
    [
        ("well", 1000.0, 40.0),
        ("well", 5.0, 5.0),
        ("stopped", 1000.0, 4.0),
        ("stuck", 1.0, 1.0 + EXIT_GRACE_S),
        ("asked twice", 1000.0, 0.0),
    ],
)
async def test_shutdown_does_not_wait_for_ever(fate: str, drain_s: float, took_s: float, engines: FakeEngines) -> None:
    engines.step_s = 0.1
    async with serving(engines) as client:
        await read(client.submit(add("first")))
        stream = client.submit(add("stuck-1" if fate == "stuck" else "long", max_tokens=400))
        await settle()
        engine = engines.engines[0]
        if fate == "stopped":
            engines.kill(0, signal.SIGSTOP)
        since_s = now_s()
        if fate == "asked twice":
            draining = asyncio.create_task(client.shutdown(drain_s))
            await settle()
            assert not client.health.ok
            draining.cancel()
        await client.shutdown(drain_s)
        assert now_s() - since_s == pytest.approx(took_s, abs=1.1)
        assert engine.returncode is not None
        last = (await read(stream))[-1]
        assert (last.finish_reason == "length") == (took_s == 40.0), "it had its time, or ends with an error"


async def test_sigterm_to_the_engine_alone_drains_it_and_it_comes_back(engines: FakeEngines) -> None:
    async with serving(engines, resumes=False) as client:
        stream = client.submit(add("running", max_tokens=50))
        await anext(stream)
        engines.kill(0, signal.SIGTERM)
        assert (await read(stream))[-1].finish_reason == "length"
        await until(lambda: not client.health.ok)
        await until(lambda: client.health.ok)
        assert client.num_restarts == 1


async def test_no_counter_falls_when_an_engine_is_replaced(engines: FakeEngines) -> None:
    async with serving(engines, num_replicas=2, router="round-robin") as client:
        seen: list[int] = []
        client.add_step_listener(lambda stats: seen.append(stats.batch.generation_tokens))
        for number, _ in zip(itertools.count(), range(3), strict=False):
            await read(client.submit(add(f"r{number}", max_tokens=10)))
            before = client.stats.batch.generation_tokens
            engines.kill(number % 2)
            await until(lambda number=number: client.num_restarts == number + 1)
            assert client.stats.batch.generation_tokens == before == 10 * (number + 1)
            assert client.stats.batch.num_running == 0, "what ran went with its process"
        assert seen == sorted(seen) and seen[-1] == 30


@pytest.fixture(autouse=True)
def _nothing_of_it_is_left(runner: asyncio.Runner) -> Iterator[None]:  # noqa: F811
    yield
    assert not asyncio.all_tasks(runner.get_loop())
