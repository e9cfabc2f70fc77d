"""Describes the API: as an OpenAPI document made from the records, and as a self-contained HTML page."""

from __future__ import annotations

import functools
import html
import re
from dataclasses import dataclass
from typing import Any

import msgspec
import msgspec.inspect

from headway import __version__
from headway.server.api.admin_routes import CacheResetOutcome, ServerInfo
from headway.server.api.api_errors import ErrorResponse
from headway.server.api.gateway_routes import ModelMetadata, ModelReady, ServerLive, ServerReady
from headway.server.api.message_errors import MessageError
from headway.server.api.message_events import Message, TokenCount
from headway.server.api.messages_api import CountTokensRequest, MessagesRequest
from headway.server.api.record_fields import ApiRecord
from headway.server.api.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from headway.server.api.response_events import InputTokenCount, ResponseObject
from headway.server.api.response_models import (
    ChatCompletion,
    Completion,
    DetokenizeResponse,
    EmbeddingList,
    HealthResponse,
    KVEvent,
    LoadResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
    TokenizerInfo,
    VersionResponse,
)
from headway.server.api.responses_api import InputTokensRequest, ResponsesRequest


@dataclass(frozen=True)
class Operation:
    """The description of one endpoint."""

    method: str
    path: str
    summary: str
    answer: type[msgspec.Struct] | None
    """The record of the answer; None for plain text."""
    request: type[msgspec.Struct] | None = None
    statuses: tuple[int, ...] = ()
    """Possible statuses of the answer, in addition to 200, 401, 403 and 500."""
    streams: bool = False
    error: type[msgspec.Struct] = ErrorResponse
    says_unready: bool = False
    """Whether the answer with status 503 is the usual one, and no error."""
    needs_key: bool = True
    flags: tuple[str, ...] = ()
    """Parameters of the query that are true or false."""


def _health(method: str, path: str, summary: str, answer: type[msgspec.Struct] = HealthResponse) -> Operation:
    return Operation(method, path, summary, answer, statuses=(503,), says_unready=True, needs_key=False)


_GENERATION = (400, 404, 408, 413, 415, 429, 503, 504)
_BODY = (400, 404, 408, 413, 415, 429, 503)
OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation.",
        ChatCompletion,
        ChatCompletionRequest,
        _GENERATION,
        streams=True,
    ),
    Operation("post", "/v1/completions", "Continue prompts.", Completion, CompletionRequest, _GENERATION, streams=True),
    Operation("post", "/v1/embeddings", "Vectors that stand for texts.", EmbeddingList, EmbeddingRequest, _GENERATION),
    Operation(
        "post",
        "/v1/responses",
        "Answer a conversation, in OpenAI's newer form; nothing is stored.",
        ResponseObject,
        ResponsesRequest,
        _GENERATION,
        streams=True,
    ),
    Operation(
        "post",
        "/v1/responses/input_tokens",
        "Count the tokens of a conversation.",
        InputTokenCount,
        InputTokensRequest,
        _BODY,
    ),
    Operation(
        "post",
        "/v1/messages",
        "Answer a conversation, in Anthropic's form.",
        Message,
        MessagesRequest,
        _GENERATION,
        streams=True,
        error=MessageError,
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "Count the tokens of a conversation.",
        TokenCount,
        CountTokensRequest,
        _BODY,
        error=MessageError,
    ),
    Operation(
        "post",
        "/invocations",
        "A chat completion, a completion or embeddings, by the field that is sent: messages, prompt or input.",
        ChatCompletion,
        ChatCompletionRequest,
        _GENERATION,
        streams=True,
    ),
    Operation(
        "get",
        "/v1/kv_events",
        "Blocks that each replica's prefix cache stores and evicts, as events; needs --kv-events.",
        KVEvent,
        statuses=(404, 429, 503),
        streams=True,
    ),
    Operation("get", "/v1/models", "List the models served.", ModelList),
    Operation("get", "/v1/models/{name}", "One of them.", ModelCard, statuses=(404,)),
    Operation("post", "/tokenize", "Turn text or messages into tokens.", TokenizeResponse, TokenizeRequest, _BODY),
    Operation("post", "/detokenize", "Turn tokens into text.", DetokenizeResponse, DetokenizeRequest, _BODY),
    _health("get", "/health", "Whether requests are being served."),
    _health("get", "/ready", "The same, under the name that orchestrators ask for."),
    _health("get", "/ping", "The same, under the name that SageMaker asks for."),
    _health("post", "/ping", "The same."),
    _health("get", "/v2/health/ready", "The same, under the name that KServe asks for.", ServerReady),
    Operation("get", "/v2/health/live", "Whether the HTTP server answers.", ServerLive, needs_key=False),
    Operation("get", "/v2/models/{name}", "A model, in KServe's form.", ModelMetadata, statuses=(404,)),
    Operation(
        "get",
        "/v2/models/{name}/ready",
        "Whether requests to a model are being served.",
        ModelReady,
        statuses=(404, 503),
        says_unready=True,
    ),
    Operation("get", "/server_info", "The settled options; needs --enable-admin-routes.", ServerInfo, statuses=(404,)),
    Operation(
        "post",
        "/reset_prefix_cache",
        "Forget all cached blocks that no request uses; needs --enable-admin-routes.",
        CacheResetOutcome,
        statuses=(400, 404, 503),
        flags=("reset_external", "reset_running_requests"),
    ),
    Operation("get", "/load", "How many generation requests are being answered.", LoadResponse),
    Operation(
        "get", "/tokenizer_info", "Chat template and special tokens of the model.", TokenizerInfo, statuses=(400, 503)
    ),
    Operation("get", "/metrics", "Prometheus metrics.", None),
    Operation("get", "/version", "The version of the server.", VersionResponse),
)


def document() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document."""
    records = {record for operation in OPERATIONS for record in (operation.answer, operation.request) if record}
    errors = {operation.error for operation in OPERATIONS}
    ordered = sorted(records | errors, key=lambda record: record.__name__)
    _, schemas = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    for record in _bodies():
        properties = schemas[record.__name__]["properties"]
        for name in record.UNUSED:
            properties[name]["description"] = "Accepted; it cannot change an answer of this server."
        for name, neutral in record.NEUTRAL.items():
            properties[name] = {
                "enum": list(neutral),
                "description": "Not supported; only values that ask for nothing are accepted.",
            }
        for name, replacement in record.REPLACED.items():
            properties[name] = {"enum": [None], "description": f"Replaced by '{replacement}'."}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headway", "version": __version__, "description": "An OpenAI-compatible LLM server."},
        "paths": _paths(),
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _bodies() -> set[type[ApiRecord]]:
    """Return the records of all request bodies, including nested ones."""
    found: set[type[ApiRecord]] = set()
    kinds = [msgspec.inspect.type_info(operation.request) for operation in OPERATIONS if operation.request]
    while kinds:
        match kinds.pop():
            case msgspec.inspect.UnionType(types):
                kinds += types
            case msgspec.inspect.ListType(item_type):
                kinds.append(item_type)
            case msgspec.inspect.StructType(cls, fields) if issubclass(cls, ApiRecord) and cls not in found:
                found.add(cls)
                kinds += [field.type for field in fields]
    return found


@functools.cache
def document_json() -> bytes:
    """Return the document as JSON. It is cached, because writing it blocks the event loop for tens of milliseconds."""
    return msgspec.json.encode(document())


def _paths() -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation)
    return paths


def _describe(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": re.sub(r"\W+", "_", f"{operation.method}{operation.path}").strip("_"),
        "responses": _answers(operation),
    }
    if operation.request is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": _schema(operation.request)}}
    named = [("name", "path", "string")] if "{name}" in operation.path else []
    parameters = [
        {"name": name, "in": place, "required": place == "path", "schema": {"type": kind}}
        for name, place, kind in [*named, *((flag, "query", "boolean") for flag in operation.flags)]
    ]
    return {**described, "parameters": parameters} if parameters else described


def _answers(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {"text/plain": {}} if operation.answer is None else {}
    if operation.answer is not None:
        content["application/json"] = _schema(operation.answer)
    description = "Success."
    if operation.streams and operation.request is None:
        content = {"text/event-stream": {}}
        description += f" Events whose data are a {operation.answer and operation.answer.__name__} in JSON."
    elif operation.streams:
        content["text/event-stream"] = {}
        description += " With 'stream': true, events whose data are parts of it in JSON."
    answers: dict[str, Any] = {"200": {"description": description, "content": content}}
    for status in (*operation.statuses, *((401, 403, 500) if operation.needs_key else (403,))):
        error = operation.answer if status == 503 and operation.says_unready and operation.answer else operation.error
        answers[str(status)] = {"description": "See the body.", "content": {"application/json": _schema(error)}}
    return answers


def _schema(record: type[msgspec.Struct]) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{record.__name__}"}}


# ---- the page -------------------------------------------------------------------------------------------------------

_STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
code, td:first-child { font-family: ui-monospace, monospace; font-size: .9em }
summary { cursor: pointer; padding: .4rem 0 } table { border-collapse: collapse; margin: .5rem 0 1rem 1rem }
td { padding: .15rem 1.5rem .15rem 0; vertical-align: top } .method { font-weight: 700 }
"""


@functools.cache
def page() -> str:
    """Return the document as an HTML page. It is cached."""
    schemas = document()["components"]["schemas"]
    parts = [_operation_html(operation, schemas) for operation in OPERATIONS]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Headway API</title><style>{_STYLE}</style></head><body><h1>Headway API</h1>"
        f'<p>Version {__version__}. The same for programs: <a href="openapi.json">openapi.json</a>.</p>'
        f"{''.join(parts)}</body></html>"
    )


def _operation_html(operation: Operation, schemas: dict[str, Any]) -> str:
    rows = "" if operation.request is None else _fields_html(schemas[operation.request.__name__])
    return (
        f'<details><summary><span class="method">{operation.method.upper()}</span> <code>{operation.path}</code> '
        f"{html.escape(operation.summary)}</summary>{rows}</details>"
    )


def _fields_html(schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = [
        f"<tr><td>{name}</td><td>{html.escape(_type_text(field))}{' (required)' if name in required else ''}</td></tr>"
        for name, field in schema["properties"].items()
        if "enum" not in field
    ]
    return f"<table>{''.join(rows)}</table>"


def _type_text(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_type_text(part) for part in field["anyOf"] if part.get("type") != "null")
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "enum" in field:
        return " or ".join(f'"{value}"' for value in field["enum"])
    if field.get("type") == "array":
        return f"list of {_type_text(field.get('items', {}))}"
    return str(field.get("type", "any"))
