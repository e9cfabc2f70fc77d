"""Optional OpenTelemetry spans: one per completion request, made at its end from the same record as the access log.

    headway serve --otlp-traces-endpoint http://collector:4318/v1/traces

A span belongs to the trace of the client's `traceparent` header (W3C), or starts a new one. Attribute names follow
OpenTelemetry's conventions for generative AI. These have no names for times inside the engine, which therefore have
vLLM's names and are in seconds. Token counts, for which vLLM has other names, have both. A thread sends the spans;
while the collector is not reachable they are dropped.

This module needs the packages of the extra `otel`.
"""

from __future__ import annotations

import time

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from headway.server.metrics.access_log import AccessRecord

EXPORT_TIMEOUT_S = 5.0
_Value = str | int | float | bool | list[str]


class RequestSpans:
    """Makes spans and hands them to an exporter."""

    def __init__(self, exporter: SpanExporter, *, model: str) -> None:
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("headway")
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    @classmethod
    def to_collector(cls, endpoint: str, *, model: str) -> RequestSpans:
        """Return an instance that sends spans as OTLP over HTTP."""
        return cls(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S), model=model)

    def export(self, record: AccessRecord) -> None:
        """Make the span of a request that has ended. Only those to generating endpoints have one."""
        operation = record.operation
        if operation is None:
            return
        duration_s = time.perf_counter() - record.started_s
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=self._propagator.extract({"traceparent": record.traceparent} if record.traceparent else {}),
            kind=SpanKind.SERVER,
            start_time=int(record.time_s * 1e9),
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.response.model": self._model,
                "gen_ai.latency.e2e": duration_s,
                **_attributes(record),
            },
        )
        if record.error is not None and not 400 <= (record.status or 0) < 500:  # 4xx is the client's fault
            span.set_status(Status(StatusCode.ERROR, record.error))
        span.end(int((record.time_s + duration_s) * 1e9))

    def close(self) -> None:
        """Send the remaining spans and stop."""
        self._provider.shutdown()


def _resource() -> Resource:
    """Return the resource of $OTEL_SERVICE_NAME and $OTEL_RESOURCE_ATTRIBUTES, named headway if they set no name."""
    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "headway"}))
    return resource


def _attributes(record: AccessRecord) -> dict[str, _Value]:
    """Return the attributes of a request's span, without those that do not apply."""
    known: dict[str, _Value | None] = {
        "gen_ai.request.id": record.request_id,
        "http.request.method": record.method,
        "http.route": record.path,
        "http.response.status_code": record.status,
        "error.type": record.error,
        "headway.disconnected": record.disconnected or None,
    }
    if record.num_prompt_tokens is not None:
        known["gen_ai.usage.input_tokens"] = known["gen_ai.usage.prompt_tokens"] = record.num_prompt_tokens
        known["gen_ai.usage.output_tokens"] = known["gen_ai.usage.completion_tokens"] = record.num_output_tokens
        known["gen_ai.response.finish_reasons"] = record.finish_reasons
    if record.first_token_s is not None:
        known["gen_ai.latency.time_to_first_token"] = record.first_token_s - record.started_s
    if record.timings is not None:
        known["gen_ai.usage.cache_read.input_tokens"] = record.timings.num_cached_tokens
        known["gen_ai.latency.time_in_queue"] = record.timings.queue_s
        known["gen_ai.latency.time_in_model_prefill"] = record.timings.prefill_s
        known["gen_ai.latency.time_in_model_decode"] = record.timings.decode_s
        known["gen_ai.latency.time_in_model_inference"] = record.timings.prefill_s + record.timings.decode_s
        known["headway.num_preemptions"] = record.timings.num_preemptions
    if record.params is not None:
        known["gen_ai.request.n"] = record.params.n
        known["gen_ai.request.max_tokens"] = record.params.max_tokens
        known["gen_ai.request.top_p"] = record.params.top_p
        known["gen_ai.request.temperature"] = record.params.temperature
    return {name: value for name, value in known.items() if value is not None}
