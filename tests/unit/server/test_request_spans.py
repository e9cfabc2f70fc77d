"""OpenTelemetry: what a span tells, to which trace it belongs, and what happens without the packages."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from headway.errors import ConfigError
from headway.server.server_config import ServerConfig
from headway.server.serving import run_server
from tests.unit.server.fake_engine import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    MESSAGES,
    NEEDED,
    RESPONSES,
    FakeEngine,
    FakeServer,
    run,
)


class Traced:
    """A server whose spans stay in memory."""

    def __init__(self, engine: FakeEngine | None = None) -> None:
        pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra 'otel' is not installed")
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        from headway.server.metrics.request_spans import RequestSpans

        self.server = FakeServer(engine)
        self._exporter = InMemorySpanExporter()
        self._spans = RequestSpans(self._exporter, model="small")
        self.server.services.on_request_end.append(self._spans.export)

    def spans(self) -> list[Any]:
        self._spans.close()
        return list(self._exporter.get_finished_spans())


def test_a_span_tells_where_the_time_went() -> None:
    traced = Traced()
    body = {"prompt": [1, 2, 3], "stream": True, "n": 1, "max_tokens": 9, "temperature": 0.5, "top_p": 0.9}
    traced.server.post(COMPLETIONS, body, headers={"x-request-id": "r1"})
    (span,) = traced.spans()
    assert span.name == "text_completion small"
    assert span.parent is None
    assert span.status.is_unset
    assert span.resource.attributes["service.name"] == "headway"
    known = dict(span.attributes)
    assert known.pop("gen_ai.latency.e2e") >= known.pop("gen_ai.latency.time_to_first_token") > 0
    assert known == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.response.model": "small",
        "gen_ai.request.id": "r1",
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 3,
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.latency.time_in_queue": 0.1,
        "gen_ai.latency.time_in_model_prefill": 0.2,
        "gen_ai.latency.time_in_model_decode": 0.3,
        "gen_ai.latency.time_in_model_inference": 0.5,
        "headway.num_preemptions": 1,
    }
    assert span.end_time > span.start_time


@pytest.mark.parametrize(
    ("path", "operation"),
    [
        *((CHAT, "chat"), (COMPLETIONS, "text_completion"), (EMBEDDINGS, "embeddings")),
        *((RESPONSES, "chat"), (MESSAGES, "chat")),
    ],
)
def test_every_endpoint_that_generates_has_spans(path: str, operation: str) -> None:
    traced = Traced()
    traced.server.send(path)
    traced.server.post("/invocations", NEEDED[path]) if path in (CHAT, COMPLETIONS, EMBEDDINGS) else None
    for span in traced.spans():
        assert span.attributes["gen_ai.operation.name"] == operation
        assert span.attributes["http.route"] in (path, "/invocations")
        assert span.attributes["gen_ai.request.n"] == 1
        assert "gen_ai.latency.time_in_model_inference" in span.attributes


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.mark.parametrize(
    ("header", "parents"),
    [
        (f"00-{TRACE}-00f067aa0ba902b7-01", ["00f067aa0ba902b7"]),
        (f"00-{TRACE}-00f067aa0ba902b7-00", []),  # a trace that is not sampled stays so
        *(
            (each, [None])
            for each in ("", "nonsense", "00-0-0-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "\xff" * 9)
        ),
    ],
)
def test_a_span_belongs_to_the_clients_trace_if_the_header_names_one(header: str, parents: list[str | None]) -> None:
    traced = Traced()
    answer = traced.server.post(COMPLETIONS, {"prompt": [1]}, headers={"traceparent": header.encode("latin-1")})
    assert answer.status_code == 200
    spans = traced.spans()
    assert [span.parent and f"{span.parent.span_id:016x}" for span in spans] == parents
    assert parents == [None] or all(f"{span.context.trace_id:032x}" == TRACE for span in spans)


def test_refusals_departures_and_failures_have_spans_and_other_routes_have_none() -> None:
    traced = Traced(FakeEngine(manual=True))
    traced.server.chat(audio={})
    traced.server.call("GET", "/health")

    async def leave() -> None:
        await traced.server.begin(COMPLETIONS).leave()

    run(leave())
    traced.server.engine.info = None
    traced.server.chat()
    refused, left, failed = traced.spans()
    assert (refused.name, refused.attributes["error.type"]) == ("chat small", "unsupported_field")
    assert refused.status.is_unset  # a fault of the client's
    assert (left.attributes["headway.disconnected"], left.attributes["http.response.status_code"]) == (True, 499)
    assert not failed.status.is_ok and not failed.status.is_unset
    assert failed.status.description == "engine_unavailable"


def test_missing_packages_are_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "headway.server.metrics.request_spans", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    config = ServerConfig(port=0, otlp_traces_endpoint="http://127.0.0.1:1/v1/traces")
    with pytest.raises(ConfigError, match="pip install .opentelemetry-sdk"):
        run_server(config, {}, lambda line: None)
