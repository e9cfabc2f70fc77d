"""Tenants, targets and classes on their way from a request's body to the scheduler."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headway.core.request_options import RequestOptions
from headway.server.admission.service_classes import ServiceClass, ServiceClasses, parse_service_classes
from tests.unit.engine_process.scripted_channel import add, run
from tests.unit.server.fake_engine import CHAT, COMPLETIONS, FakeEngine, FakeServer, engine_ready

CLASSES = ServiceClasses(
    {
        "interactive": ServiceClass("interactive", RequestOptions(ttft_target_s=0.5, tpot_target_s=0.05, priority=-10)),
        "batch": ServiceClass("batch", RequestOptions(priority=10), max_waiting=3),
    },
    "batch",
)


def asked(server: FakeServer, **fields: Any) -> RequestOptions:
    for path in (COMPLETIONS, CHAT):
        response = server.send(path, **fields)
        assert response.status_code == 200, response.text
    by_text, by_chat = (request.options for request in server.engine.requests[-2:])
    assert by_chat == by_text
    return by_chat


def test_what_a_request_says_itself() -> None:
    request = asked(FakeServer(), user="me", ttft_target_ms=250, tpot_target_ms=12.5)
    assert (request.tenant, request.ttft_target_s, request.tpot_target_s) == ("me", 0.25, 0.0125)
    nothing = dict.fromkeys(("user", "ttft_target_ms", "tpot_target_ms", "service_class", "cache_salt", "cache_ttl_s"))
    assert asked(FakeServer(), **nothing) == RequestOptions()
    server = FakeServer()
    assert asked(server, cache_salt="team a", cache_ttl_s=60) == RequestOptions(cache_salt="team a", cache_ttl_s=60.0)
    server.complete(["one", "two"], cache_salt="team a", cache_ttl_s=60)
    assert len({request.options for request in server.engine.requests}) == 1, "every prompt has them"


@pytest.mark.parametrize("policy", ["fcfs", "fair", "slo"])
def test_hints_are_taken_whatever_the_policy(policy: str) -> None:
    engine = FakeEngine()
    engine.info = engine_ready(scheduling_policy=policy)
    request = asked(FakeServer(engine, classes=CLASSES), service_class="interactive", user="me", ttft_target_ms=9)
    assert (request.tenant, request.priority, request.ttft_target_s) == ("me", -10, 0.009)


def test_a_class_speaks_for_requests_that_do_not() -> None:
    server = FakeServer(classes=CLASSES)
    request = asked(server, service_class="interactive")
    assert (request.priority, request.ttft_target_s, request.tpot_target_s) == (-10, 0.5, 0.05)
    request = asked(server, service_class="interactive", priority=3, ttft_target_ms=800)
    assert (request.priority, request.ttft_target_s, request.tpot_target_s) == (3, 0.8, 0.05)
    request = asked(server)
    assert (request.priority, request.ttft_target_s, request.tpot_target_s) == (10, None, None)


def test_an_unknown_class_is_told_which_there_are() -> None:
    server = FakeServer(classes=CLASSES)
    assert server.chat(service_class="").json()["error"]["param"] == "service_class"
    error = server.complete(service_class="intractive").json()["error"]
    assert (error["param"], error["code"]) == ("service_class", "unknown_service_class")
    assert "Did you mean 'interactive'? The classes are: interactive, batch." in error["message"]
    assert FakeServer().complete(service_class="interactive").status_code == 400
    assert FakeServer().complete(service_class="default").status_code == 200
    assert len(server.engine.requests) == server.services.limits.num_requests == 0


def test_more_than_a_class_may_have_waiting_can_never_wait() -> None:
    server = FakeServer(classes=CLASSES)
    refused = server.complete(n=4, service_class="batch")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
    assert "at most 3" in refused.json()["error"]["message"]
    assert server.complete(n=3, service_class="batch").status_code == 200
    assert server.complete(n=4, service_class="interactive").status_code == 200


def test_the_access_log_names_the_class_where_there_are_several() -> None:
    for classes, shown in ((CLASSES, "interactive"), (parse_service_classes({"classes": {"interactive": {}}}), None)):
        server = FakeServer(classes=classes)
        lines: list[bytes] = []
        server.services.on_request_end.append(lambda record, lines=lines: lines.append(record.line()))
        server.complete(service_class="interactive")
        assert json.loads(lines[0]).get("service_class") == shown


def test_the_engine_tells_who_has_begun_before_there_is_a_token() -> None:
    """A prompt of ten tokens takes three steps of four; the second request has to wait for the seat."""
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 4}
    channel = run([add("a", [5] * 10, max_tokens=1), add("b", n=2, max_tokens=1)], [], [], [], [], [], **options)
    assert [batch.begun for batch in channel.batches[:3]] == [["a"], [], []]
    assert [delta.request_id for batch in channel.batches[:2] for delta in batch.deltas] == []
    assert sum(batch.begun.count("b") for batch in channel.batches) == 1
