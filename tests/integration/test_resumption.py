"""`AsyncLLM` in float32 answers as `LLM` does in this process, token for token: whatever is
asked, and also when its engine is killed and stopped."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import pytest

from headway import LLM, AsyncLLM, SamplingParams
from headway.front.replica import Replica
from headway.front.supervision import Patience
from headway.outputs import LogprobsOfOnePosition, RequestOutput
from headway.sampling_params import StructuredOutputsParams
from tests.integration.prompts import PROMPTS
from tests.unit.front.served import until

Logprobs = Sequence[LogprobsOfOnePosition | None] | None

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
    "greedy": SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True),
    "seeded": SamplingParams(max_tokens=24, temperature=0.9, seed=7),
    "filters": SamplingParams(max_tokens=20, temperature=1.1, top_p=0.9, top_k=40, min_p=0.02, seed=3),
    "penalties": SamplingParams(
        max_tokens=20, temperature=0.7, seed=5, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.2
    ),
    "several": SamplingParams(max_tokens=16, temperature=0.8, seed=11, n=3),
    "logprobs": SamplingParams(max_tokens=16, temperature=0.0, logprobs=3, prompt_logprobs=2),
    "stop": SamplingParams(max_tokens=24, temperature=0.0, stop=["the", "."], include_stop_str_in_output=True),
    "bad words": SamplingParams(max_tokens=16, temperature=0.0, bad_words=["the", "a"], min_tokens=10),
    "best_of": SamplingParams(max_tokens=10, temperature=0.8, seed=2, n=1, best_of=3),
    "json": SamplingParams(
        max_tokens=40, temperature=0.6, seed=9, structured_outputs=StructuredOutputsParams(json=SCHEMA)
    ),
}
SEARCH = SamplingParams(use_beam_search=True, n=2, best_of=3, max_tokens=6, temperature=0)
Asked = Mapping[str, tuple[Any, SamplingParams]]
"""Prompts and what is asked for, by name."""
Answers = dict[str, list[tuple[Any, ...]]]
ASKED: Asked = {f"{name} {number}": (PROMPTS[number], params) for name, params in PARAMS.items() for number in range(2)}
DEATHS = (signal.SIGSTOP, signal.SIGKILL)
"""In this order. With more of them, a request that was there each time would be taken for their cause."""


@pytest.fixture(scope="module")
def options(cut: str) -> dict[str, Any]:
    return {"model": cut, "dtype": "float32", "kv_cache_memory": 2**27}


@pytest.fixture(scope="module")
def llm(options: dict[str, Any]) -> Iterator[LLM]:
    llm = LLM(**options)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def engine(options: dict[str, Any]) -> Iterator[tuple[AsyncLLM, asyncio.Runner]]:
    """An event loop that stands still between tests, and an engine process."""
    with asyncio.Runner() as runner:
        llm = AsyncLLM(**options)
        for replica in llm._client.replicas:
            replica._watchdog.patience = Patience(hang_timeout_s=2.0)
        runner.run(llm.start())
        yield llm, runner
        runner.run(llm.shutdown())


def facts(output: RequestOutput) -> list[tuple[Any, ...]]:
    return [(one.text, list(one.token_ids), one.finish_reason, one.stop_reason) for one in output.outputs]


def answers_of(llm: LLM, asked: Asked) -> Answers:
    """What an engine in this process says."""
    prompts, params = map(list, zip(*asked.values()))
    return dict(zip(asked, map(facts, llm.generate(prompts, params)), strict=True))


async def last_of(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    *_, last = [output async for output in outputs]
    assert last.finished
    return last


async def answers(llm: AsyncLLM, asked: Asked = ASKED) -> Answers:
    found = await asyncio.gather(*(last_of(llm.generate(*each)) for each in asked.values()))
    for key, last in zip(asked, found, strict=True):
        if key.startswith("logprobs"):
            (completion,) = last.outputs
            assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)
            assert all(completion.logprobs), "none of them is missing"
            assert last.prompt_logprobs is not None and len(last.prompt_logprobs) == len(last.prompt_token_ids or ())
    return dict(zip(asked, map(facts, found), strict=True))


def test_everything_that_is_told_travels(llm: LLM, engine: tuple[AsyncLLM, asyncio.Runner]) -> None:
    """Log-probabilities, searches, prompts of tokens, conversations."""
    process, runner = engine
    kinds, messages = [PARAMS["logprobs"], SEARCH], [{"role": "user", "content": "Say hello."}]
    asked = [(prompt, kind) for kind in kinds for prompt in (PROMPTS[0], {"prompt_token_ids": [504, 6376, 281]})]

    async def ask() -> list[RequestOutput]:
        found = [last_of(process.generate(*each)) for each in asked]
        return await asyncio.gather(*found, last_of(process.chat(messages, PARAMS["logprobs"])))

    expected = [*llm.generate(*map(list, zip(*asked))), *llm.chat(messages, PARAMS["logprobs"])]
    for ours, theirs in zip(runner.run(ask()), expected, strict=True):
        assert ours.prompt == theirs.prompt and ours.prompt_token_ids == theirs.prompt_token_ids
        assert facts(ours) == facts(theirs)
        check_logprobs(ours.prompt_logprobs, theirs.prompt_logprobs)
        for own, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert own.index == other.index
            assert own.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)
            check_logprobs(own.logprobs, other.logprobs)
    info = process._client.info
    assert info is not None and (info.num_blocks, info.device) == (llm.engine.plan.num_blocks, "cpu")


def check_logprobs(ours: Logprobs, theirs: Logprobs) -> None:
    assert (ours is None) == (theirs is None)
    for here, there in zip(ours or (), theirs or (), strict=True):
        assert (here is None) == (there is None)
        for (token_id, own), (other_id, other) in zip((here or {}).items(), (there or {}).items(), strict=True):
            assert (token_id, own.rank, own.decoded_token) == (other_id, other.rank, other.decoded_token)
            assert own.logprob == pytest.approx(other.logprob, abs=1e-3)


async def kill_in_the_middle(replica: Replica) -> None:
    """Whenever a process has made some tokens."""
    for number, kind in enumerate(DEATHS):
        await until(lambda number=number: replica.num_restarts == number and replica.is_ready)
        assert replica.pid is not None
        limit = replica.stats.batch.generation_tokens + 80
        await until(lambda limit=limit: replica.stats.batch.generation_tokens > limit)
        os.kill(replica.pid, kind)


def test_answers_do_not_depend_on_deaths(llm: LLM, engine: tuple[AsyncLLM, asyncio.Runner]) -> None:
    process, runner = engine
    expected = answers_of(llm, ASKED)

    async def test() -> None:
        client = process._client
        async with asyncio.timeout(300):
            killing = asyncio.create_task(kill_in_the_middle(client.replicas[0]))
            while not killing.done():  # a quick engine may answer everything before the last death
                assert await answers(process) == expected
            await killing
            await until(lambda: client.stats.blocks.num_used_blocks == 0)
            assert client.num_open_streams == 0 and client.num_resumed > 20

    runner.run(test())
