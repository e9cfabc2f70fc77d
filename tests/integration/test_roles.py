"""Prefill and decode apart: the tokens are those of one engine, whatever happens to the replica that computes prompts,
and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from headway import LLM, AsyncLLM, SamplingParams
from headway.front import prefills
from headway.front.deployment import Deployment
from headway.front.engine_client import EngineClient
from headway.front.roles import Roles
from headway.wire.engine_stats import EngineStats
from headway.wire.messages import AddRequest
from tests.integration.server_process import ServerProcess, running_server
from tests.integration.test_resumption import PARAMS, Answers, Asked, answers, answers_of
from tests.unit.front.served import all_ready, kill, read, until

Start = Callable[..., AsyncLLM]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """All prompts go to a prefill replica."""
    monkeypatch.setattr(prefills, "computes_elsewhere", lambda choice: True)


def long_prompts(name: str) -> list[list[int]]:
    """Of different lengths, one without a whole block, one with a beginning that all share."""
    rng = random.Random(name)
    common = [number % 1900 + 5 for number in range(0, 1600, 10)]
    short, middle, long = ([rng.randrange(5, 2000) for _ in range(length)] for length in (9, 190, 151))
    return [short, middle, common + long]


ASKED: Asked = {
    f"{name} {number}": ({"prompt_token_ids": prompt}, params)
    for name, params in PARAMS.items()
    for number, prompt in enumerate(long_prompts(name))
}


def is_idle(stats: EngineStats) -> bool:
    return (stats.batch.num_running, stats.batch.num_waiting, stats.blocks.num_used_blocks) == (
        0,
        0,
        0,
    )


async def check_nothing_left(client: EngineClient) -> None:
    """Nothing runs or waits, and no block is held, on any replica."""
    async with asyncio.timeout(30):
        await until(lambda: all(is_idle(replica.stats) for replica in client.replicas))
    assert client.num_open_streams == 0
    assert not client._prefills.num_live and not client._prefills._by_request and not client._prefills._sources
    assert not any(router._routed for router in client._routers)


@pytest.fixture(scope="module")
def options(cut: str) -> dict[str, Any]:
    return {"model": cut, "dtype": "float32", "device": "cpu", "kv_cache_memory": 2**28}


@pytest.fixture(scope="module")
def expected(options: dict[str, Any]) -> Answers:
    """What one engine answers."""
    return answers_of(LLM(**options), ASKED)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("carrier", ["auto", "tcp"])
def test_tokens_are_those_of_one_engine(carrier: Any, options: dict[str, Any], expected: Answers) -> None:
    async def test() -> None:
        llm = AsyncLLM(roles="prefill=1,decode=1", **options)
        for replica in llm._client.replicas:
            assert replica._spec.blocks is not None
            replica._spec.blocks.carrier = carrier
        async with asyncio.timeout(100), llm:
            client = llm._client
            assert await answers(llm, ASKED) == expected
            outcomes = client.prefill_outcomes
            assert outcomes["elsewhere"] > 5 and not outcomes["aborted"], "a slow machine may not wait for all"
            assert sum(outcomes.values()) == len(expected)
            decode, prefill = client.replicas
            assert decode.stats.tiers.num_moved_in_blocks > 40, "blocks came from there"
            assert prefill.stats.batch.prompt_tokens > 0 and decode.stats.transfers.block_s > 0.0
            await check_nothing_left(client)

    asyncio.run(test())


@pytest.mark.usefixtures("elsewhere")
def test_tokens_do_not_depend_on_deaths(options: dict[str, Any], expected: Answers) -> None:
    """Of a replica that computes prompts, and of one that answers."""

    async def test() -> None:
        llm = AsyncLLM(roles="prefill=1,decode=2", **options)
        async with asyncio.timeout(100), llm:
            client = llm._client
            decode, _, prefill = client.replicas
            for victim in (prefill, decode):
                await all_ready(client)
                # Under another salt, nothing is there from the round before.
                salt = {"cache_salt": f"{victim.pid}"}
                asked = {name: ({**prompt, **salt}, params) for name, (prompt, params) in ASKED.items()}
                asking = asyncio.create_task(answers(llm, asked))
                if victim is prefill:
                    await until(lambda: client._prefills.num_live > 0)
                else:
                    limit = decode.stats.batch.generation_tokens + 20
                    await until(lambda limit=limit: decode.stats.batch.generation_tokens > limit)
                kill(victim)
                assert await asking == expected
                await check_nothing_left(client)
            assert client.prefill_outcomes["failed"] and client.num_resumed > 0, "it was worth the while"

    asyncio.run(test())


@pytest.mark.usefixtures("elsewhere")
def test_aborted_requests_leave_nothing(options: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    """In the queue of the prefill replica, while blocks travel, and while tokens come."""

    async def test() -> None:
        client = EngineClient(Deployment(options, roles=Roles.parse("prefill=1,decode=1"), log_level="ERROR"))
        await client.start()
        try:
            rng = random.Random(3)

            async def one(number: int) -> None:
                prompt = [rng.randrange(5, 2000) for _ in range(rng.choice([300, 900]))]
                stream = client.submit(AddRequest(f"r{number}", prompt, SamplingParams(max_tokens=50)))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(rng.random()), stream:
                        await read(stream)

            async with asyncio.timeout(100):
                await asyncio.gather(*map(one, range(24)))
                await check_nothing_left(client)
            outcomes = client.prefill_outcomes
            assert outcomes["aborted"] > 2 and sum(outcomes.values()) == 24
            last = await read(client.submit(AddRequest("last", list(range(5, 500)), SamplingParams(max_tokens=3))))
            assert last[-1].finish_reason == "length"
            await asyncio.sleep(2.5)  # an engine that is idle for a second checks itself, its slots among the rest
            assert "disagree" not in capfd.readouterr().err
        finally:
            await client.shutdown()

    asyncio.run(test())


# ---- the server -----------------------------------------------------------------------------------------------------

ASKED_OF_SERVERS = {name: ASKED[f"{name} 2"] for name in ("greedy", "seeded", "several", "stop", "penalties")}


def ask(server: ServerProcess, name: str) -> list[tuple[Any, ...]]:
    prompt, params = ASKED_OF_SERVERS[name]
    fields = ("temperature", "seed", "n", "max_tokens", "stop", "include_stop_str_in_output", "ignore_eos")
    penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    own = {each: getattr(params, each) for each in (*fields, *penalties)}
    body = {"prompt": prompt["prompt_token_ids"], "return_token_ids": True, **own}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return [(each["text"], each["token_ids"], each["finish_reason"]) for each in answer.json()["choices"]]


def generate_long(server: ServerProcess, is_over: threading.Event, started: threading.Semaphore) -> None:
    """A stream that is left in the middle."""
    body = {"prompt": "Once upon a time", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as answer:
        for number, _ in enumerate(answer.iter_lines()):
            if number == 4:
                started.release()
            if is_over.is_set():
                return


def outcomes(server: ServerProcess) -> dict[str, float]:
    text = httpx.get(f"{server.url}/metrics").text
    return {name: float(value) for name, value in re.findall(r'headway:prefills_total{.*outcome="(.+)"} (.+)', text)}


def test_a_server_with_roles_answers_as_one_engine(cut: str, expected: Answers) -> None:
    arguments = ("--model", cut, "--dtype", "float32", "--device", "cpu", "--kv-cache-memory", "512MiB")
    wanted = {name: [one[:3] for one in expected[f"{name} 2"]] for name in ASKED_OF_SERVERS}
    first, *some, before_last, last = ASKED_OF_SERVERS
    with (
        running_server(*arguments, "--no-access-log", "--roles", "prefill=1,decode=1") as server,
        ThreadPoolExecutor(16) as pool,
    ):
        metrics = httpx.get(f"{server.url}/metrics").text
        assert re.search(r'replica_role{.*replica="1",role="prefill"} 1', metrics)
        is_over, started = threading.Event(), threading.Semaphore(0)
        streams = [pool.submit(generate_long, server, is_over, started) for _ in range(6)]
        for _ in streams:
            assert started.acquire(timeout=60)
        for name in (first, *some):
            assert ask(server, name) == wanted[name]
        assert outcomes(server)["elsewhere"] >= 1, "six streams would have waited"
        asking = {name: pool.submit(ask, server, name) for name in (before_last, last)}
        os.kill(server.engine_pids[1], signal.SIGKILL)
        for name, each in asking.items():
            assert each.result() == wanted[name]
        assert httpx.get(f"{server.url}/health").status_code == 200
        is_over.set()
        for stream in streams:
            stream.result()
        server.wait_until_idle(timeout_s=60)
        assert not any("disagree" in line for line in server.log)
        assert server.terminate() == 0
