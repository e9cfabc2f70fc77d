"""`cache_salt` and `cache_ttl_s` on their way to the engine, and salts that keys bring along."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from headway.core.request_options import RequestOptions
from headway.errors import ConfigError
from headway.server.server_config import ServerConfig
from tests.unit.server.fake_engine import FakeEngine, FakeServer, engine_ready


def last_request(server: FakeServer) -> RequestOptions:
    return server.engine.requests[-1].options


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("send", [FakeServer.chat, FakeServer.complete], ids=["chat", "completions"])
def test_both_fields_reach_the_engine(send: Any) -> None:
    server = FakeServer()
    assert send(server, cache_salt="team a", cache_ttl_s=60).status_code == 200
    assert (last_request(server).cache_salt, last_request(server).cache_ttl_s) == ("team a", 60.0)
    assert send(server, cache_salt=None, cache_ttl_s=None).status_code == 200
    assert (last_request(server).cache_salt, last_request(server).cache_ttl_s) == (None, 0.0)


def test_every_prompt_of_a_request_has_them() -> None:
    server = FakeServer()
    server.complete(["one", "two"], cache_salt="s", cache_ttl_s=0.5)
    asked = [request.options for request in server.engine.requests]
    assert [(options.cache_salt, options.cache_ttl_s) for options in asked] == [("s", 0.5)] * 2


@pytest.mark.parametrize("fields", [{"cache_salt": "a"}, {"cache_ttl_s": 60}])
def test_without_a_prefix_cache_both_are_refused(fields: dict[str, Any]) -> None:
    engine = FakeEngine()
    engine.info = engine_ready(prefix_caching=False)
    server = FakeServer(engine)
    error = server.chat(**fields).json()["error"]
    assert (error["param"], error["code"]) == (*fields, "unsupported_field")
    assert "--no-enable-prefix-caching" in error["message"]
    assert server.chat(cache_salt=None, cache_ttl_s=0).status_code == 200, "these ask for nothing"


# ---- salts by key ---------------------------------------------------------------------------------------------------


def salts(server: FakeServer, *calls: tuple[dict[str, str], str | None]) -> list[str | None]:
    for headers, salt in calls:
        body = {"prompt": "Hi", "cache_salt": salt}
        assert server.post("/v1/completions", body, headers=headers).status_code == 200
    return [request.options.cache_salt for request in server.engine.requests]


def test_keys_share_where_that_was_chosen() -> None:
    server = FakeServer(api_key=("one", "two"), cache_salt_by_key=False)
    assert salts(server, (bearer("one"), None), (bearer("two"), None), (bearer("two"), "x")) == [None, None, "x"]


def test_a_single_key_sets_nothing_apart() -> None:
    server = FakeServer(api_key=("one",))
    assert salts(server, (bearer("one"), None), (bearer("one"), "x")) == [None, "x"]


@pytest.mark.parametrize("options", [{}, {"cache_salt_by_key": True}])
def test_requests_with_different_keys_never_share(options: dict[str, bool]) -> None:
    server = FakeServer(api_key=("one", "two"), **options)
    basic = {"authorization": "Basic " + base64.b64encode(b"anybody:one").decode()}
    found = salts(
        server,
        (bearer("one"), None),
        (basic, None),
        (bearer("two"), None),
        (bearer("one"), "x"),
        (bearer("two"), "x"),
    )
    assert found[0] == found[1], "the same key, however it is sent"
    assert len(set(found)) == 4 and None not in found
    assert not any(key in (salt or "") for key in ("one", "two") for salt in found), "the key itself stays here"


def test_no_salt_of_ones_own_looks_like_another_keys() -> None:
    server = FakeServer(api_key=("one", "two"), cache_salt_by_key=True)
    (others,) = salts(server, (bearer("two"), None))
    assert others is not None
    assert salts(server, (bearer("one"), others), (bearer("one"), others.rstrip(":")))[1:].count(others) == 0


@pytest.mark.parametrize("options", [{"cache_salt_by_key": True}, {"cache_salt_by_key": "yes", "api_key": ("a",)}])
def test_keys_that_are_not_there_cannot_tell_requests_apart(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cache_salt_by_key"):
        ServerConfig(**options)
