"""The official `openai` client against a real server process on the embedded model: what the engine and the whole way
to it have to do with. Fields, forms and refusals are in tests/unit/server."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from headway import LLM, BeamSearchParams, SamplingParams
from tests.integration.server_process import ServerProcess, running_server

KEY = "test-key"
MODEL = "SmolLM2-135M-Instruct"
CONTEXT = 1024
BLOCK_SIZE = 16
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0.0}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "note_person", "parameters": PERSON}}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server("--max-model-len", str(CONTEXT), environment={"HEADWAY_API_KEY": KEY}) as running:
        yield running


def test_the_engine_tells_how_long_it_takes_to_load(server: ServerProcess) -> None:
    log = "\n".join(server.log)
    assert re.search(r"libraries imported in \d+\.\d s", log) and re.search(r"weights loaded .* in \d+\.\d s", log)


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    """Typed loosely: tests send what the client's own types forbid."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The same model in this process."""
    made = LLM(max_model_len=CONTEXT)
    yield made
    made.shutdown()


def test_chat_whole_and_streamed_are_the_same(server: ServerProcess, client: Any) -> None:
    options = {**GREEDY, "messages": QUESTION, "max_tokens": 24}
    whole = client.chat.completions.create(**options)
    text = whole.choices[0].message.content
    assert "Paris" in text
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    again = client.chat.completions.create(**options)
    assert again.choices[0].message.content == text
    found = again.usage.prompt_tokens_details.cached_tokens
    assert again.usage.prompt_tokens - BLOCK_SIZE <= found < again.usage.prompt_tokens
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage == again.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    deadline = time.monotonic() + 25
    while not any(whole._request_id in line for line in server.access_log):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (record,) = (each for each in map(json.loads, server.access_log) if each["request_id"] == whole._request_id)
    assert record["completion_tokens"] == whole.usage.completion_tokens
    assert {"queue_ms", "prefill_ms", "decode_ms", "preemptions", "first_token_ms"} <= record.keys()


def test_greedy_answers_are_those_of_the_library(client: Any, llm: LLM) -> None:
    conversations = [
        QUESTION,
        [{"role": "system", "content": "You are a pirate."}, {"role": "user", "content": "Who are you?"}],
        [{"role": "user", "content": "Count to ten."}],
    ]
    expected = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=16))
    for messages, output in zip(conversations, expected, strict=True):
        answer = client.chat.completions.create(**GREEDY, messages=messages, max_tokens=16)
        assert answer.choices[0].message.content == output.outputs[0].text
        assert answer.choices[0].finish_reason == output.outputs[0].finish_reason
        assert answer.usage.prompt_tokens == len(output.prompt_token_ids)


def test_vectors_are_those_of_the_library(client: Any, llm: LLM) -> None:
    """The client asks for base64 by itself."""
    texts = ["The capital of France is Paris.", "Paris is the capital of France.", "def f(x): return x + 1"]
    answer = client.embeddings.create(model=MODEL, input=texts)
    vectors = [np.array(each.embedding) for each in answer.data]
    for vector, output in zip(vectors, llm.embed(texts), strict=True):
        np.testing.assert_allclose(vector, output.outputs.embedding, atol=2e-2)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2]
    numbers = client.embeddings.create(model=MODEL, input=texts[0], encoding_format="float", dimensions=64)
    assert len(numbers.data[0].embedding) == 64
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 20


def test_beams_and_the_best_of_several_are_those_of_the_library(client: Any, llm: LLM) -> None:
    prompt = "The capital of France is"
    best_of = SamplingParams(n=2, best_of=5, temperature=0.9, seed=11, max_tokens=8)
    (stop,) = llm.get_tokenizer().encode(".", add_special_tokens=False)
    beams, others = (
        llm.beam_search(
            prompt, BeamSearchParams(beam_width=4, max_tokens=8, length_penalty=each, stop_token_ids=[stop])
        )
        for each in (4.0, 1.0)
    )
    assert beams != others, "what was asked for makes a difference"
    (chat,) = llm.chat(QUESTION, SamplingParams(n=2, best_of=3, use_beam_search=True, max_tokens=8))
    (best,) = llm.generate(prompt, best_of)
    (all_five,) = llm.generate(prompt, SamplingParams(n=5, temperature=0.9, seed=11, max_tokens=8))

    extra = {"use_beam_search": True, "length_penalty": 4.0, "stop_token_ids": [stop]}
    answer = client.completions.create(**GREEDY, prompt=prompt, n=4, max_tokens=8, echo=True, extra_body=extra)
    assert [choice.text for choice in answer.choices] == [sequence.text for sequence in beams[0].sequences]
    assert [choice.finish_reason for choice in answer.choices] == [each.finish_reason for each in beams[0].sequences]
    assert len({choice.text for choice in answer.choices}) == 4

    extra = {"use_beam_search": True, "best_of": 3}
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, n=2, max_tokens=8, extra_body=extra)
    assert [choice.message.content for choice in answer.choices] == [each.text for each in chat.outputs]

    options = {"model": MODEL, "prompt": prompt, "temperature": 0.9, "seed": 11, "max_tokens": 8}
    answer = client.completions.create(**options, n=2, best_of=5)
    assert [choice.text for choice in answer.choices] == [each.text for each in best.outputs]
    assert [choice.text for choice in answer.choices] != [each.text for each in all_five.outputs[:2]]
    assert answer.usage.completion_tokens == sum(len(each.token_ids) for each in all_five.outputs)


def test_schemas_and_tools(client: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    options = {"model": MODEL, "messages": QUESTION, "max_tokens": 80}
    answer = client.chat.completions.create(**options, temperature=1, seed=3, response_format=form)
    person = json.loads(answer.choices[0].message.content)
    assert set(person) == {"name", "age"} and person["age"] <= 99
    called = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    deltas = [chunk.choices[0] for chunk in client.chat.completions.create(**options, **called, stream=True)]
    calls = [call for one in deltas for call in one.delta.tool_calls or ()]
    assert (calls[0].function.name, deltas[-1].finish_reason) == ("note_person", "tool_calls")
    assert set(json.loads("".join(call.function.arguments or "" for call in calls))) == {"name", "age"}


def test_sigterm_lets_running_requests_finish(server: ServerProcess, client: Any) -> None:
    """The last test: it ends the server."""
    endless: dict[str, Any] = {"prompt": "Tell me", "max_tokens": 40, "extra_body": {"ignore_eos": True}}
    streams = [client.completions.create(model=MODEL, stream=True, **endless) for _ in range(3)]
    chunks = [iter(stream) for stream in streams]
    for each in chunks:
        next(each)
    server.process.terminate()
    for each in chunks:
        assert [chunk.choices[0].finish_reason for chunk in each][-1] == "length"
    assert server.process.wait(timeout=30) == 0
