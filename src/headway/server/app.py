"""The application: which path leads where, and what every request passes on its way."""

from __future__ import annotations

import msgspec
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp

from headway.server.api import openapi
from headway.server.api.routes_generate import ChatCompletions, Completions
from headway.server.api.routes_info import Detokenize, InfoRoutes, Tokenize
from headway.server.http.gate import Gate
from headway.server.services import Services

PAGE_CSP = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"


def create_app(services: Services, extra_routes: list[BaseRoute] | None = None) -> ASGIApp:
    """The server as an ASGI application. `extra_routes` are tried after the API's own: the page and its events."""
    info = InfoRoutes(services)
    routes: list[BaseRoute] = [
        Route("/v1/chat/completions", ChatCompletions(services), methods=["POST"]),
        Route("/v1/completions", Completions(services), methods=["POST"]),
        Route("/v1/models", info.models),
        Route("/v1/models/{name:path}", info.model),
        Route("/tokenize", Tokenize(services), methods=["POST"]),
        Route("/detokenize", Detokenize(services), methods=["POST"]),
        Route("/health", info.health),
        Route("/ready", info.health),
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
            allow_headers=["authorization", "content-type", "x-request-id"],
            allow_private_network=True,
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


async def _document(_: Request) -> Response:
    return Response(msgspec.json.encode(openapi.document()), media_type="application/json")


async def _docs(_: Request) -> Response:
    return HTMLResponse(openapi.page(), headers={"content-security-policy": PAGE_CSP})
