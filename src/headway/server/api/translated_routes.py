"""The endpoints of `/v1/responses` and `/v1/messages`, which translate to and from chat completions."""

from __future__ import annotations

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headway.errors import InvalidRequestError
from headway.server.admission.service_classes import Scheduling, scheduling_of
from headway.server.api.api_errors import ApiError, from_exception
from headway.server.api.api_translation import TranslatedRequest, chat_request
from headway.server.api.field_names import Renaming
from headway.server.api.generation import Generation
from headway.server.api.jobs import Job, chat_job
from headway.server.api.message_events import MessageEvents, TokenCount, WholeMessage
from headway.server.api.messages_api import (
    MESSAGES_NAMES,
    CountTokensRequest,
    MessagesRequest,
    chat_fields_of_message,
    chat_fields_of_prompt,
    message_names,
)
from headway.server.api.requests import ChatCompletionRequest
from headway.server.api.response_events import InputTokenCount, ResponseEvents, WholeResponse
from headway.server.api.responses_api import (
    RESPONSES_NAMES,
    InputTokensRequest,
    ResponsesRequest,
    chat_fields_of_input,
    chat_fields_of_response,
    not_stored,
    response_names,
)
from headway.server.api.routes import GenerationRoute
from headway.server.http.asgi_io import record_of, send_json, until_disconnect
from headway.server.metrics.access_log import AccessRecord
from headway.server.services import Services

_B = TypeVar("_B", bound=TranslatedRequest)


class _TranslatedRoute(GenerationRoute[_B, ChatCompletionRequest]):
    """Translates a body into a chat request. Errors of the chat request are renamed to the fields of the body."""

    _names: ClassVar[Renaming]

    @abstractmethod
    def _chat_fields(self, given: _B) -> dict[str, Any]: ...

    @abstractmethod
    def _names_in(self, given: _B) -> Renaming:
        """Return `_names` with the paths of this body's tools."""

    def _request(self, given: _B) -> ChatCompletionRequest:
        fields = self._chat_fields(given)
        with _told_in(partial(self._names_in, given)):
            return chat_request(fields)

    def _scheduling(self, request: ChatCompletionRequest) -> Scheduling:
        with _told_in(lambda: self._names):
            return super()._scheduling(request)

    async def _job(self, given: _B, request: ChatCompletionRequest, scheduling: Scheduling) -> Job:
        with _told_in(partial(self._names_in, given)):
            job = await chat_job(request, scheduling, self._services)
        path = job.constraint_path  # errors from the engine name this field
        return job if path is None else dataclasses.replace(job, constraint_path=self._names.path(path))


@contextlib.contextmanager
def _told_in(names: Callable[[], Renaming]) -> Iterator[None]:
    """Rename the fields in errors raised inside the block to those of the original body."""
    try:
        yield
    except (ApiError, InvalidRequestError) as error:
        raise names()(from_exception(error)) from None


class Responses(_TranslatedRoute[ResponsesRequest]):
    """POST /v1/responses."""

    ID_PREFIX = "resp"
    OPERATION = "chat"
    _body_type = ResponsesRequest
    _names = RESPONSES_NAMES

    def _chat_fields(self, given: ResponsesRequest) -> dict[str, Any]:
        return chat_fields_of_response(given)

    def _names_in(self, given: ResponsesRequest) -> Renaming:
        return response_names(given)

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
    OPERATION = "chat"
    _body_type = MessagesRequest
    _names = MESSAGES_NAMES

    def _chat_fields(self, given: MessagesRequest) -> dict[str, Any]:
        return chat_fields_of_message(given)

    def _names_in(self, given: MessagesRequest) -> Renaming:
        return message_names(given)

    async def _whole(self, given: MessagesRequest, generation: Generation) -> bytes:
        services = self._services
        answer = WholeMessage(
            generation,
            services.model_name,
            block_size=services.info.block_size,
            hides_thoughts=given.hides_thoughts,
        )
        return msgspec.json.encode(await answer.collect())

    async def _events(self, given: MessagesRequest, generation: Generation) -> MessageEvents:
        services = self._services
        return MessageEvents(
            generation,
            services.model_name,
            block_size=services.info.block_size,
            hides_thoughts=given.hides_thoughts,
        )


class _CountTokens(ABC, Generic[_B]):
    """Makes the prompt as for an answer and returns its number of tokens."""

    _body_type: type[_B]

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._services.bodies.read(scope, receive)
        await until_disconnect(receive, self._answer(body, record_of(scope), send))

    async def _answer(self, body: bytes, record: AccessRecord, send: Send) -> None:
        services = self._services
        given = await services.bodies.parse(body, self._body_type)
        with services.reserve_tokenizer(body_bytes=len(body), key=record.key):
            fields = self._chat_fields(given)
            with _told_in(partial(self._names_in, given)):
                request = chat_request(fields)
                scheduling = scheduling_of(request, services.classes)._replace(client=record.key or record.client)
                job = await chat_job(request, scheduling, services)
        await send_json(send, self._count(job.num_prompt_tokens))

    @abstractmethod
    def _chat_fields(self, given: _B) -> dict[str, Any]: ...

    @abstractmethod
    def _names_in(self, given: _B) -> Renaming: ...

    @abstractmethod
    def _count(self, num_tokens: int) -> msgspec.Struct: ...


class CountTokens(_CountTokens[CountTokensRequest]):
    """POST /v1/messages/count_tokens."""

    _body_type = CountTokensRequest

    def _chat_fields(self, given: CountTokensRequest) -> dict[str, Any]:
        return chat_fields_of_prompt(given)

    def _names_in(self, given: CountTokensRequest) -> Renaming:
        return message_names(given)

    def _count(self, num_tokens: int) -> TokenCount:
        return TokenCount(num_tokens)


class InputTokens(_CountTokens[InputTokensRequest]):
    """POST /v1/responses/input_tokens."""

    _body_type = InputTokensRequest

    def _chat_fields(self, given: InputTokensRequest) -> dict[str, Any]:
        return chat_fields_of_input(given)

    def _names_in(self, given: InputTokensRequest) -> Renaming:
        return response_names(given)

    def _count(self, num_tokens: int) -> InputTokenCount:
        return InputTokenCount(num_tokens)


async def stored_response(request: Request) -> Response:
    """GET, POST, DELETE /v1/responses/{id} and paths below it: always 404, because no response is stored."""
    response_id = request.path_params["id"]
    if request.method == "POST" and response_id == "compact":
        raise ApiError(404, "'/v1/responses/compact' is not supported by this server.", code="not_supported")
    raise not_stored(response_id.partition("/")[0])
