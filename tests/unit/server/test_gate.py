"""What every request passes: keys, ids, routes that do not exist, CORS, the access log."""

from __future__ import annotations

import base64
import json
import sys
import threading
from typing import Any

import pytest

from headway.server.api.openapi import OPERATIONS
from headway.server.limits import LIMITS
from headway.server.metrics import access_log
from headway.server.metrics.access_log import AccessLog, AccessRecord
from tests.unit.server.fake_engine import FakeEngine, FakeServer, RawClient, run

OPEN = {"/health", "/ready", "/ping", "/v2/health/live", "/v2/health/ready"}
ROUTES = [
    *(("GET", "/live"), ("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/"), ("GET", "/nothing")),
    *((each.method.upper(), each.path.replace("{name}", "small")) for each in OPERATIONS if each.path not in OPEN),
]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_asks_for_a_key(method: str, path: str) -> None:
    server = FakeServer(api_key=("first", "second"))
    for headers in ({}, bearer("wrong"), bearer(""), bearer("firs"), {"authorization": "first"}, bearer("é")):
        encoded = {name: value.encode("latin-1") for name, value in headers.items()}
        response = server.call(method, path, headers=encoded)
        assert response.status_code == 401
        assert response.json()["error"]["type"] == "authentication_error"
        assert response.headers["www-authenticate"]
        assert "first" not in response.text
    for key in ("first", "second"):
        assert server.call(method, path, headers=bearer(key)).status_code != 401
    assert FakeServer().call(method, path, headers=bearer("whatever")).status_code != 401, "none is asked for"


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/health"), ("HEAD", "/health"), ("GET", "/ready"), ("GET", "/ping"), ("POST", "/ping")],
)
def test_health_needs_no_key(method: str, path: str) -> None:
    assert FakeServer(api_key=("first",)).call(method, path).status_code == 200


def test_browsers_are_asked_in_their_own_way() -> None:
    server = FakeServer(api_key=("first",))
    assert server.call("GET", "/docs").headers["www-authenticate"].startswith("Basic")
    assert server.call("GET", "/v1/models").headers["www-authenticate"].startswith("Bearer")
    basic = {"authorization": "Basic " + base64.b64encode(b"anybody:first").decode()}
    assert server.call("GET", "/docs", headers=basic).status_code == 200
    assert server.call("GET", "/docs", headers={"authorization": "Basic !"}).status_code == 401


def test_request_ids_are_honoured_or_made() -> None:
    server = FakeServer()
    assert server.call("GET", "/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = [server.call("GET", "/health").headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    for bad in ("x" * 200, "a b", ""):
        assert server.call("GET", "/health", headers={"x-request-id": bad}).headers["x-request-id"] != bad
    assert server.post("/v1/completions", {}, headers={"x-request-id": "err"}).headers["x-request-id"] == "err"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/models/", 404),
        ("DELETE", "/v1/models/small", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/completions", 405),
    ],
)
def test_wrong_routes_are_error_objects(method: str, path: str, status: int) -> None:
    response = FakeServer().call(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    if path == "/v1/completions":
        assert response.json()["error"]["message"] == "'/v1/completions' takes POST, not GET."
        assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "Did you mean '/v1/chat/completions'? '/v1' is missing."),
        ("/models/small", "Did you mean '/v1/models/small'? '/v1' is missing."),
        ("/v1/v1/completions", "Did you mean '/v1/completions'? '/v1' is doubled."),
        ("/v1/v1/v1/models", "Did you mean '/v1/models'? '/v1' is doubled."),
        ("/v1/tokenize", "Did you mean '/tokenize'? It is not under '/v1'."),
        ("/v1/chat/completion", "Did you mean '/v1/chat/completions'?"),
        ("/generate", "'/v1/completions'"),  # routes of other servers
        ("/api/chat", "'/v1/chat/completions'"),
        ("/props", "'/v1/models'"),
        ("/slots/", "'/load'"),
        ("/is_sleeping", "'/health'"),
        ("/sleep", "Engines do not sleep here"),
        ("/flush_cache", "'/reset_prefix_cache'"),
        *((path, None) for path in ("/score", "/v1/rerank")),
    ],
)
def test_a_wrong_path_is_told_what_is_wrong_with_it_and_what_exists(path: str, hint: str | None) -> None:
    response = FakeServer().call("POST", path)
    message, _, others = response.json()["error"]["message"].partition(" There are: ")
    assert response.status_code == 404
    assert all(each in others for each in ("/v1/completions", "/v1/models/{name}", "/tokenize", "/health", "/metrics"))
    assert message.startswith(f"There is no '{path}' here.")
    assert (hint in message) if hint else message == f"There is no '{path}' here."
    assert len(FakeServer().call("GET", "/" + "x" * 10_000).text) < 1000


# ---- web pages ------------------------------------------------------------------------------------------------------

OWN = {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}
COMPLETION = {"prompt": "Hi"}


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_bodies_must_say_that_they_are_json(path: str, content_type: str | None) -> None:
    server = FakeServer()
    headers = {} if content_type is None else {"content-type": content_type}
    response = server.call("POST", path, content=b'{"prompt": "Hi", "tokens": [1]}', headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert "Content-Type: application/json" in response.json()["error"]["message"]
    assert not server.engine.requests


LOCAL = {"origin": "http://localhost:3000", "host": "localhost:8000"}
A_PAGE, ANY_HOST = {"origin": "https://a.example"}, {"host": "0.0.0.0"}
OWN_NAME = {"host": "me.example", "origin": "https://me.example"}
NO_CORS = [{"sec-fetch-site": site, "sec-fetch-mode": "no-cors"} for site in ("cross-site", "same-site")]


@pytest.mark.parametrize(
    ("headers", "options"),
    [
        (OWN | {"content-type": "Application/JSON; charset=utf-8"}, {}),
        ({"host": "localhost:8000", "origin": "http://localhost:8000"}, {}),
        ({"host": "[::1]:8000", "origin": "http://[::1]:8000"}, {}),
        ({"host": "LocalHost.:9", "origin": "http://localhost.:9"}, {}),
        ({"host": "127.0.0.1", "origin": "http://127.0.0.1:80"}, {}),
        (OWN_NAME, {"allowed_host": ("me.example",)}),
        (OWN_NAME, ANY_HOST),
        ({"host": "me.example"}, {"allowed_host": ("*",)}),
        (A_PAGE, {"cors_origin": ("https://a.example",)}),
        (A_PAGE, {"cors_origin": ("*",)}),
        ({"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}, {}),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, {}),
    ],
)
def test_pages_that_may_use_the_server(headers: dict[str, str], options: dict[str, Any]) -> None:
    server = FakeServer(**options, api_key=("k",))
    sent = bearer("k") | headers
    assert server.post("/v1/completions", COMPLETION, headers=sent).status_code == 200
    answer = server.call("GET", "/v1/models", headers=sent)
    assert answer.status_code == 200
    if "cors_origin" in options:
        assert answer.headers["access-control-allow-origin"] in ("https://a.example", "*")


@pytest.mark.parametrize(
    ("code", "headers", "options"),
    [
        ("origin_not_allowed", A_PAGE, {}),
        ("origin_not_allowed", {"origin": "null"}, {}),
        ("origin_not_allowed", LOCAL, {}),
        ("origin_not_allowed", {"origin": "https://b.example"}, {"cors_origin": ("https://a.example",)}),
        ("origin_not_allowed", A_PAGE, ANY_HOST),
        *(("origin_not_allowed", headers, {}) for headers in NO_CORS),
        ("host_not_allowed", {"host": "evil.example:8000", "origin": "http://evil.example:8000"}, {}),
        *(("host_not_allowed", {"host": f"{name}evil.example"}, {}) for name in ("", "localhost.", "127.0.0.1.")),
        ("host_not_allowed", {"host": "evil.example"}, ANY_HOST | {"allowed_host": ("me.example",)}),
    ],
)
def test_pages_that_may_not(code: str, headers: dict[str, str], options: dict[str, Any]) -> None:
    server = FakeServer(**options)
    for response in (
        server.post("/v1/completions", COMPLETION, headers=headers),
        *(server.call("GET", path, headers=headers) for path in ("/v1/models", "/metrics", "/live", "/health")),
    ):
        assert (response.status_code, response.json()["error"]["code"]) == (403, code)
        assert "access-control-allow-origin" not in response.headers
    assert not server.engine.requests


def test_an_allowed_page_may_ask_a_private_address() -> None:
    server = FakeServer(cors_origin=("https://a.example",), api_key=("k",))
    asked = {
        "origin": "https://a.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
        "access-control-request-private-network": "true",
    }
    response = server.call("OPTIONS", "/v1/completions", headers=asked)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://a.example"
    assert response.headers["access-control-allow-private-network"] == "true"
    assert server.call("OPTIONS", "/v1/completions", headers=asked | {"origin": "https://b.example"}).status_code == 400
    assert FakeServer().call("OPTIONS", "/v1/completions", headers=asked).status_code == 403


# ---- the access log -------------------------------------------------------------------------------------------------


def logging_server(engine: FakeEngine | None = None) -> tuple[FakeServer, list[str]]:
    server = FakeServer(engine)
    lines: list[str] = []
    server.services.on_request_end.append(lambda record: lines.append(record.line().decode()))
    return server, lines


def test_access_log_has_the_whole_story() -> None:
    server, log_lines = logging_server()
    body = {"prompt": [1, 2, 3], "user": "u", "stream": True}
    assert server.post("/v1/completions", body, headers={"x-request-id": "r1"}).status_code == 200
    (line,) = map(json.loads, log_lines)
    expected = {
        "request_id": "r1",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "stream": True,
        "user": "u",
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "cached_tokens": 4,
        "finish_reasons": ["stop"],
        "queue_ms": 100,
        "prefill_ms": 200,
        "decode_ms": 300,
        "preemptions": 1,
    }
    assert expected.items() <= {name: value for name, value in line.items() if name in expected}.items()
    assert line["first_token_ms"] <= line["duration_ms"]


def test_access_log_of_errors_and_departures() -> None:
    server, log_lines = logging_server(FakeEngine(manual=True))
    server.chat(audio={})
    server.complete(temperature=-1)

    async def leave() -> None:
        await RawClient(server.app, "/v1/completions", {"prompt": "a"}).leave()

    run(leave())
    refused, wrong, left = map(json.loads, log_lines)
    assert (refused["status"], refused["error"], refused["param"]) == (400, "unsupported_field", "audio")
    assert (wrong["status"], wrong["error"], wrong["param"]) == (400, "invalid_request_error", "temperature")
    assert (left["status"], left["disconnected"]) == (499, True)


def test_paths_with_odd_characters_make_one_line() -> None:
    server, log_lines = logging_server()
    server.call("GET", "/a%0Ab%22")
    assert json.loads(log_lines[0])["path"] == '/a\nb"'
    assert "\n" not in log_lines[0]


def test_access_log_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeServer()
    log = AccessLog()
    server.services.on_request_end.append(log.write)
    server.call("GET", "/health", headers={"x-request-id": "seen"})
    log.close()
    assert json.loads(capsys.readouterr().out)["request_id"] == "seen"


class Pipe:
    """A stdout that takes nothing until it is told to, or nothing ever again."""

    def __init__(self, error: OSError | None = None) -> None:
        self.is_open = threading.Event()
        self._error = error

    def write(self, text: str) -> None:
        self.is_open.wait()
        if self._error is not None:
            raise self._error

    def flush(self) -> None:
        pass


def test_a_reader_that_does_not_read_costs_lines_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Pipe()
    monkeypatch.setattr(sys, "stdout", pipe)
    monkeypatch.setattr(access_log, "CLOSE_S", 0.2)
    log = AccessLog()
    for _ in range(2 * LIMITS.max_queued_log_lines):
        log.write(AccessRecord("id", "GET", "/", ""))
    log.close()
    assert len(log._lines) <= LIMITS.max_queued_log_lines
    pipe.is_open.set()


def test_a_reader_that_has_left_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = Pipe(BrokenPipeError("gone"))
    pipe.is_open.set()
    monkeypatch.setattr(sys, "stdout", pipe)
    log = AccessLog()
    log.write(AccessRecord("id", "GET", "/", ""))
    log.close()
    assert "cannot be written any more: gone" in caplog.text
