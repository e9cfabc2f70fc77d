"""The official `openai` client against a real server process on the embedded model.

The server has few seats and a short queue, so that a test can fill both.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from headway import LLM, BeamSearchParams, SamplingParams
from tests.integration.server_process import ServerProcess, running_server

KEY = "test-key"
HEADERS = {"authorization": f"Bearer {KEY}"}
MODEL = "SmolLM2-135M-Instruct"
CONTEXT, SEATS, PLACES = 1024, 8, 16
BLOCK_SIZE = 16
OPTIONS = (
    *("--max-model-len", str(CONTEXT), "--max-num-seqs", str(SEATS), "--max-queue-requests", str(PLACES)),
    *("--scheduling-policy", "priority"),
)
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0.0}
ENDLESS: dict[str, Any] = {"model": MODEL, "prompt": "Tell me", "max_tokens": 900, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server(*OPTIONS, environment={"HEADWAY_API_KEY": KEY}) as running:
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


@pytest.fixture
def async_client(server: ServerProcess) -> Any:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def gauges(server: ServerProcess) -> dict[str, float]:
    return server.gauges(HEADERS)


async def until(server: ServerProcess, name: str, value: float) -> None:
    """Wait until a gauge has come so far."""
    async with asyncio.timeout(60):
        while gauges(server)[name] < value:
            await asyncio.sleep(0.01)


def wait_until_idle(server: ServerProcess) -> None:
    server.wait_until_idle(HEADERS, timeout_s=10)


# ---- chat -----------------------------------------------------------------------------------------------------------


def test_chat_whole_and_streamed_are_the_same(client: Any) -> None:
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


def test_chat_logprobs_and_choices(client: Any) -> None:
    options = {"model": MODEL, "messages": QUESTION, "n": 3, "max_tokens": 5, "seed": 1, "temperature": 1.0}
    answer = client.chat.completions.create(**options, logprobs=True, top_logprobs=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        spelt = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
        assert choice.message.content.encode() in spelt
        assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
    texts, num_logprobs = ["", "", ""], [0, 0, 0]
    for chunk in client.chat.completions.create(**options, logprobs=True, top_logprobs=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            num_logprobs[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
    assert texts == [choice.message.content for choice in answer.choices]
    assert num_logprobs == [len(choice.logprobs.content) for choice in answer.choices]


def test_the_newer_name_of_max_tokens_and_parts_of_text(client: Any) -> None:
    parts = [{"type": "text", "text": "What is the capital of France? "}, {"type": "text", "text": "Answer briefly."}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    answer = client.chat.completions.create(**GREEDY, messages=messages, max_completion_tokens=3)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (3, "length")


# ---- completions ----------------------------------------------------------------------------------------------------


def test_completions(client: Any) -> None:
    prompts = ["The capital of France is", "2 + 2 ="]
    answer = client.completions.create(**GREEDY, prompt=prompts, max_tokens=6, logprobs=2, echo=True)
    assert len(answer.choices) == 2
    assert answer.choices[0].text.startswith("The capital of France is Paris")
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.token_logprobs[0] is None and all(each <= 0 for each in logprobs.token_logprobs[1:])
    assert all(len(each) >= 2 for each in logprobs.top_logprobs[1:])
    texts = ["", ""]
    for chunk in client.completions.create(**GREEDY, prompt=prompts, max_tokens=6, echo=True, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]


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


def test_token_ids_give_the_same_as_text(server: ServerProcess, client: Any) -> None:
    prompt = "Once upon a time"
    tokens = httpx.post(f"{server.url}/tokenize", json={"prompt": prompt}, headers=HEADERS).json()["tokens"]
    by_text = client.completions.create(**GREEDY, prompt=prompt, max_tokens=8)
    by_ids = client.completions.create(**GREEDY, prompt=[tokens, tokens], max_tokens=8)
    assert [choice.text for choice in by_ids.choices] == [by_text.choices[0].text] * 2
    assert by_ids.usage.prompt_tokens == 2 * len(tokens)


def test_stop_and_seed(client: Any) -> None:
    stopped = client.completions.create(**GREEDY, prompt="One, two, three,", max_tokens=30, stop=[" five"])
    assert (stopped.choices[0].finish_reason, stopped.choices[0].stop_reason) == ("stop", " five")
    assert "five" not in stopped.choices[0].text
    first, again, other = (
        client.completions.create(model=MODEL, prompt="A story:", max_tokens=12, seed=seed).choices[0].text
        for seed in (7, 7, 8)
    )
    assert first == again != other


def test_extra_body(client: Any) -> None:
    options = {"model": MODEL, "prompt": "The sky is", "max_tokens": 8, "temperature": 1.0}
    greedy = client.completions.create(**{**options, "temperature": 0.0}, logprobs=0).choices[0]
    for extra in ({"top_k": 1}, {"min_p": 1.0}, {"top_k": 1, "repetition_penalty": 1.0, "priority": -3}):
        assert client.completions.create(**options, extra_body=extra).choices[0].text == greedy.text, extra
    forced = client.completions.create(model=MODEL, prompt="Hi", max_tokens=20, extra_body={"ignore_eos": True})
    assert (forced.usage.completion_tokens, forced.choices[0].finish_reason) == (20, "length")


def test_stop_token_ids(server: ServerProcess, client: Any) -> None:
    (four,) = httpx.post(f"{server.url}/tokenize", json={"prompt": " four"}, headers=HEADERS).json()["tokens"]
    options = {**GREEDY, "prompt": "One, two, three,", "max_tokens": 30}
    stopped = client.completions.create(**options, extra_body={"stop_token_ids": [four]})
    assert (stopped.choices[0].finish_reason, stopped.choices[0].stop_reason) == ("stop", four)
    assert stopped.usage.completion_tokens == 1


# ---- several completions of which the best are returned -------------------------------------------------------------


def test_beams_and_the_best_of_several_are_those_of_the_library(server: ServerProcess, client: Any, llm: LLM) -> None:
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
    wait_until_idle(server)


@pytest.mark.parametrize("extra", [{"use_beam_search": True}, {}], ids=["beams", "best of"])
def test_who_leaves_a_search_leaves_nothing_behind(server: ServerProcess, async_client: Any, extra: Any) -> None:
    before = gauges(server)

    async def scenario() -> None:
        async with async_client:
            options = ENDLESS | {"extra_body": {"ignore_eos": True, **extra}}
            search = asyncio.create_task(async_client.completions.create(**options, n=2, best_of=6))
            while True:  # it has started, so that it has no place in the queue any more, and runs
                now = gauges(server)
                made = now["generation_tokens_total"] - before["generation_tokens_total"]
                if made > 12 and now["num_requests_running"] == 6 and now["queue_requests"] == 0:
                    break
                assert not search.done(), search
                await asyncio.sleep(0.01)
            search.cancel()

    asyncio.run(scenario())
    after = server.wait_until_idle(HEADERS, timeout_s=10)
    tokens = httpx.post(f"{server.url}/tokenize", json={"prompt": ENDLESS["prompt"]}, headers=HEADERS).json()["tokens"]
    num_lookups = 1 if extra else 6  # of the prompt: beams that go on look up nothing that counts
    for name in ("prompt_tokens_total", "prefix_cache_queries_total"):
        assert after[name] - before[name] == num_lookups * len(tokens), name


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"extra_body": {"use_beam_search": True}, "stream": True}, "use_beam_search"),
        ({"extra_body": {"use_beam_search": True}, "temperature": 0.5}, "temperature"),
        ({"extra_body": {"length_penalty": 2.0}}, "length_penalty"),
        ({"best_of": PLACES + 1}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
    ],
    ids=str,
)
def test_searches_that_are_refused(client: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="Hi", **fields)
    assert refused.value.param == param


# ---- many at once ---------------------------------------------------------------------------------------------------


def test_async_clients_share_the_batch(async_client: Any) -> None:
    async def one(number: int, *, stream: bool) -> str:
        made = await async_client.chat.completions.create(
            **GREEDY, messages=[{"role": "user", "content": f"{number} apples"}], max_tokens=16, stream=stream
        )
        if not stream:
            return str(made.choices[0].message.content)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in made])

    async def scenario() -> None:
        async with async_client:
            together = await asyncio.gather(*(one(number, stream=number % 2 == 0) for number in range(12)))
            assert together[3] == await one(3, stream=True)
            assert together[4] == await one(4, stream=False)
            assert all(together)

    asyncio.run(scenario())


def test_a_full_queue_is_a_rate_limit_error(server: ServerProcess, async_client: Any) -> None:
    async def scenario() -> None:
        async with async_client:
            seated = await async_client.completions.create(**ENDLESS | {"prompt": ["Tell me"] * SEATS}, stream=True)
            await until(server, "num_requests_running", SEATS)  # none of them has a place in the queue
            waiting = asyncio.create_task(async_client.completions.create(**ENDLESS | {"prompt": ["Hi"] * PLACES}))
            await until(server, "queue_requests", PLACES)
            with pytest.raises(openai.RateLimitError) as refused:
                await async_client.completions.create(model=MODEL, prompt="Hi")
            assert int(refused.value.response.headers["retry-after"]) >= 1
            assert refused.value.code == "queue_full"
            waiting.cancel()
            await seated.close()

    asyncio.run(scenario())
    wait_until_idle(server)


def test_a_smaller_priority_number_goes_first(server: ServerProcess, async_client: Any) -> None:
    done: list[int] = []

    async def one(priority: int) -> None:
        await async_client.completions.create(**GREEDY, prompt="Hi", max_tokens=4, extra_body={"priority": priority})
        done.append(priority)

    async def scenario() -> None:
        async with async_client:
            seated = await async_client.completions.create(
                **ENDLESS | {"prompt": ["Tell me"] * (SEATS - 1)}, stream=True
            )
            last_seat = await async_client.completions.create(**ENDLESS, stream=True)
            await until(server, "num_requests_running", SEATS)
            waiting = []
            for count, priority in enumerate((5, 0, -5), start=1):
                waiting.append(asyncio.create_task(one(priority)))
                await until(server, "num_requests_waiting", count)
            await last_seat.close()  # the only seat that becomes free
            await asyncio.gather(*waiting)
            await seated.close()

    asyncio.run(scenario())
    assert done == [-5, 0, 5]
    wait_until_idle(server)


# ---- what goes wrong ------------------------------------------------------------------------------------------------


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "note_person", "parameters": PERSON}}
REMOTE = {"type": "json_schema", "json_schema": {"name": "remote", "schema": {"$ref": "http://127.0.0.1/schema"}}}


def test_an_answer_fits_its_schema(client: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=80, temperature=1, seed=3, response_format=form
    )
    person = json.loads(answer.choices[0].message.content)
    assert set(person) == {"name", "age"} and person["age"] <= 99


@pytest.mark.parametrize("streams", [False, True])
def test_a_tool_is_called(client: Any, streams: bool) -> None:
    called = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    answer = client.chat.completions.create(**GREEDY, **called, messages=QUESTION, max_tokens=80, stream=streams)
    if streams:
        deltas = [chunk.choices[0] for chunk in answer if chunk.choices]
        calls = [call for one in deltas for call in one.delta.tool_calls or ()]
        name, arguments = calls[0].function.name, "".join(call.function.arguments or "" for call in calls)
        reason = deltas[-1].finish_reason
    else:
        (call,) = answer.choices[0].message.tool_calls
        name, arguments, reason = call.function.name, call.function.arguments, answer.choices[0].finish_reason
    assert (name, reason) == ("note_person", "tool_calls")
    assert set(json.loads(arguments)) == {"name", "age"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"response_format": REMOTE}, "response_format.json_schema.schema.$ref"),
        ({"temperature": -1}, "temperature"),
        ({"n": 10**6}, "n"),
        ({"extra_body": {"top_kk": 3}}, "top_kk"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None),
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, "messages"),
    ],
)
def test_bad_requests_name_the_field(client: Any, fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{"model": MODEL, "messages": QUESTION} | fields)
    assert refused.value.param == (param or "messages[0].content[0].type")
    assert refused.value.type == "invalid_request_error"


def test_errors_are_the_clients_own_classes(server: ServerProcess, client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="other", prompt="Hi")
    assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model=MODEL, prompt="word " * 2000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as suffix:
        client.completions.create(model=MODEL, prompt="Hi", suffix="there")
    assert suffix.value.param == "suffix"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).models.list()


def test_a_client_that_loses_patience_leaves_nothing_behind(server: ServerProcess, client: Any) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(**ENDLESS, timeout=0.3)
    wait_until_idle(server)


def test_a_stream_that_is_closed_frees_its_blocks(server: ServerProcess, client: Any) -> None:
    stream = client.completions.create(**ENDLESS, stream=True)
    next(iter(stream))
    assert gauges(server)["num_requests_running"] == 1
    stream.close()
    wait_until_idle(server)


# ---- around it ------------------------------------------------------------------------------------------------------


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_request_ids_travel_and_are_logged(server: ServerProcess, client: Any) -> None:
    assert httpx.get(f"{server.url}/health").json()["status"] == "ok"
    mine = client.completions.with_raw_response.create(
        model=MODEL, prompt="Hi", max_tokens=2, extra_headers={"x-request-id": "find-me"}
    )
    assert mine.headers["x-request-id"] == "find-me"
    theirs = client.completions.create(model=MODEL, prompt="Hi", max_tokens=2)
    deadline = time.monotonic() + 5
    while not all(any(name in line for line in server.access_log) for name in ("find-me", theirs._request_id)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    records = {record["request_id"]: record for record in map(json.loads, server.access_log)}
    assert records["find-me"]["completion_tokens"] == 2
    assert {"queue_ms", "prefill_ms", "decode_ms", "preemptions", "first_token_ms"} <= records["find-me"].keys()


def test_sigterm_lets_running_requests_finish(server: ServerProcess, client: Any) -> None:
    """The last test: it ends the server."""
    streams = [client.completions.create(**ENDLESS | {"max_tokens": 40}, stream=True) for _ in range(3)]
    chunks = [iter(stream) for stream in streams]
    for each in chunks:
        next(each)
    server.process.terminate()
    for each in chunks:
        assert [chunk.choices[0].finish_reason for chunk in each][-1] == "length"
    assert server.process.wait(timeout=30) == 0
