"""`AsyncLLM` against a real engine process without a model: outputs, errors, aborts, a killed engine, the end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headway import AsyncLLM, RequestOutput, SamplingParams
from headway.errors import (
    ConfigError,
    EngineUnavailableError,
    InvalidRequestError,
    ModelNotFoundError,
    RequestFailedError,
    RequestTooLargeError,
)
from tests.unit.front.served import PROMPT, expected

SLOW = "tests.unit.engine_process.small_engine:create_slow_engine"
WITHOUT_MODEL = "headway.engine_process.engine_without_model:create_engine"
LONG = SamplingParams(max_tokens=4000)


@contextlib.contextmanager
def running(runner: asyncio.Runner, factory: str = SLOW, **options: Any) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(engine_factory=factory, **options)
    runner.run(llm.start())
    try:
        yield llm
    finally:
        runner.run(llm.shutdown())


@pytest.fixture(scope="module")
def slow(runner: asyncio.Runner) -> Iterator[AsyncLLM]:
    with running(runner) as found:
        yield found


@pytest.fixture
def llm(runner: asyncio.Runner, slow: AsyncLLM) -> Iterator[AsyncLLM]:
    yield slow
    runner.run(until_idle(slow))


async def until_idle(llm: AsyncLLM) -> None:
    """Whatever a test leaves behind keeps the engine busy, and the test from ending."""
    while not llm.is_ready or llm._client.num_open_streams or _num_busy(llm):
        await asyncio.sleep(0.005)
    assert not llm._live


def _num_busy(llm: AsyncLLM) -> int:
    stats = llm._client.stats
    return stats.batch.num_running + stats.batch.num_waiting + stats.blocks.num_used_blocks


async def collect(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


# ---- outputs --------------------------------------------------------------------------------------------------------


async def test_outputs_grow_until_the_last_is_finished(llm: AsyncLLM) -> None:
    outputs = await collect(llm.generate(PROMPT, SamplingParams(max_tokens=100), "mine"))
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert [output.outputs[0].text for output in outputs] == [expected(length) for length in lengths]
    assert lengths == sorted({*lengths}) and len(lengths) > 2, (
        "outputs come while the request runs"
    )  # those that wait are given as one
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    last = outputs[-1]
    assert (last.request_id, last.prompt_token_ids, last.prompt) == ("mine", PROMPT, None)
    assert (last.outputs[0].finish_reason, len(last.outputs[0].token_ids)) == ("length", 100)
    assert last.metrics is not None and last.metrics.e2e_latency_s is not None and last.metrics.e2e_latency_s > 0.05


async def test_a_slow_reader_misses_nothing(llm: AsyncLLM) -> None:
    outputs = llm.generate(PROMPT, SamplingParams(max_tokens=100))
    first = await anext(outputs)
    while llm._client.num_open_streams:  # until the engine is done with it
        await asyncio.sleep(0.005)
    rest = await collect(outputs)
    assert len(rest) == 1 and not first.finished
    assert rest[0].outputs[0].text == expected(100) and rest[0].finished


# ---- what is wrong with a request -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "options", "param"),
    [
        ([], None, {}, "prompt"),
        ([10**6], None, {}, "prompt"),
        ([5] * 5000, None, {}, "prompt"),
        ({"nonsense": 1}, None, {}, "prompt"),
        (PROMPT, {"max_tokens": 4}, {}, "sampling_params"),
        (PROMPT, SamplingParams(stop_token_ids=[10**6]), {}, "stop_token_ids"),
        (PROMPT, None, {"priority": 0.5}, "priority"),
        (PROMPT, None, {"cache_ttl_s": -1}, "cache_ttl_s"),
        (PROMPT, None, {"ttft_target_s": 0}, "ttft_target_s"),
        (PROMPT, None, {"tenant": 3}, "tenant"),
        (PROMPT, None, {"request_id": ""}, "request_id"),
        (PROMPT, None, {"request_id": 3}, "request_id"),
    ],
)
async def test_a_wrong_request_is_refused_before_anything_runs(
    llm: AsyncLLM, prompt: Any, params: Any, options: dict[str, Any], param: str
) -> None:
    before = llm._client.stats
    with pytest.raises(InvalidRequestError) as caught:
        await collect(llm.generate(prompt, params, **options))
    assert caught.value.param == param
    assert llm._client.stats is before


async def test_two_live_requests_cannot_have_the_same_id(llm: AsyncLLM) -> None:
    first = llm.generate(PROMPT, LONG, "same")
    await anext(first)
    with pytest.raises(InvalidRequestError, match="already in use"):
        await collect(llm.generate(PROMPT, None, "same"))
    await first.aclose()
    assert (await collect(llm.generate(PROMPT, None, "same")))[-1].finished


async def test_a_step_that_fails_fails_the_request_with_what_it_had(llm: AsyncLLM) -> None:
    with pytest.raises(RequestFailedError, match="'fail-1' failed") as caught:
        await collect(llm.generate(PROMPT, SamplingParams(n=2, max_tokens=4), "fail-1"))
    assert list(caught.value.errors) == ["fail-1"] and "secret" not in str(caught.value)
    (output,) = caught.value.outputs
    assert [each.finish_reason for each in output.outputs] == ["error", "error"]
    assert (await collect(llm.generate(PROMPT)))[-1].finished


# ---- ending a request early -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["never read", "cancelled", "closed", "dropped"])
async def test_a_generator_that_is_left_aborts_its_request(llm: AsyncLLM, how: str) -> None:
    outputs = llm.generate(PROMPT, LONG)
    if how == "never read":
        await asyncio.sleep(0.01)
        assert llm._client.num_open_streams == 0
    else:
        await anext(outputs)
    if how == "cancelled":
        task = asyncio.create_task(collect(outputs))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    elif how != "dropped":
        await outputs.aclose()
    else:
        del outputs
        gc.collect()
        while llm._live:
            await asyncio.sleep(0)
    assert not llm._live and llm._client.num_open_streams == 0


@pytest.mark.parametrize("n", [1, 2])
async def test_an_aborted_request_yields_what_it_has(llm: AsyncLLM, n: int) -> None:
    outputs = llm.generate(PROMPT, SamplingParams(n=n, max_tokens=4000), "long")
    await anext(outputs)
    for request_id in ("nothing", "long"):
        await llm.abort(request_id)
    *_, last = await collect(outputs)
    assert last.finished and [each.finish_reason for each in last.outputs] == ["abort"] * n
    for each in last.outputs:
        assert 0 < len(each.token_ids) < 4000 and each.text == expected(len(each.token_ids))


async def test_a_request_can_be_aborted_before_the_engine_has_it(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_tokenise, tokenise = asyncio.Event(), llm._threads.run

    async def held(work: Callable[[], Any], *, num_chars: int) -> Any:
        await may_tokenise.wait()
        return await tokenise(work, num_chars=num_chars)

    monkeypatch.setattr(llm._threads, "run", held)
    task = asyncio.create_task(collect(llm.generate(PROMPT, LONG, "early")))
    while "early" not in llm._live:
        await asyncio.sleep(0)
    await llm.abort("early")
    may_tokenise.set()
    (output,) = await task
    assert output.finished and output.outputs[0].finish_reason == "abort" and output.outputs[0].token_ids == []


# ---- text, chat, and what the engine itself refuses -----------------------------------------------------------------


@pytest.fixture(scope="module")
def traffic_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traffic") / "log.jsonl"


@pytest.fixture(scope="module")
def with_text(runner: asyncio.Runner, traffic_log: Path) -> Iterator[AsyncLLM]:
    """With the embedded model's tokenizer."""
    learns: dict[str, Any] = {"traffic_log": traffic_log, "length_predictor": "statistics"}
    with running(runner, WITHOUT_MODEL, num_kv_blocks=64, block_size=16, **learns) as found:
        yield found


async def test_lengths_are_logged_and_learnt(with_text: AsyncLLM, traffic_log: Path) -> None:
    def mine() -> list[dict[str, Any]]:
        rows = map(json.loads, traffic_log.read_text().splitlines() if traffic_log.exists() else ())
        return [row for row in rows if row["temperature"] == 0.123]  # ends of earlier tests may be written only now

    params = SamplingParams(n=2, max_tokens=5, temperature=0.123)
    await collect(with_text.generate("Hi", params, tenant="me"))
    aborted = with_text.generate("Hi", SamplingParams(max_tokens=1000, temperature=0.123))
    await anext(aborted)
    await aborted.aclose()
    while len(ends := mine()) < 3:
        await asyncio.sleep(0.01)
    assert [each["finish_reason"] for each in ends] == ["length", "length", "abort"]
    assert [each["output_tokens"] for each in ends[:2]] == [5, 5]


async def test_text_goes_in_and_comes_out(with_text: AsyncLLM) -> None:
    *_, last = await collect(with_text.generate("The line", SamplingParams(max_tokens=12, stop=["nobody"])))
    assert last.prompt == "The line" and last.prompt_token_ids == with_text.get_tokenizer().encode("The line")
    assert last.outputs[0].finish_reason == "stop" and last.outputs[0].stop_reason == "nobody"
    assert "never stops" in last.outputs[0].text
    messages, tokenizer = [{"role": "user", "content": "Hi"}], with_text.get_tokenizer()
    *_, last = await collect(with_text.chat(messages, SamplingParams(max_tokens=2), "talk", priority=1))
    templated = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
    assert last.prompt_token_ids == templated and last.request_id == "talk" and last.finished


async def test_long_texts_are_tokenised_beside_the_event_loop(with_text: AsyncLLM) -> None:
    task = asyncio.create_task(collect(with_text.generate("word " * 200_000)))
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 100
    with pytest.raises(RequestTooLargeError):
        await task


async def test_what_the_engine_refuses_is_named_too(with_text: AsyncLLM) -> None:
    with pytest.raises(InvalidRequestError, match="has no model") as caught:
        await collect(with_text.generate("Hi", SamplingParams(logprobs=1)))
    assert caught.value.param == "logprobs"
    with pytest.raises(InvalidRequestError, match="'mine' needs up to 1107 tokens"):  # 64 blocks of 16 tokens
        await collect(with_text.generate([5] * 1100, SamplingParams(max_tokens=8), "mine"))


# ---- the engine process ---------------------------------------------------------------------------------------------


async def test_shutdown_ends_what_runs_or_lets_it_end() -> None:
    async with AsyncLLM(engine_factory=SLOW, enable_prefix_caching=False) as llm:
        process, info = llm._client.replicas[0]._process, llm._client.info
        assert process is not None and info is not None and not info.prefix_caching
        short, long = llm.generate(PROMPT, SamplingParams(max_tokens=30)), llm.generate(PROMPT, LONG)
        await asyncio.gather(anext(short), anext(long))
        ending = asyncio.create_task(llm.shutdown(drain_s=1.5))
        *_, last = await collect(short)
        assert last.outputs[0].finish_reason == "length"
        with pytest.raises(EngineUnavailableError):
            await collect(llm.generate(PROMPT))
        with pytest.raises(RequestFailedError, match="shutting down"):
            await collect(long)
        await ending
    assert await process.wait_for_exit() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    assert not llm.is_ready
    with pytest.raises(EngineUnavailableError):
        await collect(llm.generate(PROMPT))
    with pytest.raises(RuntimeError, match="only once"):
        await llm.start()


async def test_nothing_is_answered_before_the_start() -> None:
    llm = AsyncLLM()
    assert not llm.is_ready
    with pytest.raises(EngineUnavailableError, match="has not been started"):
        await collect(llm.generate(PROMPT))
    with pytest.raises(EngineUnavailableError):
        await llm.check_health()
    with pytest.raises(EngineUnavailableError):
        llm.get_tokenizer()
    await llm.shutdown()


def test_wrong_options_of_the_engine() -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        AsyncLLM(max_model_length=5)
    with pytest.raises(ConfigError, match="num_kv_blocks"):
        AsyncLLM(num_kv_blocks="many")


async def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    llm = AsyncLLM(tmp_path / "missing")
    with pytest.raises(ModelNotFoundError):
        await llm.start()
    assert llm._client.engine_pid is None
