"""/v1/responses and /v1/messages in the application: what reaches the engine, what is answered, what is refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from headway.rpc.messages import AddRequest
from headway.sampling_params import SamplingParams
from headway.server.api import jobs
from tests.unit.server.fake_engine import FakeEngine, FakeServer, RawClient, engine_ready, until

CALL = ("Let me see.\n", "<tool_call>", '\n{"name": "add", ', '"arguments": {"a"', ": 1}}\n</tool", "_call>")
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
RESPONSES_TOOL = {"type": "function", "name": "add", "parameters": PARAMETERS}
MESSAGES_TOOL = {"name": "add", "input_schema": PARAMETERS}


@pytest.fixture(autouse=True)
def constraints(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What answers must match; no engine looks at it here."""
    seen: list[dict[str, Any]] = []

    def note(params: SamplingParams, values: dict[str, Any], *, path: str) -> SamplingParams:
        seen.append(values)
        return params

    monkeypatch.setattr(jobs, "_with_structured_outputs", note)
    return seen


def server_with(*words: str, **options: Any) -> FakeServer:
    server = FakeServer(FakeEngine(words=words or ("Hello", " world", ".")), **options)
    server.engine.info = engine_ready(max_model_len=4096)
    return server


def respond(server: FakeServer, **body: Any) -> httpx.Response:
    return server.post("/v1/responses", {"input": "Hi"} | body)


def message(server: FakeServer, *, path: str = "/v1/messages", **body: Any) -> httpx.Response:
    required = {"model": "small", "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}
    headers = {"anthropic-version": "2023-06-01"}
    return server.post(path, {k: v for k, v in (required | body).items() if v is not None}, headers=headers)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.removesuffix("\n\n").split("\n\n")
    return [json.loads(part.partition("\ndata: ")[2]) for part in parts]


def only_request(server: FakeServer) -> AddRequest:
    (request,) = server.engine.requests
    return request


# ---- /v1/responses --------------------------------------------------------------------------------------------------


def test_a_response_takes_the_path_of_a_chat_request() -> None:
    server = server_with()
    answer = respond(server, max_output_tokens=50, temperature=0.25, user="ada", instructions="Be brief.").json()
    assert answer["output"][0]["content"][0]["text"] == "Hello world."
    assert answer["status"] == "completed"
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 4
    request = only_request(server)
    assert request.params is not None
    assert (request.params.max_tokens, request.params.temperature) == (50, 0.25)
    assert request.options.tenant == "ada"
    found = events(respond(server, stream=True))
    assert (found[0]["type"], found[-1]["type"]) == ("response.created", "response.completed")
    assert "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta") == "Hello world."
    text = server.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    assert "system\nBe brief." in text
    assert '"/v1/responses"' in server.call("GET", "/metrics").text, "counted under its own name"


def test_calls_in_a_response(constraints: list[dict[str, Any]]) -> None:
    server = server_with(*CALL)
    whole = respond(server, tools=[RESPONSES_TOOL]).json()
    assert [item["type"] for item in whole["output"]] == ["message", "function_call"]
    call = whole["output"][1]
    assert (call["name"], json.loads(call["arguments"])) == ("add", {"a": 1})
    streamed = events(respond(server, tools=[RESPONSES_TOOL], stream=True))
    deltas = [event["delta"] for event in streamed if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call["arguments"]
    assert [item["type"] for item in streamed[-1]["response"]["output"]] == ["message", "function_call"]
    assert len(constraints) == 2


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_no_response_is_stored(method: str) -> None:
    response = server_with().call(method, "/v1/responses/resp_1")
    assert response.status_code == 404
    assert "stores none" in response.json()["error"]["message"]
    assert server_with().call("GET", "/v1/responses/resp_1/input_items").status_code == 404


# ---- /v1/messages ---------------------------------------------------------------------------------------------------


def test_a_message_takes_the_path_of_a_chat_request() -> None:
    server = server_with()
    answer = message(
        server,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        metadata={"user_id": "ada"},
        stop_sequences=["END"],
        top_k=5,
    )
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert answer.json()["content"] == [{"type": "text", "text": "Hello world."}]
    assert answer.json()["stop_reason"] == "end_turn"
    request = only_request(server)
    assert request.params is not None
    assert (request.params.max_tokens, request.params.top_k) == (50, 5)
    assert (request.options.tenant, request.options.cache_ttl_s) == ("ada", 300.0)
    start, *found, delta, stop = events(message(server, stream=True))
    assert start["type"] == "message_start" and stop == {"type": "message_stop"}
    texts = [event["delta"]["text"] for event in found if event["type"] == "content_block_delta"]
    assert "".join(texts) == "Hello world."
    assert (delta["delta"]["stop_reason"], delta["usage"]["output_tokens"]) == ("end_turn", 3)


def test_calls_in_a_message() -> None:
    whole = message(server_with(*CALL), tools=[MESSAGES_TOOL]).json()
    assert whole["stop_reason"] == "tool_use"
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use"]
    assert whole["content"][1]["input"] == {"a": 1}
    streamed = events(message(server_with(*CALL), tools=[MESSAGES_TOOL], stream=True))
    parts = [event["delta"].get("partial_json", "") for event in streamed if event["type"] == "content_block_delta"]
    assert json.loads("".join(parts)) == {"a": 1}


def test_tokens_are_counted_as_they_are_used() -> None:
    fields = {"system": "Be brief.", "tools": [MESSAGES_TOOL]}
    server = server_with()
    usage = message(server, **fields).json()["usage"]
    counted = message(server, path="/v1/messages/count_tokens", max_tokens=None, **fields)
    assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert len(server.engine.requests) == 1, "nothing is computed for it"


def test_errors_before_the_route_have_anthropics_form_too() -> None:
    server = server_with(api_key=("first",))
    refused = message(server)
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert refused.json()["request_id"] == refused.headers["request-id"]
    assert server.call("GET", "/v1/messages", headers={"x-api-key": "first"}).json()["type"] == "error"
    assert message(server_with(), model="other").json()["error"]["type"] == "not_found_error"


def test_a_key_in_either_header() -> None:
    server = server_with(api_key=("first",))
    for headers, status in (
        ({"x-api-key": "first"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({"authorization": "Bearer first"}, 200),
        ({"authorization": "Bearer wrong", "x-api-key": "first"}, 401),
    ):
        assert server.call("GET", "/v1/models", headers=headers).status_code == status


RESPONSE = ("/v1/responses", {"input": "Hi"})
MESSAGE = ("/v1/messages", {"model": "small", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]})


@pytest.mark.parametrize(
    ("asked", "name", "words"),
    [(RESPONSE, "response.failed", "It broke."), (MESSAGE, "error", '"type":"api_error","message":"It broke."')],
)
async def test_an_answer_that_fails_midway(asked: tuple[str, dict[str, Any]], name: str, words: str) -> None:
    server = FakeServer(FakeEngine(manual=True))
    path, body = asked
    client = RawClient(server.app, path, body | {"stream": True})
    await server.engine.answer("Hel")
    await until(lambda: client.body)
    await server.engine.answer("", finish_reason="error", error="It broke.", is_last=True)
    await client.task
    last = client.body.decode().removesuffix("\n\n").split("\n\n")[-1]
    assert last.startswith(f"event: {name}\n") and words in last


@pytest.mark.parametrize("asked", [RESPONSE, MESSAGE])
async def test_a_client_that_leaves_ends_its_request(asked: tuple[str, dict[str, Any]]) -> None:
    server = FakeServer(FakeEngine(manual=True))
    client = RawClient(server.app, *asked)
    await server.engine.asked()
    await client.leave()
    assert len(server.engine.aborted) == 1
