"""Bad bodies, full queues, slow engines, clients that leave: a proper answer, nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from typing import Any

import pytest

from headway.front.engine_client import Health
from headway.outputs import SilentProgress
from headway.server.api.api_errors import ApiError
from headway.server.api.requests import CompletionRequest
from headway.server.http import asgi_io
from headway.server.http.asgi_io import BodyReader, decode_json
from headway.server.limits import LIMITS
from headway.wire.engine_stats import EngineStats
from headway.wire.messages import Delta
from tests.unit.server.fake_engine import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    HI,
    JSON,
    MESSAGES,
    RESPONSES,
    SEARCHES,
    FakeEngine,
    FakeServer,
    RawClient,
    until,
)

FIELDS = [
    *(b'temperature": NaN', b'temperature": Infinity', b'temperature": 1e999', b'cache_ttl_s": 1e999'),
    *(b'max_tokens": 1' + b"0" * 5000, b'metadata": ' + b"[" * 100_000, b"x" * 100_000 + b'": 1'),
    b'metadata": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
]


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"   ", b"{", b"[]", b"null", b'"text"', b"42", b"\x00" * 100),
        b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        *(b'{"messages": [{"role": "user", "content": "Hi"}], "%b}' % field for field in FIELDS),
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


async def test_large_bodies_have_their_turn_one_after_another() -> None:
    reader = BodyReader(max_bytes=2**20, timeout_s=1.0)
    body = json.dumps({"prompt": "x" * LIMITS.part_bytes}).encode()
    wrong = body[:-1]
    for content in [body, wrong] * LIMITS.bodies_at_once:
        with contextlib.nullcontext() if content is body else pytest.raises(ApiError, match="not valid JSON"):
            await reader.parse(content, CompletionRequest)


def part_of_a_body(server: FakeServer, data: bytes) -> RawClient:
    client = server.begin(CHAT)
    client._incoming.get_nowait()
    client._incoming.put_nowait({"type": "http.request", "body": data, "more_body": True})
    return client


async def test_a_body_that_never_comes_is_408() -> None:
    client = part_of_a_body(FakeServer(receive_timeout_s=0.01), b"{")
    await client.task
    assert client.sent[0]["status"] == 408


async def test_bodies_that_stay_unfinished_are_bounded_together() -> None:
    server = FakeServer(max_body_bytes=2048)
    clients = [part_of_a_body(server, b" " * 2000) for _ in range(40)]
    await until(lambda: sum(client.task.done() for client in clients) == 8)
    assert all(client.sent[0]["status"] == 429 for client in clients if client.task.done())
    assert server.services.bodies.num_bytes == 32 * 2000
    for client in clients:
        if not client.task.done():
            await client.leave()
    assert server.services.bodies.num_bytes == 0


@pytest.mark.parametrize(
    ("path", "fields", "number"),
    [
        *((path, {"stream": stream}, 1) for path in (CHAT, RESPONSES, MESSAGES) for stream in (False, True)),
        (COMPLETIONS, {"prompt": ["a", "b", "c"], "stream": True}, 3),
        (EMBEDDINGS, {"input": ["a", "b"]}, 2),
    ],
)
@pytest.mark.parametrize("num_tokens", [0, 3])
async def test_a_client_that_leaves_aborts_all_before_the_first_token_and_after(
    path: str, fields: dict[str, Any], number: int, num_tokens: int
) -> None:
    server = FakeServer(FakeEngine(manual=True))
    client = server.begin(path, **fields)
    await server.engine.asked(number)
    for _ in range(num_tokens):
        await server.engine.answer()
        await asyncio.sleep(0)
    await client.leave()
    assert sorted(server.engine.aborted) == sorted(request.request_id for request in server.engine.requests)
    assert (server.services.limits.num_requests, server.services.limits.num_tokens) == (0, 0)
    assert server.services.metrics.finished["abort"] == number


async def test_a_client_that_leaves_while_its_prompt_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    server = FakeServer()
    monkeypatch.setattr(server.tokenizer, "encode", lambda *args, **options: [1] if go_on.wait(20) else [])
    client = server.begin(CHAT, messages=[{"role": "user", "content": "x" * 2000}])
    await until(lambda: server.services.limits.num_requests)
    async with server.client() as other:  # a long prompt holds up nobody
        assert (await other.get("/health")).status_code == 200
    await client.leave()
    assert server.services.limits.num_requests == 0
    assert not client.sent
    go_on.set()
    await asyncio.sleep(0.01)
    assert not server.engine.requests


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_429(stream: bool) -> None:
    server = FakeServer(FakeEngine(manual=True), max_queue_requests=2)
    first = server.begin(CHAT, n=2)
    await server.engine.asked()
    async with server.client() as client:
        refused = await client.post(CHAT, json={"messages": HI, "stream": stream})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
    await server.engine.answer()  # one of the two has its first token: there is room again
    await until(lambda: server.services.limits.num_requests == 1)
    second = server.begin(CHAT)
    await server.engine.asked(2)
    await first.leave()
    await second.leave()
    assert (server.services.limits.num_requests, server.services.limits.num_tokens) == (0, 0)


async def test_a_queue_full_of_tokens_is_429_before_tokenising_unless_it_is_empty() -> None:
    server = FakeServer(FakeEngine(manual=True), max_queue_tokens=80)
    first = server.begin(COMPLETIONS, prompt=[1] * 90)
    await server.engine.asked()
    assert server.services.limits.num_tokens == 90
    async with server.client() as client:
        for prompt in ("x" * 400, [1]):
            assert (await client.post(COMPLETIONS, json={"prompt": prompt})).status_code == 429
    await first.leave()
    assert server.services.limits.num_tokens == 0


def last_error(client: RawClient) -> dict[str, Any]:
    """Of a whole answer, or of a stream's last event."""
    parts = client.body.decode().removesuffix("\n\ndata: [DONE]\n\n").split("\n\n")
    error: dict[str, Any] = json.loads(parts[-1].removeprefix("data: "))["error"]
    return error


@pytest.mark.parametrize("fields", [{}, {"stream": True}, *SEARCHES], ids=str)
@pytest.mark.parametrize("has_begun", [False, True])
async def test_the_time_until_a_first_token_and_until_the_end_is_limited(
    fields: dict[str, Any], has_begun: bool
) -> None:
    server = FakeServer(FakeEngine(manual=True), queue_ttl_s=0.1, request_timeout_s=0.25)
    client = server.begin(CHAT, **fields)
    await server.engine.asked()
    if has_begun:
        await server.engine.answer(progress=SilentProgress(4, 4) if fields in SEARCHES else None)
    await client.task
    is_streaming = has_begun and "stream" in fields
    assert client.sent[0]["status"] == (200 if is_streaming else 504 if has_begun else 503)
    assert last_error(client)["code"] == ("request_timeout" if has_begun else "queue_timeout")
    assert client.body.endswith(b"data: [DONE]\n\n") == is_streaming
    assert len(server.engine.aborted) == 1
    assert (server.services.limits.num_requests, server.services.limits.num_tokens) == (0, 0)


DIED = {"finish_reason": "error", "error": "the engine stopped; please retry", "error_status": 503}
REFUSED = {"finish_reason": "error", "error": "no", "error_status": 400, "error_param": "prompt"}


@pytest.mark.parametrize("num_tokens", [0, 2])
@pytest.mark.parametrize(
    ("stream", "delta", "status", "told"),
    [
        (False, DIED, 503, {"message": "the engine stopped; please retry"}),
        (True, DIED, 503, {"message": "the engine stopped; please retry"}),
        (False, REFUSED, 400, {"param": "prompt", "type": "invalid_request_error"}),
        (False, {"finish_reason": "abort"}, 503, {"code": "aborted"}),
    ],
)
async def test_errors_of_the_engine_reach_the_client(
    num_tokens: int, stream: bool, delta: dict[str, Any], status: int, told: dict[str, str]
) -> None:
    server = FakeServer(FakeEngine(manual=True))
    client = server.begin(CHAT, stream=stream)
    for _ in range(num_tokens):
        await server.engine.answer()
    await until(lambda: client.sent or not (stream and num_tokens))
    server.engine.push(Delta(await server.engine.asked(), is_last=True, **delta))
    await client.task
    assert client.sent[0]["status"] == (200 if stream and num_tokens else status)
    assert told.items() <= last_error(client).items()


def test_an_engine_that_is_away_is_503_and_health_says_so() -> None:
    server = FakeServer()
    server.engine.health = Health(False, "the engine stopped and is being restarted")
    for stream in (False, True):
        response = server.chat(stream=stream)
        assert response.status_code == 503 and response.headers["retry-after"]
    for method, path in (("GET", "/health"), ("GET", "/ready"), ("GET", "/ping"), ("POST", "/ping")):
        response = server.call(method, path)
        assert response.status_code == 503
        assert response.json()["reason"] == "the engine stopped and is being restarted"
    assert server.services.limits.num_requests == 0


def test_before_the_engine_was_ever_ready() -> None:
    engine = FakeEngine()
    engine.info, engine.stats = None, EngineStats()
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
    client = server.begin(CHAT, stream=True)
    for _ in range(99):
        await server.engine.answer()
    await server.engine.answer(finish_reason="stop", is_last=True)
    await client.task
    assert [message["type"] for message in client.sent] == ["http.response.start"] + ["http.response.body"] * 2
    assert client.body.count(b'"content":"a"') == 100
