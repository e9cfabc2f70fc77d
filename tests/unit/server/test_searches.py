"""Beam search and `best_of` over HTTP: what is asked for, refused, counted, and left behind. The engine is a fake."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from headway.outputs import SilentProgress
from headway.rpc.messages import Delta
from headway.sampling_params import SamplingParams
from tests.unit.server.fake_engine import FakeEngine, FakeServer, RawClient, engine_ready, until

COMPLETIONS = "/v1/completions"
BEAMS = {"n": 2, "best_of": 4, "use_beam_search": True}
BEST = {"n": 2, "best_of": 4}
both = pytest.mark.parametrize("fields", [BEAMS, BEST], ids=["beams", "best of"])


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 3},
        {"n": 2, "best_of": 2},
        {"n": 2, "best_of": 5, "temperature": 0.7, "seed": 1, "top_p": 0.9},
        {"n": 3, "use_beam_search": True},
        {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": "never", "temperature": 0},
        {"n": 2, "best_of": 4, "use_beam_search": True, "early_stopping": True, "temperature": 1, "min_tokens": 2},
        {"best_of": 64, "use_beam_search": True, "stop_token_ids": [5], "ignore_eos": True},
    ],
    ids=str,
)
def test_fields_reach_the_engine_and_n_are_returned(endpoint: str, fields: dict[str, Any]) -> None:
    server = FakeServer()
    answer = getattr(server, endpoint)(max_tokens=9, **fields)
    assert answer.status_code == 200, answer.text
    assert server.engine.requests[0].params == SamplingParams(max_tokens=9, **fields)
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(fields.get("n", 1)))


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 1, "temperature": 0},
        {"best_of": 1, "stream": True},
        {"n": 2, "best_of": 2, "stream": True},
        {"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False, "stream": True},
        {"best_of": None, "use_beam_search": None, "length_penalty": None, "early_stopping": None, "stream": True},
    ],
    ids=str,
)
def test_what_asks_for_nothing_is_fine(fields: dict[str, Any]) -> None:
    assert FakeServer().chat(**fields).status_code == 200
    assert FakeServer().complete(**fields).status_code == 200


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 2.5}, "best_of"),
        ({"best_of": True}, "best_of"),
        ({"best_of": 10**6}, "best_of"),
        ({"best_of": 2, "temperature": 0}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({**BEAMS, "stream": True}, "use_beam_search"),
        ({"use_beam_search": True, "stream": True}, "use_beam_search"),
        ({"use_beam_search": 1}, "use_beam_search"),
        ({**BEAMS, "temperature": 0.7}, "temperature"),
        ({**BEAMS, "top_p": 0.9}, "top_p"),
        ({**BEAMS, "top_k": 4}, "top_k"),
        ({**BEAMS, "min_p": 0.1}, "min_p"),
        ({**BEAMS, "repetition_penalty": 1.1}, "repetition_penalty"),
        ({**BEAMS, "presence_penalty": 0.1}, "presence_penalty"),
        ({**BEAMS, "frequency_penalty": 0.1}, "frequency_penalty"),
        ({**BEAMS, "logit_bias": {"5": 1}}, "logit_bias"),
        ({**BEAMS, "bad_words": ["x"]}, "bad_words"),
        ({**BEAMS, "stop": "x"}, "stop"),
        ({**BEAMS, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"best_of": 2, "early_stopping": "never"}, "early_stopping"),
        ({**BEAMS, "length_penalty": 11}, "length_penalty"),
        ({**BEAMS, "early_stopping": "sometimes"}, "early_stopping"),
        ({**BEAMS, "best_of": 65}, "best_of"),
        ({"n": 65, "use_beam_search": True}, "n"),
        ({**BEAMS, "stop_token_ids": list(range(65))}, "stop_token_ids"),
    ],
    ids=str,
)
def test_what_does_not_go_is_400_with_its_name(endpoint: str, fields: dict[str, Any], param: str) -> None:
    server = FakeServer()
    response = getattr(server, endpoint)(**fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert param in error["message"]
    assert not server.engine.requests


def test_logprobs_go_with_best_of_and_not_with_beams() -> None:
    server = FakeServer()
    for call, logprobs in ((server.chat, {"logprobs": True}), (server.complete, {"logprobs": 0})):
        assert call(**BEAMS, **logprobs).json()["error"]["param"] == "logprobs"
        assert call(**BEST, **logprobs, max_tokens=1).json()["choices"][1]["logprobs"] is not None


def test_a_search_is_no_wider_than_the_vocabulary() -> None:
    server = FakeServer()
    server.engine.info = engine_ready(vocab_size=3)
    assert server.complete([1, 2], **BEAMS).json()["error"]["param"] == "best_of"
    assert server.complete([1, 2], n=3, use_beam_search=True).status_code == 200


async def test_what_the_engine_refuses_is_400() -> None:
    server = FakeServer(FakeEngine(manual=True))
    client = RawClient(server.app, COMPLETIONS, {"prompt": "a", **BEAMS})
    await server.engine.asked()
    refusal = {"finish_reason": "error", "error": "too wide", "error_status": 400, "error_param": "best_of"}
    server.engine.push(Delta(server.engine.requests[0].request_id, is_last=True, **refusal))
    await client.task
    error = json.loads(client.body)["error"]
    assert (client.sent[0]["status"], error["message"], error["param"]) == (400, "too wide", "best_of")


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
    first = RawClient(server.app, COMPLETIONS, {"prompt": [[1, 2, 3], [4, 5]], **fields})
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
async def test_a_search_that_has_started_is_not_waiting(fields: dict[str, Any]) -> None:
    """The time until a first token is limited; how long it takes from there to the end is not the same matter."""
    server = FakeServer(FakeEngine(manual=True), queue_ttl_s=0.05)
    client = RawClient(server.app, COMPLETIONS, {"prompt": "a", **fields})
    request_id = await server.engine.asked()
    server.engine.push(Delta(request_id, progress=SilentProgress(4, 4)))
    await asyncio.sleep(0.1)
    for index in range(2):
        server.engine.push(Delta(request_id, index, "ab", [1, 2], finish_reason="stop", is_last=index == 1))
    await client.task
    assert client.sent[0]["status"] == 200
    assert not server.engine.aborted


@both
@pytest.mark.parametrize(("has_started", "status"), [(False, 503), (True, 504)])
async def test_both_limits_of_time_hold(fields: dict[str, Any], has_started: bool, status: int) -> None:
    server = FakeServer(FakeEngine(manual=True), queue_ttl_s=0.03, request_timeout_s=0.08)
    client = RawClient(server.app, COMPLETIONS, {"prompt": "a", **fields})
    await server.engine.asked()
    if has_started:
        server.engine.push(Delta(server.engine.requests[0].request_id, progress=SilentProgress(4, 4)))
    await client.task
    assert client.sent[0]["status"] == status
    assert len(server.engine.aborted) == 1
    assert waiting(server) == (0, 0)


@both
@pytest.mark.parametrize("num_steps", [0, 3])
async def test_a_client_that_leaves_ends_all(fields: dict[str, Any], num_steps: int) -> None:
    server = FakeServer(FakeEngine(manual=True))
    records: list[Any] = []
    server.services.on_request_end.append(records.append)
    client = RawClient(server.app, COMPLETIONS, {"prompt": ["a", "b"], **fields})
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
        assert {"type": "integer"} in fields["best_of"]["anyOf"]
        assert {"type": "boolean"} in fields["use_beam_search"]["anyOf"]
        assert {"type": "number"} in fields["length_penalty"]["anyOf"]
        assert [part for part in fields["early_stopping"]["anyOf"] if "enum" in part] == [{"enum": ["never"]}]
    assert '<td>early_stopping</td><td>boolean or "never"</td>' in FakeServer().call("GET", "/docs").text.replace(
        "&quot;", '"'
    )
