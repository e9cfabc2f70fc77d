"""Endpoints under other platforms' names, and those for operators."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headway import __version__
from headway.front.engine_client import Health
from tests.unit.server.fake_engine import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    NEEDED,
    FakeServer,
    engine_ready,
    events,
)

INVOCATIONS = "/invocations"


def without_names(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, EMBEDDINGS])
def test_an_invocation_is_answered_as_its_body_wants(path: str) -> None:
    server = FakeServer()
    answer, expected = server.post(INVOCATIONS, NEEDED[path]), server.send(path)
    assert answer.status_code == expected.status_code == 200
    assert without_names(answer.json()) == without_names(expected.json())
    assert server.engine.requests[0].prompt_token_ids == server.engine.requests[1].prompt_token_ids
    headers = {"x-llm-d-slo-ttft-ms": "250"}
    assert server.post(INVOCATIONS, NEEDED[path], headers=headers).status_code == 200
    assert server.engine.requests[-1].options.ttft_target_s == 0.25
    assert 'route="/invocations"' in server.call("GET", "/metrics").text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_invocation_streams(path: str) -> None:
    server = FakeServer()
    assert len(events(server.post(INVOCATIONS, NEEDED[path] | {"stream": True}))) >= 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"text": "Hi"}, "messages"),
        ({"prompt": 7}, "prompt"),
        ({"messages": [], "prompt": "Hi"}, "prompt"),
        ({"input": "Hi", "stream": True}, "stream"),
        ([1], None),
    ],
)
def test_a_wrong_invocation_is_refused(body: Any, param: str | None) -> None:
    server = FakeServer()
    answer = server.post(INVOCATIONS, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert server.call("POST", INVOCATIONS, content=b"{}").status_code == 415
    assert not server.engine.requests


@pytest.mark.parametrize("problem", [None, "an engine hangs", "draining"])
def test_kserve_learns_what_load_balancers_learn(problem: str | None) -> None:
    server = FakeServer(api_key=("secret",), served_model_name=("org/a", "b"))
    if problem == "draining":
        server.services.drain.ask()
    elif problem is not None:
        server.engine.health = Health(False, problem)
    key = {"authorization": "Bearer secret"}
    status = 200 if problem is None else 503
    assert server.call("GET", "/v2/health/live").json() == {"live": True}, "it has no key, and none is needed"
    ready = server.call("GET", "/v2/health/ready")
    assert (ready.status_code, ready.json()["ready"]) == (status, problem is None)
    assert bool(ready.json()["reason"]) == (problem is not None)
    assert server.call("GET", "/health").status_code == status
    for name in ("org/a", "b"):
        model = server.call("GET", f"/v2/models/{name}/ready", headers=key)
        assert (model.status_code, model.json()) == (status, {"name": name, "ready": problem is None})
    described = server.call("GET", "/v2/models/org/a", headers=key).json()
    assert described == {
        "name": "org/a", "platform": f"headway-{__version__}", "versions": [], "inputs": [], "outputs": []
    }  # fmt: skip
    for path in ("/v2/models/other", "/v2/models/other/ready"):
        assert server.call("GET", path, headers=key).json()["error"]["code"] == "model_not_found"
        assert server.call("GET", path).status_code == 401


def test_admin_routes_are_off_and_the_error_names_the_flag() -> None:
    server = FakeServer()
    for method, path in (("GET", "/server_info"), ("POST", "/reset_prefix_cache")):
        error = server.call(method, path).json()["error"]
        assert error["code"] == "admin_routes_off" and "--enable-admin-routes" in error["message"]
    assert server.engine.resets == []


def test_the_settled_options_without_secrets() -> None:
    server = FakeServer(
        enable_admin_routes=True,
        api_key=("first-key", "second-key"),
        otlp_traces_endpoint="http://me:h1dden@collector:4318/v1/traces",
        max_queue_requests=7,
    )
    server.services.engine_options = {"block_size": 32}
    answer = server.call("GET", "/server_info", headers={"authorization": "Bearer first-key"})
    shown = answer.json()
    assert shown["version"] == __version__ and shown["models"] == ["small"]
    assert shown["engine"]["num_blocks"] == 100 and shown["engine_options"]["block_size"] == 32
    options = shown["server_options"]
    assert options["max_queue_requests"] == 7 and options["api_key"] == 2
    assert options["otlp_traces_endpoint"] == "http://***@collector:4318/v1/traces"
    assert not any(secret in answer.text for secret in ("first-key", "second-key", "h1dden"))
    json.dumps(shown, allow_nan=False)


@pytest.mark.parametrize(
    ("query", "with_disk"),
    [("", False), ("?reset_external=true", True), ("?reset_external=0&reset_running_requests=false", False)],
)
def test_caches_are_reset(query: str, with_disk: bool) -> None:
    server = FakeServer(enable_admin_routes=True)
    answer = server.call("POST", f"/reset_prefix_cache{query}")
    assert answer.json() == {"success": False, "num_forgotten_blocks": 5, "num_kept_blocks": 2}
    assert server.engine.resets == [with_disk]
    assert server.call("GET", "/reset_prefix_cache").status_code == 405


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?reset_running_requests=true", "reset_running_requests"),
        ("?reset_external=maybe", "reset_external"),
        ("?reset=true", "reset"),
    ],
)
def test_a_reset_that_is_not_understood_resets_nothing(query: str, param: str) -> None:
    server = FakeServer(enable_admin_routes=True)
    answer = server.call("POST", f"/reset_prefix_cache{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert server.engine.resets == []


def test_without_an_engine_or_a_cache_there_is_nothing_to_reset() -> None:
    server = FakeServer(enable_admin_routes=True)
    server.engine.info = engine_ready(prefix_caching=False)
    assert server.call("POST", "/reset_prefix_cache").json()["error"]["code"] == "prefix_caching_off"
    server.engine.info = None
    assert server.call("POST", "/reset_prefix_cache").status_code == 503
    assert server.call("GET", "/server_info").json()["engine"] == {}
