"""/v1/responses and /v1/messages in the application: what reaches the engine, what is answered, what is refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.unit.server.fake_engine import MESSAGES, RESPONSES, FakeEngine, FakeServer, until


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.removesuffix("\n\n").split("\n\n")
    return [json.loads(part.partition("\ndata: ")[2]) for part in parts]


def test_a_response_takes_the_path_of_a_chat_request() -> None:
    server = FakeServer()
    fields = {"max_output_tokens": 50, "temperature": 0.25, "user": "ada", "instructions": "Be brief."}
    answer = server.send(RESPONSES, **fields).json()
    assert answer["output"][0]["content"][0]["text"] == "Hello world."
    assert answer["status"] == "completed"
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 4
    (request,) = server.engine.requests
    assert request.params is not None
    assert (request.params.max_tokens, request.params.temperature) == (50, 0.25)
    assert request.options.tenant == "ada"
    found = events(server.send(RESPONSES, stream=True))
    assert (found[0]["type"], found[-1]["type"]) == ("response.created", "response.completed")
    assert "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta") == "Hello world."
    text = server.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    assert "system\nBe brief." in text
    assert '"/v1/responses"' in server.call("GET", "/metrics").text, "counted under its own name"


def test_a_message_takes_the_path_of_a_chat_request() -> None:
    server = FakeServer()
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    fields = {"system": system, "metadata": {"user_id": "ada"}, "stop_sequences": ["END"], "top_k": 5}
    answer = server.send(MESSAGES, **fields)
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert answer.json()["content"] == [{"type": "text", "text": "Hello world."}]
    assert answer.json()["stop_reason"] == "end_turn"
    (request,) = server.engine.requests
    assert request.params is not None
    assert (request.params.max_tokens, request.params.top_k) == (50, 5)
    assert (request.options.tenant, request.options.cache_ttl_s) == ("ada", 300.0)
    start, *found, delta, stop = events(server.send(MESSAGES, stream=True))
    assert start["type"] == "message_start" and stop == {"type": "message_stop"}
    texts = [event["delta"]["text"] for event in found if event["type"] == "content_block_delta"]
    assert "".join(texts) == "Hello world."
    assert (delta["delta"]["stop_reason"], delta["usage"]["output_tokens"]) == ("end_turn", 3)


def test_errors_before_the_route_have_anthropics_form_too() -> None:
    server = FakeServer(api_key=("first",))
    refused = server.send(MESSAGES)
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert refused.json()["request_id"] == refused.headers["request-id"]
    assert server.call("GET", MESSAGES, headers={"x-api-key": "first"}).json()["type"] == "error"
    assert FakeServer().send(MESSAGES, model="other").json()["error"]["type"] == "not_found_error"


def test_a_key_in_either_header() -> None:
    server = FakeServer(api_key=("first",))
    right, wrong, other = {"x-api-key": "first"}, {"x-api-key": "wrong"}, {"authorization": "Bearer wrong"}
    statuses = [server.call("GET", "/v1/models", headers=each).status_code for each in (right, wrong, other | right)]
    assert statuses == [200, 401, 401]


@pytest.mark.parametrize(
    ("path", "name", "words"),
    [(RESPONSES, "response.failed", "It broke."), (MESSAGES, "error", '"type":"api_error","message":"It broke."')],
)
async def test_an_answer_that_fails_midway(path: str, name: str, words: str) -> None:
    server = FakeServer(FakeEngine(manual=True))
    client = server.begin(path, stream=True)
    await server.engine.answer("Hel")
    await until(lambda: client.body)
    await server.engine.answer("", finish_reason="error", error="It broke.", is_last=True)
    await client.task
    last = client.body.decode().removesuffix("\n\n").split("\n\n")[-1]
    assert last.startswith(f"event: {name}\n") and words in last
