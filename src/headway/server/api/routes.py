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
from typing import ClassVar, Generic, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from headway import __version__
from headway.front.watch_streams import CacheEvent, CacheStream
from headway.predict import PromptView
from headway.server.admission.service_classes import Scheduling, scheduling_of
from headway.server.api.api_errors import ApiError, from_exception, overloaded
from headway.server.api.chat_events import ChatEvents, CompletionEvents, ParsedChatEvents
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
    KVEvent,
    LoadResponse,
    ModelCard,
    ModelList,
    TokenizerInfo,
    VersionResponse,
    json_response,
)
from headway.server.api.wait_report import with_metrics
from headway.server.http.asgi_io import record_of, send_bytes, until_disconnect
from headway.server.http.draining import SHUTTING_DOWN
from headway.server.limits import LIMITS
from headway.server.metrics import prometheus
from headway.server.metrics.access_log import AccessRecord
from headway.server.services import Services
from headway.wire.messages import Delta, EngineReady

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

DIGEST_RULE = (
    "blake2b-256 of the digest of the block before and the block's tokens (int32, little-endian); before the first "
    "block: blake2b-256 of the salt, personalised with 'headway-root'"
)
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
    _body_type: type[_B]

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._services.metrics.answering():
            body = await self._services.bodies.read(scope, receive)
            await until_disconnect(receive, self._answer(body, record_of(scope), send))

    async def _answer(self, body: bytes, record: AccessRecord, send: Send) -> None:
        services = self._services
        given = await services.bodies.parse(body, self._body_type)
        request = self._request(given)
        scheduling = self._scheduling(request)._replace(client=record.key or record.client)
        if len(services.classes) > 1:
            record.service_class = scheduling.service_class.name
        with services.reserve(
            scheduling, body_bytes=len(body), num_prompts=num_prompts(request), key=record.key
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


def _head(generation: Generation) -> Message:
    """Return the beginning of a stream, with what is expected of it."""
    expected = [(name.encode(), value.encode()) for name, value in generation.wait.expected_headers.items()]
    return {"type": "http.response.start", "status": 200, "headers": [*_STREAM_HEADERS, *expected]}


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
        if self._services.drain.is_asked:
            return json_response(HealthResponse("draining", SHUTTING_DOWN), status=503)
        health = self._services.engine.health
        if health.ok:
            return json_response(HealthResponse("ok"))
        return json_response(HealthResponse("unavailable", health.reason), status=503)

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
        text = prometheus.render(self._services.metrics, self._services.engine, self._services.limits)
        return Response(text, headers={"content-type": prometheus.CONTENT_TYPE})

    def _card(self, name: str) -> ModelCard:
        info = self._services.engine.info
        return ModelCard(
            id=name,
            created=self._services.started_s,
            max_model_len=info.max_model_len if info else None,
            root=self._services.model_name,
        )


class KVEvents:
    """GET /v1/kv_events: streams the contents of each replica's prefix cache and all later changes."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._num_followers = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        info = self._check()
        if scope["method"] == "HEAD":
            await send_bytes(send, b"", content_type="text/event-stream")
            return
        self._num_followers += 1
        try:
            async with self._services.engine.follow_caches() as stream:
                await until_disconnect(receive, self._answer(info, stream, send))
        finally:
            self._num_followers -= 1

    def _check(self) -> EngineReady:
        """Return the engine's properties, or raise if caches cannot be followed."""
        if not self._services.config.kv_events:
            raise ApiError(
                404, "This server does not tell what its caches hold; start it with --kv-events.", code="kv_events_off"
            )
        info = self._services.info
        if not info.prefix_caching:
            raise ApiError(
                404,
                "There is no prefix cache to follow: the server was started with --no-enable-prefix-caching.",
                code="prefix_caching_off",
            )
        if self._num_followers >= LIMITS.max_followers:
            raise overloaded(
                f"{self._num_followers} clients follow the caches already. Please retry later.",
                code="too_many_followers",
            )
        return info

    async def _answer(self, info: EngineReady, stream: CacheStream, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        hello = {
            "num_replicas": max(len(self._services.engine.replicas), 1),
            "block_size": info.block_size,
            "digest": DIGEST_RULE,
        }
        data: bytes | None = b"event: hello\ndata: %s\n\n" % msgspec.json.encode(hello)
        while data is not None:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            data = await self._next(stream)
        await send({"type": "http.response.body", "body": b""})

    async def _next(self, stream: CacheStream) -> bytes | None:
        try:
            async with asyncio.timeout(LIMITS.quiet_s):
                event = await anext(stream)
        except TimeoutError:
            return b": nothing new\n\n"
        except StopAsyncIteration:  # the server stops
            return None
        return b"event: blocks\ndata: %s\n\n" % msgspec.json.encode(_event(event))


def _event(event: CacheEvent) -> KVEvent:
    return KVEvent(
        replica=event.place,
        epoch=event.epoch,
        number=event.number,
        block_size=event.block_size,
        is_whole=event.is_whole,
        stored=[digest.hex() for digest in event.stored],
        evicted=[digest.hex() for digest in event.evicted],
    )
