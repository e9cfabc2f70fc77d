"""The small endpoints: models, tokens, health, metrics, version."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headway import __version__
from headway.server.api.answers import (
    DetokenizeResponse,
    HealthResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
    VersionResponse,
)
from headway.server.api.requests import DetokenizeRequest, TokenizeRequest
from headway.server.api.responses import json_response
from headway.server.http.asgi import send_json, until_disconnect
from headway.server.metrics import prometheus
from headway.server.services import Services


class InfoRoutes:
    """Answers from what is known already; none of these reaches the engine."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def models(self, _: Request) -> Response:
        """GET /v1/models."""
        return json_response(ModelList([self._card(name) for name in self._services.model_names]))

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{name}; names may have slashes."""
        name = request.path_params["name"]
        self._services.check_model(name)
        return json_response(self._card(name))

    async def health(self, _: Request) -> Response:
        """GET /health and /ready: 200 while requests are being served, else 503 and why."""
        health = self._services.engine.health
        if health.ok:
            return json_response(HealthResponse("ok"))
        return json_response(HealthResponse("unavailable", health.reason), status=503)

    async def version(self, _: Request) -> Response:
        """GET /version."""
        return json_response(VersionResponse(__version__))

    async def metrics(self, _: Request) -> Response:
        """GET /metrics."""
        text = self._services.metrics.render(self._services.engine, self._services.limits)
        return Response(text, headers={"content-type": prometheus.CONTENT_TYPE})

    def _card(self, name: str) -> ModelCard:
        info = self._services.engine.info
        return ModelCard(
            id=name,
            created=self._services.started_s,
            max_model_len=info.max_model_len if info else None,
            root=self._services.model_name,
        )


class Tokenize:
    """POST /tokenize."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._services.bodies.read(scope, receive)
        await until_disconnect(receive, self._answer(body, send))

    async def _answer(self, body: bytes, send: Send) -> None:
        request = await self._services.bodies.parse(body, TokenizeRequest)
        with self._services.limits.reserve(body_bytes=len(body)):  # the tokenizer's threads are shared with completions
            await self._tokenize(request, send)

    async def _tokenize(self, request: TokenizeRequest, send: Send) -> None:
        services = self._services
        services.check_model(request.model)
        request.check_supported()
        info = services.info
        if request.messages is not None:
            prompt = await services.prompts.from_messages(
                request.messages,
                info,
                add_generation_prompt=request.add_generation_prompt is not False,
                template_options=request.chat_template_kwargs,
            )
            tokens = prompt.token_ids
        else:
            special = request.add_special_tokens is not False
            tokens = await services.prompts.tokenize(request.prompt or "", info, add_special_tokens=special)
        await send_json(send, TokenizeResponse(tokens, len(tokens), info.max_model_len))


class Detokenize:
    """POST /detokenize."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._services.bodies.read(scope, receive)
        await until_disconnect(receive, self._answer(body, send))

    async def _answer(self, body: bytes, send: Send) -> None:
        request = await self._services.bodies.parse(body, DetokenizeRequest)
        with self._services.limits.reserve(body_bytes=len(body)):
            self._services.check_model(request.model)
            text = await self._services.prompts.decode(request.tokens, self._services.info)
        await send_json(send, DetokenizeResponse(text))
