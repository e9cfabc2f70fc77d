"""`cache_salt` and `cache_ttl_s` on their way to the engine, and salts that keys bring along."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from tests.unit.server.fake_engine import FakeEngine, FakeServer, engine_ready


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


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


def test_keys_share_where_that_was_chosen_and_a_single_one_sets_nothing_apart() -> None:
    for keys, others in ((("one", "two"), "two"), (("one",), "one")):
        server = FakeServer(api_key=keys, cache_salt_by_key=False if len(keys) > 1 else None)
        assert salts(server, (bearer("one"), None), (bearer(others), None), (bearer(others), "x")) == [None, None, "x"]


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
