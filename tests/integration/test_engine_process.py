"""The embedded model in an engine process of its own gives what it gives in this one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from headway import LLM, SamplingParams
from headway.rpc.engine_client import EngineClient
from headway.rpc.messages import AddRequest, Delta

OPTIONS = {"dtype": "float32", "quantization": "none", "num_kv_blocks": 256, "max_model_len": 1024}
PROMPTS = ["The capital of France is", "Once upon a time", "def add(a, b):", "Water boils at"]
PARAMS = {"temperature": 0.0, "max_tokens": 24}

Run = Callable[[Callable[[EngineClient], Coroutine[Any, Any, None]]], None]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(**OPTIONS)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a coroutine with a client whose engine stays over the tests of this module."""
    with asyncio.Runner() as runner:
        client = EngineClient(OPTIONS, log_level="WARNING")
        runner.run(client.start())
        yield lambda test: runner.run(test(client))
        runner.run(client.shutdown())


async def read(client: EngineClient, request: AddRequest) -> list[Delta]:
    async with client.submit(request) as stream:
        return [delta async for deltas in stream for delta in deltas]


def test_the_same_tokens_and_text_as_in_one_process(llm: LLM, run: Run) -> None:
    token_ids = [llm.get_tokenizer().encode(prompt) for prompt in PROMPTS]
    expected = [output.outputs[0] for output in llm.generate(token_ids, SamplingParams(**PARAMS))]

    async def test(client: EngineClient) -> None:
        assert client.info is not None
        assert (client.info.max_model_len, client.info.num_blocks, client.info.device) == (1024, 256, "cpu")
        requests = [
            AddRequest(f"same-{index}", prompt, SamplingParams(**PARAMS)) for index, prompt in enumerate(token_ids)
        ]
        for deltas, whole in zip(await asyncio.gather(*(read(client, request) for request in requests)), expected):
            assert "".join(delta.text for delta in deltas) == whole.text
            assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
            assert deltas[-1].finish_reason == whole.finish_reason
        assert client.stats is not None and client.stats.num_used_blocks == 0

    run(test)


def test_logprobs_travel(llm: LLM, run: Run) -> None:
    token_ids = llm.get_tokenizer().encode(PROMPTS[0])
    params = {**PARAMS, "max_tokens": 3, "logprobs": 2, "prompt_logprobs": 1}
    (whole,) = llm.generate([token_ids], SamplingParams(**params))

    async def test(client: EngineClient) -> None:
        deltas = await read(client, AddRequest("logprobs", token_ids, SamplingParams(**params)))
        found = [position for delta in deltas for position in delta.logprobs or []]
        expected = whole.outputs[0].logprobs
        assert expected is not None and len(found) == 3
        for position, known in zip(found, expected):
            assert [each.token_id for each in position] == list(known)
            assert [each.text for each in position] == [each.decoded_token for each in known.values()]
            assert [each.logprob for each in position] == pytest.approx([each.logprob for each in known.values()])
        assert deltas[0].prompt_logprobs is not None and len(deltas[0].prompt_logprobs) == len(token_ids)
        assert all(delta.prompt_logprobs is None for delta in deltas[1:])

    run(test)


def test_stop_strings_and_several_completions(llm: LLM, run: Run) -> None:
    token_ids = llm.get_tokenizer().encode(PROMPTS[0])

    async def test(client: EngineClient) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=40, stop=["."])
        deltas = await read(client, AddRequest("stop", token_ids, params))
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", ".")
        assert "." not in "".join(delta.text for delta in deltas)
        params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
        deltas = await read(client, AddRequest("many", token_ids, params))
        lengths = [sum(len(delta.token_ids) for delta in deltas if delta.index == index) for index in range(3)]
        assert lengths == [12, 12, 12] and [delta.is_last for delta in deltas].count(True) == 1

    run(test)
