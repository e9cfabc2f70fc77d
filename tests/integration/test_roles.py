"""Prefill and decode apart, with the embedded model in float32: the tokens are those of one engine, whatever happens to
the replica that computes prompts, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import functools
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

from headway import AsyncLLM, SamplingParams
from headway.cli.main import main
from headway.core.routing import Roles
from headway.outputs import RequestOutput
from headway.rpc import engine_client
from headway.rpc.engine_client import EngineClient
from headway.rpc.messages import AddRequest, EngineStats
from headway.sampling_params import StructuredOutputsParams
from tests.integration.server_process import ServerProcess, running_server

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
        for kind in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
            live = None
            while prefill.pid is None or live is None or not live._live or prefill.pid in deaths:
                await asyncio.sleep(0.01 + rng.random() * 0.5)
                live = llm._client._prefills
            deaths.append(prefill.pid)
            os.kill(prefill.pid, kind)

    async def test() -> None:
        llm = AsyncLLM(roles="prefill=1,decode=1", **OPTIONS)
        for replica in llm._client.replicas:
            replica._watchdog.patience = engine_client.Patience(hang_timeout_s=3.0)
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


def test_aborted_requests_leave_nothing(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """In the queue of the prefill replica, while blocks travel, and while tokens come."""
    monkeypatch.setattr(engine_client, "computes_elsewhere", always)

    async def test() -> None:
        client = EngineClient(OPTIONS, roles=Roles.parse("prefill=1,decode=1"), log_level="ERROR")
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
            await asyncio.sleep(2.5)  # an engine that is idle for a second checks itself, its slots among the rest
            assert "disagree" not in capfd.readouterr().err
        finally:
            await client.shutdown()

    asyncio.run(test())


# ---- the server -----------------------------------------------------------------------------------------------------

ARGUMENTS = ("--dtype", "float32", "--device", "cpu", "--kv-cache-memory", "512MiB", "--no-access-log")
BODIES: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 12},
    {"temperature": 0.9, "seed": 5, "max_tokens": 12},
    {"temperature": 0.7, "seed": 6, "max_tokens": 8, "n": 2},
    {"temperature": 0.0, "max_tokens": 30, "stop": [" the", ","]},
    {"temperature": 0.5, "seed": 1, "max_tokens": 30, "structured_outputs": {"json": SCHEMA}},
]


def ask(server: ServerProcess, number: int) -> list[tuple[Any, ...]]:
    """A long prompt of its own."""
    rng = random.Random(number)
    prompt = [rng.randrange(5, 2000) for _ in range(420)]
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": prompt, **BODIES[number]}, timeout=120)
    assert answer.status_code == 200, answer.text
    return [(each["text"], each["finish_reason"]) for each in answer.json()["choices"]]


def generate_long(server: ServerProcess, is_over: threading.Event, started: threading.Semaphore) -> None:
    """A stream that is left in the middle."""
    body = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as answer:
        for number, _ in enumerate(answer.iter_lines()):
            if number == 4:
                started.release()
            if is_over.is_set():
                return


def outcomes(server: ServerProcess) -> dict[str, float]:
    text = httpx.get(f"{server.url}/metrics").text
    return {name: float(value) for name, value in re.findall(r'headway:prefills_total{.*outcome="(.+)"} (.+)', text)}


def test_a_server_with_roles_answers_as_one_without() -> None:
    with running_server(*ARGUMENTS) as server, ThreadPoolExecutor(8) as pool:
        expected = list(pool.map(functools.partial(ask, server), range(len(BODIES))))
        assert not outcomes(server)
    with running_server(*ARGUMENTS, "--roles", "prefill=1,decode=1") as server, ThreadPoolExecutor(16) as pool:
        metrics = httpx.get(f"{server.url}/metrics").text
        assert re.search(r'replica_role{.*replica="1",role="prefill"} 1', metrics)
        is_over, started = threading.Event(), threading.Semaphore(0)
        streams = [pool.submit(generate_long, server, is_over, started) for _ in range(6)]
        for _ in streams:
            assert started.acquire(timeout=60)
        assert ask(server, 0) == expected[0]
        assert list(pool.map(functools.partial(ask, server), range(1, 3))) == expected[1:3]
        assert outcomes(server)["elsewhere"] >= 1, "six streams would have waited"
        asking = [pool.submit(ask, server, number) for number in range(3, len(BODIES))]
        os.kill(server.engine_pids[1], signal.SIGKILL)
        assert [each.result() for each in asking] == expected[3:]
        assert httpx.get(f"{server.url}/health").status_code == 200
        is_over.set()
        for stream in streams:
            stream.result()
        server.wait_until_idle(timeout_s=60)
        assert not any("disagree" in line for line in server.log)
        assert server.terminate() == 0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--roles", "prefill=1"), "prefill=P,decode=D"),
        (("--roles", "prefill=1,decode=0"), "prefill=P,decode=D"),
        (("--roles", "prefill=1,thinking=1"), "prefill=P,decode=D"),
        (("--roles", "prefill=1,decode=1", "--replicas", "3"), "2 replicas"),
        (("--roles", "prefill=1,decode=1", "--max-replicas", "3"), "max_replicas"),
        (("--roles", "prefill=1,decode=1", "--no-enable-prefix-caching"), "prefix cache"),
        (("--roles", "prefill=1,decode=1", "--preemption-mode", "recompute"), "recompute"),
        (("--roles", "prefill=1,decode=1", "--speculation", "draft", "--draft-model", "x"), "draft model"),
    ],
)
def test_what_does_not_go_together_is_refused(
    arguments: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--port", "0", "--device", "cpu", *arguments]) != 0
    assert why in capsys.readouterr().err
