"""Bad bodies, full queues, slow engines, clients that leave: a proper answer, nothing left behind."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from headway.rpc.engine_client import Health
from headway.rpc.messages import Delta
from headway.server.api.requests import CompletionRequest
from headway.server.http import asgi_io
from headway.server.http.asgi_io import decode_json
from tests.unit.server.fake_engine import JSON, FakeEngine, FakeServer, RawClient, run, until

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"   ",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"42",
        b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": Infinity}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1' + b"0" * 5000 + b"}",
        b'{"messages": [{"role": "user", "content": "Hi"}], "metadata": ' + b"[" * 100_000 + b"}",
        b'{"messages": [{"role": "user", "content": "Hi"}], "metadata": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
        b'{"messages": [{"role": "user", "content": "Hi"}], "' + b"x" * 100_000 + b'": 1}',
        b"\x00" * 100,
    ],
)
def test_bodies_that_are_no_requests(body: bytes) -> None:
    server = FakeServer()
    response = server.call("POST", CHAT, content=body, headers=JSON)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["message"] and len(error["message"]) < 500
    assert server.chat().status_code == 200


@pytest.mark.parametrize("values", [b"1," * (2**19 + 1) + b"1", b"{}," * 2**16 + b"1", b"[[]]," * 2**15 + b"1"])
def test_bodies_of_very_many_values_are_not_parsed(values: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi_io, "_decoder", lambda kind: pytest.fail("it is parsed"))
    response = FakeServer().call("POST", CHAT, content=b'{"metadata": [' + values + b"]}", headers=JSON)
    assert response.status_code == 400
    assert "opening brackets; there may be" in response.json()["error"]["message"]


def test_long_texts_may_have_many_signs() -> None:
    text = "a, b, [c], {d}" * 10_000
    assert len(decode_json(json.dumps({"prompt": text}).encode(), CompletionRequest).prompt) == len(text)


def test_large_bodies_are_413() -> None:
    server = FakeServer(max_body_bytes=2048)
    assert server.chat("x" * 3000).status_code == 413
    assert server.chat("x" * 100).status_code == 200

    async def chunks() -> Any:
        for _ in range(10):
            yield b"x" * 1000

    assert server.call("POST", CHAT, content=chunks(), headers=JSON).status_code == 413  # no content-length


async def test_a_body_that_never_comes_is_408() -> None:
    server = FakeServer(receive_timeout_s=0.01)
    client = RawClient(server.app, CHAT, HELLO)
    client._incoming.get_nowait()
    client._incoming.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
    await client.task
    assert client.sent[0]["status"] == 408


async def test_bodies_that_stay_unfinished_are_bounded_together() -> None:
    server = FakeServer(max_body_bytes=2048)
    most = {"type": "http.request", "body": b" " * 2000, "more_body": True}
    clients = []
    for _ in range(40):
        client = RawClient(server.app, CHAT, HELLO)
        client._incoming.get_nowait()
        client._incoming.put_nowait(most)
        clients.append(client)
    await until(lambda: sum(client.task.done() for client in clients) == 8)
    assert all(client.sent[0]["status"] == 429 for client in clients if client.task.done())
    assert server.services.bodies.num_bytes == 32 * 2000
    for client in clients:
        if not client.task.done():
            await client.leave()
    assert server.services.bodies.num_bytes == 0
    async with server.client() as other:
        assert (await other.post(CHAT, json=HELLO)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 3])
async def test_a_client_that_leaves_aborts_before_the_first_token_and_after(stream: bool, num_tokens: int) -> None:
    server = FakeServer(FakeEngine(manual=True))
    client = RawClient(server.app, CHAT, HELLO | {"stream": stream})
    request_id = await server.engine.asked()
    for _ in range(num_tokens):
        await server.engine.answer()
        await asyncio.sleep(0)
    await client.leave()
    assert server.engine.aborted == [request_id]
    assert (server.services.limits.num_requests, server.services.limits.num_tokens) == (0, 0)
    assert server.services.metrics.finished["abort"] == 1


async def test_a_client_that_leaves_while_its_prompt_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    server = FakeServer()
    monkeypatch.setattr(server.tokenizer, "encode", lambda *args, **options: [1] if go_on.wait(20) else [])
    client = RawClient(server.app, CHAT, {"messages": [{"role": "user", "content": "x" * 2000}]})
    await until(lambda: server.services.limits.num_requests)
    async with server.client() as other:  # a long prompt holds up nobody
        assert (await other.get("/health")).status_code == 200
    await client.leave()
    assert server.services.limits.num_requests == 0
    assert not client.sent
    go_on.set()
    await asyncio.sleep(0.01)
    assert not server.engine.requests


async def test_all_prompts_of_a_request_are_aborted_together() -> None:
    server = FakeServer(FakeEngine(manual=True))
    client = RawClient(server.app, "/v1/completions", {"prompt": ["a", "b", "c"], "stream": True})
    await server.engine.asked(3)
    await client.leave()
    assert sorted(server.engine.aborted) == sorted(request.request_id for request in server.engine.requests)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_429(stream: bool) -> None:
    server = FakeServer(FakeEngine(manual=True), max_queue_requests=2)
    first = RawClient(server.app, CHAT, HELLO | {"n": 2})
    await server.engine.asked()
    async with server.client() as client:
        refused = await client.post(CHAT, json=HELLO | {"stream": stream})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        # One of the two has its first token: there is room again.
        server.engine.push(Delta(server.engine.requests[0].request_id, text="a", token_ids=[1]))
        await until(lambda: server.services.limits.num_requests == 1)
        second = RawClient(server.app, CHAT, HELLO)
        await server.engine.asked(2)
    await first.leave()
    await second.leave()
    assert (server.services.limits.num_requests, server.services.limits.num_tokens) == (0, 0)


async def test_a_queue_full_of_tokens_is_429_before_tokenising() -> None:
    server = FakeServer(FakeEngine(manual=True), max_queue_tokens=100)
    first = RawClient(server.app, "/v1/completions", {"prompt": [1] * 90})
    await server.engine.asked()
    assert server.services.limits.num_tokens == 90
    async with server.client() as client:
        for prompt in ("x" * 400, [1] * 11):
            assert (await client.post("/v1/completions", json={"prompt": prompt})).status_code == 429
    await first.leave()
    assert server.services.limits.num_tokens == 0


def test_an_empty_queue_takes_what_exceeds_the_token_limit() -> None:
    assert FakeServer(max_queue_tokens=10).complete([1] * 50).status_code == 200


@pytest.mark.parametrize(
    ("limit", "stream", "status", "code"),
    [
        ("queue_ttl_s", False, 503, "queue_timeout"),
        ("queue_ttl_s", True, 503, "queue_timeout"),
        ("request_timeout_s", False, 504, "request_timeout"),
    ],
)
def test_times_are_limited(limit: str, stream: bool, status: int, code: str) -> None:
    server = FakeServer(FakeEngine(manual=True), **{limit: 0.02})
    response = server.chat(stream=stream)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert len(server.engine.aborted) == 1


async def test_a_stream_that_runs_out_of_time_says_so() -> None:
    server = FakeServer(FakeEngine(manual=True), queue_ttl_s=5, request_timeout_s=0.3)
    client = RawClient(server.app, CHAT, HELLO | {"stream": True})
    await server.engine.answer("a")
    await client.task
    last, done = client.body.decode().split("\n\n")[-3:-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"
    assert done == "data: [DONE]"
    assert len(server.engine.aborted) == 1


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_errors_of_the_engine_reach_the_client(num_tokens: int) -> None:
    async def scenario(stream: bool, delta: dict[str, Any]) -> tuple[int, Any]:
        server = FakeServer(FakeEngine(manual=True))
        client = RawClient(server.app, CHAT, HELLO | {"stream": stream})
        for _ in range(num_tokens):
            await server.engine.answer()
        if stream and num_tokens:
            await until(lambda: client.sent)
        server.engine.push(Delta(await server.engine.asked(), is_last=True, **delta))
        await client.task
        text = client.body.decode()
        error = text.split("\n\n")[-3].removeprefix("data: ") if stream and num_tokens else text
        return client.sent[0]["status"], json.loads(error)["error"]

    died = {"finish_reason": "error", "error": "the engine stopped; please retry", "error_status": 503}
    status, error = run(scenario(False, died))
    assert (status, error["message"]) == (503, "the engine stopped; please retry")
    status, error = run(scenario(True, died))
    assert (status, error["message"]) == (200 if num_tokens else 503, "the engine stopped; please retry")
    refused = {"finish_reason": "error", "error": "no", "error_status": 400, "error_param": "prompt"}
    status, error = run(scenario(False, refused))
    assert (status, error["param"], error["type"]) == (400, "prompt", "invalid_request_error")
    status, error = run(scenario(False, {"finish_reason": "abort"}))
    assert (status, error["code"]) == (503, "aborted")


def test_an_engine_that_is_away_is_503_and_health_says_so() -> None:
    engine = FakeEngine()
    engine.health = Health(False, "the engine stopped and is being restarted")
    server = FakeServer(engine)
    for stream in (False, True):
        response = server.chat(stream=stream)
        assert response.status_code == 503
        assert response.headers["retry-after"]
    for path in ("/health", "/ready"):
        response = server.call("GET", path)
        assert response.status_code == 503
        assert response.json()["reason"] == "the engine stopped and is being restarted"
    assert server.services.limits.num_requests == 0


def test_before_the_engine_was_ever_ready() -> None:
    engine = FakeEngine()
    engine.info = engine.stats = None
    server = FakeServer(engine)
    assert server.chat().status_code == 503
    assert server.call("GET", "/v1/models").status_code == 200
    assert server.call("GET", "/metrics").status_code == 200


def test_exception_text_never_reaches_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()
    monkeypatch.setattr(server.engine, "submit", lambda request: 1 // 0)
    response = server.chat()
    assert response.status_code == 500 and "division" not in response.text
    assert response.json()["error"]["code"] == "internal_error"
    assert server.services.limits.num_requests == 0


async def test_a_slow_reader_gets_coalesced_events() -> None:
    """Everything that came while a client was not reading leaves in one write."""
    server = FakeServer(FakeEngine(manual=True))
    client = RawClient(server.app, CHAT, HELLO | {"stream": True})
    for _ in range(99):
        await server.engine.answer()
    await server.engine.answer(finish_reason="stop", is_last=True)
    await client.task
    assert [message["type"] for message in client.sent] == ["http.response.start"] + ["http.response.body"] * 2
    assert client.body.count(b'"content":"a"') == 100
