"""The HTTP endpoints. Those that generate are raw ASGI, because streams send hundreds of thousands of messages.

    body ─► record ─► a place in the queue ─► tokens ─► forecast ─► engine ─► one JSON answer, or a stream of events

The place in the queue depends on the service class in the body, so JSON is parsed even if the queue is full. The
tokenizer, which takes much longer, does not run in that case.

A whole answer is sent when it is complete, so an error gets its own HTTP status. A stream's headers are sent with its
first token, or as soon as it is known that the request will wait (`--early-headers`). An error after that is sent as
the last event of the stream. If the client disconnects at any point, all of its work is cancelled.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Generic, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from headway import __version__
from headway.predict import PromptView
from headway.server.admission.service_classes import Scheduling, scheduling_of
from headway.server.api.api_errors import ApiError, from_exception, under_name
from headway.server.api.chat_events import ChatEvents, CompletionEvents, ParsedChatEvents
from headway.server.api.gateway_headers import apply_headers
from headway.server.api.generation import Forecast, Generation, forecast
from headway.server.api.jobs import Job, chat_job, completion_job, embedding_job, num_prompts
from headway.server.api.json_bodies import chat_body, completion_body, echoed_texts, embedding_body
from headway.server.api.prompts import Prompt
from headway.server.api.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    GenerationRequest,
)
from headway.server.api.response_models import (
    HealthResponse,
    LoadResponse,
    ModelCard,
    ModelList,
    TokenizerInfo,
    VersionResponse,
    json_response,
)
from headway.server.api.wait_report import with_metrics
from headway.server.http.asgi_io import record_of, send_bytes, until_disconnect
from headway.server.limits import LIMITS
from headway.server.metrics import prometheus
from headway.server.metrics.access_log import AccessRecord
from headway.server.services import Services
from headway.wire.messages import Delta, EngineReady

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

_B = TypeVar("_B", bound=msgspec.Struct)
"""The record of an endpoint's body."""
_R = TypeVar("_R", bound=GenerationRequest)
"""The request that the body is translated to. In OpenAI's older APIs that is the body itself."""


class EventStream(Protocol):
    """Writes an answer as server-sent events."""

    def begin(self) -> bytes: ...
    def write(self, deltas: list[Delta]) -> bytes: ...
    def end(self) -> bytes: ...
    def fail(self, failure: ApiError) -> bytes: ...


class GenerationRoute(ABC, Generic[_B, _R]):
    """The steps that all generating endpoints share. Subclasses turn a body into a request, that into a job, and a
    generation into an answer."""

    ID_PREFIX: ClassVar[str]
    OPERATION: ClassVar[str]
    """What it does, in the words of OpenTelemetry's conventions."""
    _body_type: type[_B]

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._services.metrics.answering():
            body = await self._services.bodies.read(scope, receive)
            await until_disconnect(receive, self.answer(body, scope, send))

    async def answer(self, body: bytes, scope: Scope, send: Send) -> None:
        """Answer a request whose body has been read."""
        record = record_of(scope)
        record.operation = self.OPERATION
        given = await self._services.bodies.parse(body, self._body_type)
        request = self._request(given)
        headers = apply_headers(request, scope["headers"], self._services.classes)
        try:
            await self._answer(given, request, record, send, body_bytes=len(body))
        except ApiError as error:
            raise _of_header(error, headers) from None

    async def _answer(self, given: _B, request: _R, record: AccessRecord, send: Send, *, body_bytes: int) -> None:
        services = self._services
        scheduling = self._scheduling(request)._replace(client=record.key or record.client)
        if len(services.classes) > 1:
            record.service_class = scheduling.service_class.name
        with services.reserve(
            scheduling, body_bytes=body_bytes, num_prompts=num_prompts(request), key=record.key
        ) as reservation:
            job = await self._job(given, request, scheduling)
            reservation.settle(num_requests=job.num_sequences, num_tokens=job.num_prompt_tokens)
            foreseen = await self._forecast(job, arrival_s=record.time_s)
            generation = Generation(job, services, reservation, record, id_prefix=self.ID_PREFIX, forecast=foreseen)
            if job.stream:
                await self._stream(generation, await self._events(given, generation), record, send)
            else:
                body = await self._whole(given, generation)
                await send_bytes(send, with_metrics(body, generation.metrics), headers=generation.wait.headers)

    async def _forecast(self, job: Job, *, arrival_s: float) -> Forecast | None:
        """Predict the output lengths. Returns None if lengths are neither predicted nor logged, for a beam search, and
        if no output is wanted."""
        thread = self._services.lengths
        if thread is None or job.hide_output or job.params.use_beam_search:
            return None
        views = [_view(job, prompt, self._services.info) for prompt in job.prompts]
        return await forecast(views, n=job.n, thread=thread, metrics=self._services.metrics, arrival_s=arrival_s)

    async def _stream(self, generation: Generation, events: EventStream, record: AccessRecord, send: Send) -> None:
        has_head = has_begun = False
        try:
            async with generation:
                async for deltas in generation:
                    if not has_head and (deltas or self._is_worth_telling(generation)):
                        has_head = True
                        await send(_head(generation))
                    for place in range(0, len(deltas), LIMITS.deltas_at_once):
                        part = deltas[place : place + LIMITS.deltas_at_once]
                        data = events.write(part) if has_begun else events.begin() + events.write(part)
                        has_begun = True
                        if data:
                            await send({"type": "http.response.body", "body": data, "more_body": True})
                        if len(deltas) > LIMITS.deltas_at_once:
                            await asyncio.sleep(0)
            last = events.end()
        except Exception as error:
            if not has_head:
                raise
            failure = from_exception(error)
            record.note_error(failure)
            last = events.fail(failure) if has_begun else events.begin() + events.fail(failure)
        await send({"type": "http.response.body", "body": last})

    def _is_worth_telling(self, generation: Generation) -> bool:
        """Whether the client should get the forecast before the first token."""
        return self._services.config.early_headers and generation.wait.is_long(time.perf_counter())

    def _scheduling(self, request: _R) -> Scheduling:
        return scheduling_of(request, self._services.classes)

    @abstractmethod
    def _request(self, given: _B) -> _R: ...

    @abstractmethod
    async def _job(self, given: _B, request: _R, scheduling: Scheduling) -> Job: ...

    @abstractmethod
    async def _whole(self, given: _B, generation: Generation) -> bytes: ...

    @abstractmethod
    async def _events(self, given: _B, generation: Generation) -> EventStream: ...


def _of_header(error: ApiError, headers: Mapping[str, str]) -> ApiError:
    """Return an error of a field that came from a header as one of the header."""
    for field, header in headers.items():
        error = under_name(error, field, header)
    return error


def _head(generation: Generation) -> Message:
    """Return the beginning of a stream, with what is expected of it."""
    expected = [(name.encode(), value.encode()) for name, value in generation.wait.expected_headers.items()]
    return {"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS, *expected]}


def _view(job: Job, prompt: Prompt, info: EngineReady) -> PromptView:
    """Return the prompt as the length predictor sees it, with `max_tokens` limited to what fits into the context."""
    room = info.max_model_len - len(prompt.token_ids)
    max_tokens = job.params.max_tokens
    return PromptView(
        prompt.token_ids,
        max_tokens=room if max_tokens is None else min(max_tokens, room),
        temperature=job.params.temperature,
        text=prompt.text,
        user=job.options.tenant or None,
    )


class ChatCompletions(GenerationRoute[ChatCompletionRequest, ChatCompletionRequest]):
    """POST /v1/chat/completions."""

    ID_PREFIX = "chatcmpl"
    OPERATION = "chat"
    _body_type = ChatCompletionRequest

    def _request(self, given: ChatCompletionRequest) -> ChatCompletionRequest:
        return given

    async def _job(self, given: ChatCompletionRequest, request: ChatCompletionRequest, scheduling: Scheduling) -> Job:
        return await chat_job(request, scheduling, self._services)

    async def _whole(self, given: ChatCompletionRequest, generation: Generation) -> bytes:
        return await chat_body(generation, self._services.model_name, self._services.prompts)

    async def _events(self, given: ChatCompletionRequest, generation: Generation) -> ChatEvents:
        kind = ChatEvents if generation.job.is_plain else ParsedChatEvents
        return kind(generation, self._services.model_name, self._services.prompts)


class Completions(GenerationRoute[CompletionRequest, CompletionRequest]):
    """POST /v1/completions."""

    ID_PREFIX = "cmpl"
    OPERATION = "text_completion"
    _body_type = CompletionRequest

    def _request(self, given: CompletionRequest) -> CompletionRequest:
        return given

    async def _job(self, given: CompletionRequest, request: CompletionRequest, scheduling: Scheduling) -> Job:
        return await completion_job(request, scheduling, self._services)

    async def _whole(self, given: CompletionRequest, generation: Generation) -> bytes:
        return await completion_body(generation, self._services.model_name, self._services.prompts)

    async def _events(self, given: CompletionRequest, generation: Generation) -> CompletionEvents:
        echoes = await echoed_texts(generation, self._services.prompts)
        return CompletionEvents(generation, self._services.model_name, self._services.prompts, echoes)


class Embeddings(GenerationRoute[EmbeddingRequest, CompletionRequest]):
    """POST /v1/embeddings."""

    ID_PREFIX = "embd"
    OPERATION = "embeddings"
    _body_type = EmbeddingRequest

    def _request(self, given: EmbeddingRequest) -> CompletionRequest:
        return given.as_completion()

    async def _job(self, given: EmbeddingRequest, request: CompletionRequest, scheduling: Scheduling) -> Job:
        return await embedding_job(given, request, scheduling, self._services)

    async def _whole(self, given: EmbeddingRequest, generation: Generation) -> bytes:
        return await embedding_body(generation, self._services.model_name, given)

    async def _events(self, given: EmbeddingRequest, generation: Generation) -> EventStream:
        raise AssertionError("vectors are not streamed")


class InfoRoutes:
    """Endpoints that answer from state in this process, without asking the engine."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def models(self, _: Request) -> Response:
        """GET /v1/models."""
        return json_response(ModelList([self._card(name) for name in self._services.model_names]))

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{name}. Names may contain slashes."""
        name = request.path_params["name"]
        self._services.check_model(name)
        return json_response(self._card(name))

    async def health(self, _: Request) -> Response:
        """GET /health, /ready and /ping: 200 while requests are being served, else 503 with the reason."""
        problem = self._services.problem
        if problem is None:
            return json_response(HealthResponse("ok"))
        is_draining = self._services.drain.is_asked
        return json_response(HealthResponse("draining" if is_draining else "unavailable", problem), status=503)

    async def load(self, _: Request) -> Response:
        """GET /load."""
        return json_response(LoadResponse(self._services.metrics.num_answering))

    async def tokenizer(self, _: Request) -> Response:
        """GET /tokenizer_info."""
        tokenizer, info = self._services.prompts.tokenizer, self._services.info
        return json_response(
            TokenizerInfo(
                vocab_size=info.vocab_size,
                max_model_len=info.max_model_len,
                chat_template=tokenizer.chat_template,
                special_tokens=tokenizer.special_tokens,
                added_tokens=tokenizer.special_token_ids(LIMITS.max_special_tokens),
                bos_token_id=tokenizer.bos_token_id,
                eos_token_ids=list(tokenizer.eos_token_ids),
            )
        )

    async def version(self, _: Request) -> Response:
        """GET /version."""
        return json_response(VersionResponse(__version__))

    async def metrics(self, _: Request) -> Response:
        """GET /metrics."""
        return Response(self._services.metrics_page(), headers={"content-type": prometheus.CONTENT_TYPE})

    def _card(self, name: str) -> ModelCard:
        info = self._services.engine.info
        return ModelCard(
            id=name,
            created=self._services.started_s,
            max_model_len=info.max_model_len if info else None,
            root=self._services.model_name,
        )
