"""Headers of gateways: which field each stands for, who wins, what is refused, and why a request was dropped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from headway.server.admission.service_classes import parse_service_classes
from headway.server.api.api_errors import ApiError, overloaded, unavailable
from headway.server.api.gateway_headers import DROPPED_REASON, HEADER_FIELDS, dropped_reason
from headway.server.http.draining import shutting_down
from tests.unit.server.fake_engine import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    MESSAGES,
    NEEDED,
    RESPONSES,
    FakeEngine,
    FakeServer,
    engine_ready,
)

APIS = [CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, MESSAGES]
CLASSES = parse_service_classes(
    {"default": "standard", "classes": {"standard": {}, "premium": {"ttft_target_ms": 70, "priority": -3}}}
)


def options_after(path: str, headers: dict[str, str], **fields: Any) -> Any:
    """The options that the engine gets."""
    server = FakeServer(classes=CLASSES)
    answer = server.post(path, NEEDED[path] | fields, headers=headers)
    assert answer.status_code == 200, answer.text
    return server.engine.requests[0].options


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize(
    ("header", "value", "option", "expected"),
    [
        ("X-Vllm-Priority", "-7", "priority", -7),
        ("x-llm-d-slo-ttft-ms", "250", "ttft_target_s", 0.25),
        ("x-slo-ttft-ms", "250.5", "ttft_target_s", 0.2505),
        ("x-llm-d-slo-tpot-ms", "40", "tpot_target_s", 0.04),
        ("x-slo-tpot-ms", "40", "tpot_target_s", 0.04),
        ("x-llm-d-inference-fairness-id", "team-7", "tenant", "team-7"),
        ("x-gateway-inference-fairness-id", "team-7", "tenant", "team-7"),
        ("x-llm-d-inference-objective", "premium", "ttft_target_s", 0.07),
        ("x-gateway-inference-objective", "premium", "priority", -3),
        ("x-llm-d-inference-objective", "an-objective-of-the-gateway", "ttft_target_s", None),
    ],
)
def test_a_header_stands_for_a_field(path: str, header: str, value: str, option: str, expected: object) -> None:
    assert getattr(options_after(path, {header: value}), option) == expected


@pytest.mark.parametrize(
    ("headers", "fields", "option", "expected"),
    [
        ({"x-llm-d-slo-ttft-ms": "250"}, {"ttft_target_ms": 90}, "ttft_target_s", 0.09),
        ({"x-llm-d-slo-tpot-ms": "250"}, {"tpot_target_ms": 90}, "tpot_target_s", 0.09),
        ({"x-llm-d-inference-fairness-id": "a"}, {"user": "b"}, "tenant", "b"),
        ({"x-llm-d-inference-objective": "premium"}, {"service_class": "standard"}, "ttft_target_s", None),
        ({"x-vllm-priority": "5"}, {"priority": 2}, "priority", 5),  # as in vLLM
        ({"x-slo-ttft-ms": "1", "x-llm-d-slo-ttft-ms": "250"}, {}, "ttft_target_s", 0.25),  # the new name counts
        ({"x-llm-d-inference-objective": "premium", "x-llm-d-slo-ttft-ms": "9"}, {}, "ttft_target_s", 0.009),
    ],
)
def test_who_wins(headers: dict[str, str], fields: dict[str, Any], option: str, expected: object) -> None:
    assert getattr(options_after(CHAT, headers, **fields), option) == expected


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize(
    ("header", "value"),
    [
        *(("x-vllm-priority", value) for value in ("high", "1.5", "", "9" * 5000, str(2**31), "1_0", "٣")),
        *(("x-llm-d-slo-ttft-ms", value) for value in ("0", "-5", "nan", "inf", "1e3", "86400001", "5 ms")),
        ("x-slo-tpot-ms", "soon"),
        ("x-llm-d-inference-fairness-id", ""),
        ("x-gateway-inference-fairness-id", "x" * 257),
    ],
)
def test_a_wrong_value_is_named_by_its_header(path: str, header: str, value: str) -> None:
    server = FakeServer()
    answer = server.post(path, NEEDED[path], headers=[(header.encode(), value.encode())])
    assert answer.status_code == 400
    assert f"'{header}'" in answer.text and len(answer.text) < 1000
    assert path == MESSAGES or answer.json()["error"]["param"] == header
    assert not server.engine.requests


def test_a_priority_that_means_nothing_here_is_named_by_its_header() -> None:
    engine = FakeEngine()
    engine.info = engine_ready(scheduling_policy="fcfs")
    answer = FakeServer(engine).post(CHAT, NEEDED[CHAT], headers={"x-vllm-priority": "3"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "x-vllm-priority" and "--scheduling-policy priority" in error["message"]
    assert FakeServer(engine).post(CHAT, NEEDED[CHAT], headers={"x-vllm-priority": "0"}).status_code == 200


def test_the_docs_have_the_table() -> None:
    page = (Path(__file__).parents[3] / "docs" / "gateways.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(x-[\w-]+)`[^|]*\| `(\w+)`", page, re.M))
    assert rows == {each.header: each.field for each in HEADER_FIELDS}


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (overloaded("full", code="queue_full"), "rejected-saturated"),
        (overloaded("full", code="tenant_queue_full"), "rejected-saturated"),
        (unavailable("late", code="queue_timeout"), "rejected-ttl-expired"),
        (unavailable("dropped", code="shed"), "evicted-priority"),
        (shutting_down(), "rejected-shutting-down"),
        (unavailable("starting", code="engine_unavailable"), None),
        (ApiError(400, "wrong"), None),
        (ApiError(504, "long", code="request_timeout"), None),
    ],
)
def test_reasons(failure: ApiError, reason: str | None) -> None:
    assert dropped_reason(failure).get(DROPPED_REASON) == reason


def test_a_refusal_has_its_reason() -> None:
    server = FakeServer(max_queue_requests=1)
    with server.services.limits.reserve(body_bytes=0):
        answer = server.chat()
    assert answer.status_code == 429 and answer.headers[DROPPED_REASON] == "rejected-saturated"
    assert DROPPED_REASON not in server.chat().headers
    assert DROPPED_REASON not in server.chat(audio={}).headers
