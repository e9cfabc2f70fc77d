"""The ASGI application: its routes, and the steps that every request passes.

id ─► access control ─► route ─► an answer in any case ─► metrics, log line
"""

from __future__ import annotations

import re
import secrets
import time
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.server.api import openapi
from headway.server.api.admin_routes import AdminRoutes
from headway.server.api.api_errors import ApiError, from_exception, from_status, no_such_path, wrong_method
from headway.server.api.gateway_headers import DROPPED_REASON, dropped_reason
from headway.server.api.gateway_routes import Invocations, KServeRoutes
from headway.server.api.kv_event_stream import KVEvents
from headway.server.api.message_errors import MESSAGES_PATH, message_error
from headway.server.api.routes import ChatCompletions, Completions, Embeddings, InfoRoutes
from headway.server.api.tokenizer_routes import Detokenize, Tokenize
from headway.server.api.translated_routes import CountTokens, InputTokens, Messages, Responses, stored_response
from headway.server.api.wait_report import EXPOSED_HEADERS
from headway.server.http.access_control import OPEN_PATHS, ORIGIN_HEADERS, WebPages
from headway.server.http.asgi_io import ClientDisconnected, send_error, skip_body
from headway.server.http.draining import shutting_down
from headway.server.metrics.access_log import AccessRecord
from headway.server.services import Services

PAGE_CSP = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
CLIENT_CLOSED_REQUEST = 499
"""The status that the log shows if the client left before the answer began. It is never sent."""
ANTHROPIC_HEADERS = ("x-api-key", "anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access")
"""Headers that Anthropic's client sends from a web page. Only the key is read."""
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
STAYING_PATHS = OPEN_PATHS | {"/metrics"}
"""Paths that a stopping server answers until its end."""
_WANTED = frozenset({b"authorization", b"x-api-key", b"x-request-id", b"traceparent"}) | ORIGIN_HEADERS


def create_app(services: Services, extra_routes: list[BaseRoute] | None = None) -> ASGIApp:
    """Return the server as an ASGI application. `extra_routes`, of the page, are tried after the API's own routes."""
    info, kserve, admin = InfoRoutes(services), KServeRoutes(services), AdminRoutes(services)
    routes: list[BaseRoute] = [
        Route("/v1/chat/completions", ChatCompletions(services), methods=["POST"]),
        Route("/v1/completions", Completions(services), methods=["POST"]),
        Route("/v1/embeddings", Embeddings(services), methods=["POST"]),
        Route("/v1/responses", Responses(services), methods=["POST"]),
        Route("/v1/responses/input_tokens", InputTokens(services), methods=["POST"]),
        Route("/v1/responses/{id:path}", stored_response, methods=["GET", "POST", "DELETE"]),
        Route("/v1/messages", Messages(services), methods=["POST"]),
        Route("/v1/messages/count_tokens", CountTokens(services), methods=["POST"]),
        Route("/invocations", Invocations(services), methods=["POST"]),
        Route("/v1/kv_events", KVEvents(services), methods=["GET"]),
        Route("/v1/models", info.models),
        Route("/v1/models/{name:path}", info.model),
        Route("/tokenize", Tokenize(services), methods=["POST"]),
        Route("/detokenize", Detokenize(services), methods=["POST"]),
        Route("/health", info.health),
        Route("/ready", info.health),
        Route("/ping", info.health, methods=["GET", "POST"]),
        Route("/v2/health/live", kserve.live),
        Route("/v2/health/ready", kserve.ready),
        Route("/v2/models/{name:path}/ready", kserve.model_ready),
        Route("/v2/models/{name:path}", kserve.model),
        Route("/server_info", admin.server_info),
        Route("/reset_prefix_cache", admin.reset_prefix_cache, methods=["POST"]),
        Route("/load", info.load),
        Route("/tokenizer_info", info.tokenizer),
        Route("/metrics", info.metrics),
        Route("/version", info.version),
        Route("/openapi.json", _document),
        Route("/docs", _docs),
    ]
    named = frozenset(route.path for route in routes if isinstance(route, Route))
    routes += extra_routes or ()
    paths = tuple(route.path.replace(":path", "") for route in routes if isinstance(route, Route))
    app: ASGIApp = Gate(Router(routes, redirect_slashes=False), services, named, paths=paths)
    if services.config.cors_origin:
        app = CORSMiddleware(
            app,
            allow_origins=services.config.cors_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id", *ANTHROPIC_HEADERS],
            allow_private_network=True,
            expose_headers=["x-request-id", "retry-after", DROPPED_REASON, *EXPOSED_HEADERS],
        )
    return app


async def _document(_: Request) -> Response:
    return Response(openapi.document_json(), media_type="application/json")


async def _docs(_: Request) -> Response:
    return HTMLResponse(openapi.page(), headers={"content-security-policy": PAGE_CSP})


class Gate:
    """ASGI middleware that gives each request an id, checks access, turns errors into answers, and logs the request."""

    def __init__(
        self, app: ASGIApp, services: Services, routes: frozenset[str], *, paths: tuple[str, ...] = ()
    ) -> None:
        """Metrics count each path in `routes` by name and all others together. `paths` are all existing paths."""
        self._app = app
        self._services = services
        self._routes = routes
        self._paths = paths
        self._web_pages = WebPages(services.config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = _wanted_headers(scope)
        record = AccessRecord(
            request_id=_request_id(headers.get(b"x-request-id")),
            method=scope["method"],
            path=scope["path"],
            client=scope["client"][0] if scope.get("client") else "",
            traceparent=headers.get(b"traceparent", b"").decode("latin-1") or None,
        )
        scope["headway.record"] = record
        scope["app"] = self  # makes the router raise for an unknown route; otherwise it would answer in plain text
        id_headers = [(b"x-request-id", record.request_id.encode())]
        if record.path.startswith(MESSAGES_PATH):
            id_headers.append((b"request-id", record.request_id.encode()))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], *id_headers, *self._leaving_headers()]
            await send(message)

        try:
            self._web_pages.check(headers)
            record.key = self._services.keys.check(
                scope["path"], headers.get(b"authorization"), headers.get(b"x-api-key")
            )
            if self._services.drain.is_refusing and record.path not in STAYING_PATHS:
                await skip_body(receive, max_bytes=self._services.config.max_body_bytes)
                raise shutting_down()
            await self._app(scope, receive, send_with_id)
        except ClientDisconnected:
            record.disconnected = True
            record.status = record.status or CLIENT_CLOSED_REQUEST
        except Exception as error:
            await self._fail(self._as_api_error(error, record), record, send_with_id)
        finally:
            self._close(record)

    def _leaving_headers(self) -> list[tuple[bytes, bytes]]:
        """Return the header with which a stopping server asks clients to use a new connection for the next request."""
        return [(b"connection", b"close")] if self._services.drain.is_asked else []

    async def _fail(self, failure: ApiError, record: AccessRecord, send: Send) -> None:
        """Send the error if the answer has not begun. Otherwise raise it, which cuts the connection."""
        record.note_error(failure)
        if record.status is not None:
            raise failure
        is_message = record.path.startswith(MESSAGES_PATH)
        body = msgspec.json.encode(message_error(failure, request_id=record.request_id)) if is_message else None
        failure.headers |= dropped_reason(failure)
        await send_error(send, failure, body)

    def _as_api_error(self, error: Exception, record: AccessRecord) -> ApiError:
        if not isinstance(error, HTTPException):
            return from_exception(error)
        if error.status_code == HTTPStatus.NOT_FOUND:
            return no_such_path(record.path, self._paths)
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            return wrong_method(record.method, record.path, (error.headers or {}).get("Allow", ""))
        return from_status(error.status_code, error.headers)

    def _close(self, record: AccessRecord) -> None:
        route = record.path if record.path in self._routes else "other"
        duration_s = time.perf_counter() - record.started_s
        self._services.metrics.observe_response(route, record.method, record.status or 0, duration_s)
        for note in self._services.on_request_end:
            note(record)


def _wanted_headers(scope: Scope) -> dict[bytes, bytes]:
    return {name: value for name, value in scope["headers"] if name in _WANTED}


def _request_id(given: bytes | None) -> str:
    """Return the client's request id if it is safe for headers and log lines, else a new one."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given.decode("ascii")
    return secrets.token_hex(16)
