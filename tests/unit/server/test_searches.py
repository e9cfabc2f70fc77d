"""Beam search and `best_of` over HTTP: what is asked for, refused, counted, and left behind. The engine is a fake."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from headway.outputs import SilentProgress
from headway.sampling_params import SamplingParams
from headway.wire.messages import Delta
from tests.unit.server.fake_engine import (
    BEAMS,
    BEST,
    CHAT,
    COMPLETIONS,
    SEARCHES,
    FakeEngine,
    FakeServer,
    engine_ready,
    until,
)

both = pytest.mark.parametrize("fields", SEARCHES, ids=["beams", "best of"])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2, "best_of": 5, "temperature": 0.7, "seed": 1, "top_p": 0.9},
        {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": "never", "temperature": 0},
        {**BEAMS, "early_stopping": True, "temperature": 1, "min_tokens": 2},
        {"best_of": 64, "use_beam_search": True, "stop_token_ids": [5], "ignore_eos": True},
    ],
    ids=str,
)
def test_fields_reach_the_engine_and_n_are_returned(path: str, fields: dict[str, Any]) -> None:
    server = FakeServer()
    answer = server.send(path, max_tokens=9, **fields)
    assert answer.status_code == 200, answer.text
    assert server.engine.requests[0].params == SamplingParams(max_tokens=9, **fields)
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(fields.get("n", 1)))


def test_a_search_is_no_wider_than_the_vocabulary_and_has_logprobs_only_as_best_of() -> None:
    server = FakeServer()
    for path, logprobs in ((CHAT, {"logprobs": True}), (COMPLETIONS, {"logprobs": 0})):
        answer = server.send(path, **BEST, **logprobs, max_tokens=1).json()
        assert answer["choices"][1]["logprobs"] is not None
    server.engine.info = engine_ready(vocab_size=3)
    assert server.complete([1, 2], **BEAMS).json()["error"]["param"] == "best_of"
    assert server.complete([1, 2], n=3, use_beam_search=True).status_code == 200


@both
def test_usage_counts_all_that_was_made(fields: dict[str, Any]) -> None:
    answer = FakeServer().complete(["one", "two", "three"], echo=True, **fields).json()
    words = ("one", "one", "two", "two", "three", "three")
    assert [choice["text"] for choice in answer["choices"]] == [f"{word}Hello world." for word in words]
    usage = answer["usage"]
    assert usage["completion_tokens"] == 3 * 4 * 3
    assert usage["total_tokens"] == usage["prompt_tokens"] + 36
    assert FakeServer().chat(**fields).json()["usage"]["completion_tokens"] == 4 * 3


# ---- capacity -------------------------------------------------------------------------------------------------------


def waiting(server: FakeServer) -> tuple[int, int]:
    return server.services.limits.num_requests, server.services.limits.num_tokens


@both
async def test_every_sequence_has_a_place_in_the_queue_until_it_has_started(fields: dict[str, Any]) -> None:
    server = FakeServer(FakeEngine(manual=True), max_queue_requests=8)
    first = server.begin(COMPLETIONS, prompt=[[1, 2, 3], [4, 5]], **fields)
    await server.engine.asked(2)
    one, other = (request.request_id for request in server.engine.requests)
    assert waiting(server) == (8, 5)
    async with server.client() as client:
        assert (await client.post(COMPLETIONS, json={"prompt": "a"})).status_code == 429
    server.engine.push(Delta(one, progress=SilentProgress(num_started=1, num_tokens=1)))
    await until(lambda: waiting(server) == (7, 2))
    server.engine.push(Delta(one, progress=SilentProgress(num_started=3, num_tokens=4)))
    await until(lambda: waiting(server) == (4, 2))
    server.engine.push(Delta(other, progress=SilentProgress(num_started=4, num_tokens=4)))
    await until(lambda: waiting(server) == (0, 0))
    for request_id in (one, other):
        server.engine.push(Delta(request_id, progress=SilentProgress(num_started=0, num_tokens=4)))
        for index in range(2):
            is_last = index == 1
            server.engine.push(Delta(request_id, index, "ab", [1, 2], finish_reason="length", is_last=is_last))
    await first.task
    answer = json.loads(first.body)
    assert [choice["text"] for choice in answer["choices"]] == ["ab"] * 4
    assert answer["usage"]["completion_tokens"] == 1 + 4 + 4 + 4 + 4
    assert waiting(server) == (0, 0)


def test_more_sequences_than_can_ever_wait_are_refused() -> None:
    server = FakeServer(max_queue_requests=8)
    assert server.complete(["a", "b"], **BEAMS).status_code == 200
    for fields in (BEAMS, BEST):
        assert server.complete(["a", "b", "c"], **fields).json()["error"]["param"] == "best_of"
    assert server.complete("a", n=9, use_beam_search=True).json()["error"]["param"] == "n"


@both
@pytest.mark.parametrize("num_steps", [0, 3])
async def test_a_client_that_leaves_ends_all(fields: dict[str, Any], num_steps: int) -> None:
    server = FakeServer(FakeEngine(manual=True))
    records: list[Any] = []
    server.services.on_request_end.append(records.append)
    client = server.begin(COMPLETIONS, prompt=["a", "b"], **fields)
    await server.engine.asked(2)
    for step in range(num_steps):
        server.engine.push(Delta(server.engine.requests[0].request_id, progress=SilentProgress(0 if step else 4, 4)))
        await asyncio.sleep(0)
    await client.leave()
    assert sorted(server.engine.aborted) == sorted(request.request_id for request in server.engine.requests)
    assert waiting(server) == (0, 0)
    assert server.services.metrics.finished["abort"] == 4
    assert records[0].num_output_tokens == 4 * num_steps


@both
def test_metrics_and_the_access_log(fields: dict[str, Any]) -> None:
    server = FakeServer()
    lines: list[Any] = []
    server.services.on_request_end.append(lambda record: lines.append(json.loads(record.line())))
    server.complete([1, 2], **fields)
    metrics = server.services.metrics
    assert sum(metrics.time_to_first_token.counts) == 4
    assert sum(metrics.inter_token_latency.counts) == sum(metrics.time_per_output_token.counts) == 0
    assert (sum(metrics.generation_length.counts), metrics.generation_length.total) == (2, 6)
    assert (sum(metrics.e2e_latency.counts), metrics.finished["stop"]) == (2, 2)
    assert (lines[0]["completion_tokens"], lines[0]["finish_reasons"]) == (12, ["stop", "stop"])
    assert lines[0]["first_token_ms"] <= lines[0]["duration_ms"]


def test_the_description_has_the_fields() -> None:
    schemas = FakeServer().call("GET", "/openapi.json").json()["components"]["schemas"]
    for name in ("ChatCompletionRequest", "CompletionRequest"):
        fields = schemas[name]["properties"]
        for field, kind in (("best_of", "integer"), ("use_beam_search", "boolean"), ("length_penalty", "number")):
            assert {"type": kind} in fields[field]["anyOf"]
        assert [part for part in fields["early_stopping"]["anyOf"] if "enum" in part] == [{"enum": ["never"]}]
    page = FakeServer().call("GET", "/docs").text.replace("&quot;", '"')
    assert '<td>early_stopping</td><td>boolean or "never"</td>' in page
