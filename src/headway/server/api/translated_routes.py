"""The endpoints of `/v1/responses` and `/v1/messages`: the path of a chat request, with other words at both ends."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headway.errors import InvalidRequestError
from headway.server.admission.service_classes import Scheduling, scheduling_of
from headway.server.api.api_errors import ApiError, from_exception
from headway.server.api.api_translation import Renaming, TranslatedRequest, chat_request
from headway.server.api.generation import Generation
from headway.server.api.jobs import Job, chat_job
from headway.server.api.message_events import MessageEvents, TokenCount, WholeMessage
from headway.server.api.messages_api import (
    MESSAGES_NAMES,
    CountTokensRequest,
    MessagesRequest,
    chat_fields_of_message,
    chat_fields_of_prompt,
)
from headway.server.api.requests import ChatCompletionRequest
from headway.server.api.response_events import ResponseEvents, WholeResponse
from headway.server.api.responses_api import (
    RESPONSES_NAMES,
    ResponsesRequest,
    chat_fields_of_response,
    not_stored,
)
from headway.server.api.routes import GenerationRoute
from headway.server.http.asgi_io import send_json, until_disconnect
from headway.server.services import Services

_B = TypeVar("_B", bound=TranslatedRequest)


class _TranslatedRoute(GenerationRoute[_B, ChatCompletionRequest]):
    """A body that is translated. What chat refuses is told in the words of the body."""

    _names: ClassVar[Renaming]

    @abstractmethod
    def _chat_fields(self, given: _B) -> dict[str, Any]: ...

    def _request(self, given: _B) -> ChatCompletionRequest:
        return chat_request(self._chat_fields(given), self._names)

    def _scheduling(self, request: ChatCompletionRequest) -> Scheduling:
        try:
            return super()._scheduling(request)
        except (ApiError, InvalidRequestError) as error:
            raise self._names(from_exception(error)) from None

    async def _job(self, given: _B, request: ChatCompletionRequest, scheduling: Scheduling) -> Job:
        try:
            return await chat_job(request, scheduling, self._services)
        except (ApiError, InvalidRequestError) as error:
            raise self._names(from_exception(error)) from None


class Responses(_TranslatedRoute[ResponsesRequest]):
    """POST /v1/responses."""

    ID_PREFIX = "resp"
    _body_type = ResponsesRequest
    _names = RESPONSES_NAMES

    def _chat_fields(self, given: ResponsesRequest) -> dict[str, Any]:
        return chat_fields_of_response(given)

    async def _whole(self, given: ResponsesRequest, generation: Generation) -> bytes:
        services = self._services
        return msgspec.json.encode(
            await WholeResponse(generation, given, services.model_name, services.prompts).collect()
        )

    async def _events(self, given: ResponsesRequest, generation: Generation) -> ResponseEvents:
        return ResponseEvents(generation, given, self._services.model_name, self._services.prompts)


class Messages(_TranslatedRoute[MessagesRequest]):
    """POST /v1/messages."""

    ID_PREFIX = "msg"
    _body_type = MessagesRequest
    _names = MESSAGES_NAMES

    def _chat_fields(self, given: MessagesRequest) -> dict[str, Any]:
        return chat_fields_of_message(given)

    async def _whole(self, given: MessagesRequest, generation: Generation) -> bytes:
        services = self._services
        answer = WholeMessage(generation, services.model_name, block_size=services.info.block_size)
        return msgspec.json.encode(await answer.collect())

    async def _events(self, given: MessagesRequest, generation: Generation) -> MessageEvents:
        services = self._services
        return MessageEvents(generation, services.model_name, block_size=services.info.block_size)


class CountTokens:
    """POST /v1/messages/count_tokens: the prompt is made as for an answer, and counted."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._services.bodies.read(scope, receive)
        await until_disconnect(receive, self._answer(body, send))

    async def _answer(self, body: bytes, send: Send) -> None:
        services = self._services
        given = await services.bodies.parse(body, CountTokensRequest)
        with services.reserve_tokenizer(body_bytes=len(body)):
            try:
                request = chat_request(chat_fields_of_prompt(given), MESSAGES_NAMES)
                job = await chat_job(request, scheduling_of(request, services.classes), services)
            except (ApiError, InvalidRequestError) as error:
                raise MESSAGES_NAMES(from_exception(error)) from None
        await send_json(send, TokenCount(job.num_prompt_tokens))


async def stored_response(request: Request) -> Response:
    """GET, DELETE /v1/responses/{id} and what is below: no answer is kept, so there is none to find."""
    raise not_stored(request.path_params["id"])
