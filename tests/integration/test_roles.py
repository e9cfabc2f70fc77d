"""Prefill and decode apart, with the embedded model in float32: the tokens are those of one engine, whatever happens to
the replica that computes prompts, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest

from headway import AsyncLLM, SamplingParams
from headway.outputs import RequestOutput
from headway.rpc import engine_client
from headway.rpc.engine_client import EngineClient
from headway.rpc.messages import AddRequest, EngineStats
from headway.sampling_params import StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PARAMS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(max_tokens=24, temperature=0.0),
    "seeded": SamplingParams(max_tokens=24, temperature=0.9, seed=7),
    "several": SamplingParams(max_tokens=16, temperature=0.8, seed=11, n=3),
    "logprobs": SamplingParams(max_tokens=12, temperature=0.0, logprobs=3),
    "prompt logprobs": SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=2),
    "stop": SamplingParams(max_tokens=32, temperature=0.0, stop=["the", "."], include_stop_str_in_output=True),
    "best_of": SamplingParams(max_tokens=8, temperature=0.8, seed=2, n=1, best_of=3),
    "json": SamplingParams(
        max_tokens=40, temperature=0.6, seed=9, structured_outputs=StructuredOutputsParams(json=SCHEMA)
    ),
}
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_memory": 2**28}


def always(choice: object) -> bool:
    return True


def long_prompts(name: str) -> list[list[int]]:
    """Of different lengths, one without a whole block, one with a beginning that all share."""
    rng = random.Random(name)
    common = [number % 1900 + 5 for number in range(0, 1600, 10)]
    short, middle, long = ([rng.randrange(5, 2000) for _ in range(length)] for length in (9, 190, 151))
    return [short, middle, common + long]


def facts(output: RequestOutput) -> list[tuple[Any, ...]]:
    return [(one.text, list(one.token_ids), one.finish_reason, one.stop_reason) for one in output.outputs]


async def answers(llm: AsyncLLM) -> dict[str, list[tuple[Any, ...]]]:
    async def one(name: str, number: int, prompt: list[int]) -> tuple[str, list[tuple[Any, ...]]]:
        last: RequestOutput | None = None
        async for output in llm.generate({"prompt_token_ids": prompt}, PARAMS[name]):
            last = output
        assert last is not None and last.finished
        return f"{name} {number}", facts(last)

    work = [one(name, number, prompt) for name in PARAMS for number, prompt in enumerate(long_prompts(name))]
    return dict(await asyncio.gather(*work))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def is_idle(stats: EngineStats | None) -> bool:
    return stats is not None and (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


async def check_nothing_left(client: EngineClient) -> None:
    """Nothing runs or waits, and no block is held, on any replica."""
    async with asyncio.timeout(30):
        await until(lambda: all(is_idle(replica.stats) for replica in client.replicas if replica.stats is not None))
    assert client.num_open_streams == 0
    assert client._prefills is not None
    assert not client._prefills._live and not client._prefills._by_request and not client._prefills.router._routed
    assert not client._router._routed


@pytest.fixture(scope="module")
def expected() -> dict[str, list[tuple[Any, ...]]]:
    """What one engine answers."""

    async def ask() -> dict[str, list[tuple[Any, ...]]]:
        async with AsyncLLM(**OPTIONS) as llm:
            return await answers(llm)

    return asyncio.run(ask())


@pytest.mark.parametrize("carrier", ["auto", "tcp"])
def test_tokens_are_those_of_one_engine(
    carrier: Any, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "computes_elsewhere", always)

    async def test() -> None:
        llm = AsyncLLM(roles="prefill=1,decode=1", **OPTIONS)
        for replica in llm._client.replicas:
            assert replica._spec.blocks is not None
            replica._spec.blocks.carrier = carrier
        async with asyncio.timeout(300), llm:
            client = llm._client
            assert await answers(llm) == expected
            outcomes = client.prefill_outcomes
            assert outcomes["elsewhere"] > 5 and not outcomes["aborted"], "a slow machine may not wait for all"
            assert sum(outcomes.values()) == len(expected)
            decode, prefill = client.replicas
            assert decode.stats is not None and prefill.stats is not None
            assert decode.stats.num_moved_in_blocks > 40, "blocks came from there"
            assert prefill.stats.prompt_tokens > 0 and decode.stats.transfer_block_s > 0.0
            await check_nothing_left(client)

    asyncio.run(test())


def test_tokens_do_not_depend_on_the_death_of_a_prefill_replica(
    expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "computes_elsewhere", always)

    async def kill(llm: AsyncLLM, deaths: list[int]) -> None:
        prefill = llm._client.replicas[-1]
        rng = random.Random(0)
        while True:
            await asyncio.sleep(0.01 + rng.random() * 0.5)
            live = llm._client._prefills
            if prefill.pid is not None and live is not None and live._live and prefill.pid not in deaths:
                deaths.append(prefill.pid)
                os.kill(prefill.pid, rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]))

    async def test() -> None:
        llm = AsyncLLM(roles="prefill=1,decode=1", **OPTIONS)
        for replica in llm._client.replicas:
            replica._watchdog.patience = engine_client.Patience(hang_timeout_s=1.0)
        deaths: list[int] = []
        async with asyncio.timeout(300), llm:
            killing = asyncio.create_task(kill(llm, deaths))
            try:
                assert await answers(llm) == expected
            finally:
                killing.cancel()
            assert deaths and llm._client.prefill_outcomes["failed"], "it was worth the while"
            await check_nothing_left(llm._client)
            await until(lambda: llm._client.replicas[-1].is_ready)
            assert await answers(llm) == expected

    asyncio.run(test())


def test_tokens_do_not_depend_on_the_death_of_a_decode_replica(
    expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "computes_elsewhere", always)

    async def test() -> None:
        llm = AsyncLLM(roles="prefill=1,decode=2", **OPTIONS)
        async with asyncio.timeout(300), llm:
            asking = asyncio.create_task(answers(llm))
            victim = llm._client.replicas[0]
            await until(lambda: victim.stats is not None and victim.stats.generation_tokens > 50)
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGKILL)
            assert await asking == expected
            assert llm._client.num_resumed > 0
            await check_nothing_left(llm._client)

    asyncio.run(test())


def test_aborted_requests_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the queue of the prefill replica, while blocks travel, and while tokens come."""
    monkeypatch.setattr(engine_client, "computes_elsewhere", always)

    async def test() -> None:
        client = EngineClient(OPTIONS, roles=engine_client.Roles.parse("prefill=1,decode=1"), log_level="CRITICAL")
        await client.start()
        try:
            rng = random.Random(3)

            async def one(number: int) -> None:
                prompt = [rng.randrange(5, 2000) for _ in range(rng.choice([300, 900]))]
                stream = client.submit(AddRequest(f"r{number}", prompt, SamplingParams(max_tokens=50)))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(rng.random() * 4), stream:
                        async for _ in stream:
                            pass

            async with asyncio.timeout(240):
                await asyncio.gather(*map(one, range(24)))
                await check_nothing_left(client)
            outcomes = client.prefill_outcomes
            assert outcomes["aborted"] > 2 and sum(outcomes.values()) == 24
            stream = client.submit(AddRequest("last", list(range(5, 500)), SamplingParams(max_tokens=3)))
            assert [delta async for deltas in stream for delta in deltas][-1].finish_reason == "length"
        finally:
            await client.shutdown()

    asyncio.run(test())
