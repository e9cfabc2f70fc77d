"""With the embedded model in float32: answers of engines that are killed and stopped are those of engines that are not,
token for token."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from typing import Any

import pytest

from headway import AsyncLLM, SamplingParams
from headway.outputs import RequestOutput
from headway.rpc.supervision import Patience
from headway.sampling_params import StructuredOutputsParams
from tests.integration.prompts import PROMPTS

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer"},
        "likes": {"type": "boolean"},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
PARAMS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(max_tokens=48, temperature=0.0),
    "seeded": SamplingParams(max_tokens=48, temperature=0.9, seed=7),
    "filters": SamplingParams(max_tokens=40, temperature=1.1, top_p=0.9, top_k=40, min_p=0.02, seed=3),
    "penalties": SamplingParams(
        max_tokens=40, temperature=0.7, seed=5, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.2
    ),
    "several": SamplingParams(max_tokens=30, temperature=0.8, seed=11, n=3),
    "logprobs": SamplingParams(max_tokens=30, temperature=0.0, logprobs=3, prompt_logprobs=2),
    "stop": SamplingParams(max_tokens=48, temperature=0.0, stop=["the", "."], include_stop_str_in_output=True),
    "bad words": SamplingParams(max_tokens=30, temperature=0.0, bad_words=["the", "a"], min_tokens=10),
    "best_of": SamplingParams(max_tokens=16, temperature=0.8, seed=2, n=1, best_of=3),
    "json": SamplingParams(
        max_tokens=60, temperature=0.6, seed=9, structured_outputs=StructuredOutputsParams(json=SCHEMA)
    ),
}


def facts(output: RequestOutput) -> list[tuple[Any, ...]]:
    return [(one.text, list(one.token_ids), one.finish_reason, one.stop_reason) for one in output.outputs]


async def answers(llm: AsyncLLM) -> dict[str, list[tuple[Any, ...]]]:
    async def one(name: str, number: int) -> tuple[str, list[tuple[Any, ...]], RequestOutput]:
        last: RequestOutput | None = None
        async for output in llm.generate(PROMPTS[number], PARAMS[name]):
            last = output
        assert last is not None and last.finished
        return f"{name} {number}", facts(last), last

    found = await asyncio.gather(*(one(name, number) for name in PARAMS for number in range(2)))
    for key, _, last in found:
        if key.startswith("logprobs"):
            (completion,) = last.outputs
            assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)
            assert all(completion.logprobs), "none of them is missing"
            assert last.prompt_logprobs is not None and len(last.prompt_logprobs) == len(last.prompt_token_ids or ())
    return {key: own for key, own, _ in found}


DEATHS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL)
"""In this order. With more of them, a request that was there each time would be taken for their cause."""


async def kill_at_random(llm: AsyncLLM, rng: random.Random, deaths: list[int]) -> None:
    """Whenever a process has made some tokens."""
    replicas = llm._client.replicas
    limits: dict[int, int] = {}
    while len(deaths) < len(DEATHS):
        await asyncio.sleep(0.02)
        for replica in replicas:
            pid, stats = replica.pid, replica.stats
            if pid is None or stats is None:
                continue
            limit = limits.setdefault(pid, stats.generation_tokens + rng.randrange(50, 250))
            if stats.generation_tokens > limit and pid not in deaths and len(deaths) < len(DEATHS):
                os.kill(pid, DEATHS[len(deaths)])
                deaths.append(pid)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_answers_do_not_depend_on_deaths(num_replicas: int) -> None:
    async def test() -> None:
        llm = AsyncLLM(dtype="float32", replicas=num_replicas, kv_cache_memory=2**27)
        for replica in llm._client.replicas:
            replica._watchdog.patience = Patience(hang_timeout_s=3.0)
        async with asyncio.timeout(300), llm:
            expected = await answers(llm)
            deaths: list[int] = []
            killing = asyncio.create_task(kill_at_random(llm, random.Random(num_replicas), deaths))
            try:
                assert await answers(llm) == expected
            finally:
                killing.cancel()
            assert len(deaths) == len(DEATHS), "it was worth the while"
            assert llm._client.num_open_streams == 0

    asyncio.run(test())
