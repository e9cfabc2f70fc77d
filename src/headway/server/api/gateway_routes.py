"""The endpoints under other platforms' names: SageMaker's `/invocations`, and health and models in KServe's protocol
(v2). They answer as the endpoints under OpenAI's names do."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headway import __version__
from headway.server.api.api_errors import bad_request
from headway.server.api.response_models import json_response
from headway.server.api.routes import ChatCompletions, Completions, Embeddings
from headway.server.http.asgi_io import until_disconnect
from headway.server.services import Services


class InvocationBody(msgspec.Struct, gc=False):
    """The fields of a body that say which endpoint it is for."""

    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class Invocations:
    """POST /invocations: a body for chat completions, completions or embeddings."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._chat, self._completions = ChatCompletions(services), Completions(services)
        self._embeddings = Embeddings(services)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._services.metrics.answering():
            body = await self._services.bodies.read(scope, receive)
            await until_disconnect(receive, self._answer(body, scope, send))

    async def _answer(self, body: bytes, scope: Scope, send: Send) -> None:
        route = self._route(await self._services.bodies.parse(body, InvocationBody))
        await route.answer(body, scope, send)

    def _route(self, body: InvocationBody) -> ChatCompletions | Completions | Embeddings:
        if body.messages is not msgspec.UNSET:
            return self._chat
        if body.prompt is not msgspec.UNSET:
            return self._completions
        if body.input is not msgspec.UNSET:
            return self._embeddings
        raise bad_request(
            "Send 'messages' for a chat completion, 'prompt' for a completion, or 'input' for embeddings.",
            param="messages",
        )


class ServerLive(msgspec.Struct):
    """The HTTP server answers, whether or not the engine does."""

    live: Literal[True] = True


class ServerReady(msgspec.Struct):
    """Whether requests are being served, and if not, why."""

    ready: bool
    reason: str = ""


class ModelMetadata(msgspec.Struct):
    """A model, as KServe describes one. It has no tensors of its own in this protocol: requests are OpenAI's."""

    name: str
    platform: str
    versions: list[str] = []
    inputs: list[str] = []
    outputs: list[str] = []


class ModelReady(msgspec.Struct):
    """Whether requests to a model are being served."""

    name: str
    ready: bool


class KServeRoutes:
    """The endpoints below /v2."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def live(self, _: Request) -> Response:
        """GET /v2/health/live."""
        return json_response(ServerLive())

    async def ready(self, _: Request) -> Response:
        """GET /v2/health/ready."""
        problem = self._services.problem
        return json_response(ServerReady(problem is None, problem or ""), status=200 if problem is None else 503)

    async def model(self, request: Request) -> Response:
        """GET /v2/models/{name}."""
        name = request.path_params["name"]
        self._services.check_model(name)
        return json_response(ModelMetadata(name, f"headway-{__version__}"))

    async def model_ready(self, request: Request) -> Response:
        """GET /v2/models/{name}/ready."""
        name = request.path_params["name"]
        self._services.check_model(name)
        is_ready = self._services.problem is None
        return json_response(ModelReady(name, is_ready), status=200 if is_ready else 503)
