"""/v1/chat/completions and /v1/completions: raw ASGI, because a stream sends hundreds of thousands of messages.

    body ─► record ─► a place in the queue ─► tokens ─► forecast ─► engine ─► one JSON answer, or a stream of events

Which place that is depends on the record's class, so the JSON is parsed even if there is none: the tokenizer, which
takes far longer, is spared.

Nothing of an answer is sent before its first token is there, so whatever goes wrong until then has a status of its own;
what goes wrong later is the last event of the stream. A client that leaves, at any point, cancels everything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Generic, TypeVar

from starlette.types import Receive, Scope, Send

from headway.server.admission.forecast import forecast
from headway.server.admission.scheduling import Scheduling, scheduling_of
from headway.server.api.api_errors import from_exception
from headway.server.api.generation import Generation
from headway.server.api.jobs import Job, chat_job, completion_job
from headway.server.api.requests import ChatCompletionRequest, CompletionRequest, GenerationRequest
from headway.server.api.sse import DONE, ChatEvents, CompletionEvents, event
from headway.server.api.whole_answer import chat_answer, completion_answer, echoed_texts
from headway.server.http.asgi import record_of, send_bytes, until_disconnect
from headway.server.metrics.access_log import AccessRecord
from headway.server.services import Services

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


_R = TypeVar("_R", bound=GenerationRequest)


class _GenerationRoute(ABC, Generic[_R]):
    """What both endpoints share; they differ in how a request becomes a job, and a job an answer."""

    ID_PREFIX: ClassVar[str]
    _record_type: type[_R]

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._services.bodies.read(scope, receive)
        await until_disconnect(receive, self._answer(body, record_of(scope), send))

    async def _answer(self, body: bytes, record: AccessRecord, send: Send) -> None:
        services = self._services
        request = await services.bodies.parse(body, self._record_type)
        scheduling = scheduling_of(request, services.classes)
        if len(services.classes) > 1:
            record.service_class = scheduling.service_class.name
        with services.reserve(scheduling, body_bytes=len(body)) as reservation:
            job = await self._job(request, scheduling)
            reservation.settle(num_requests=job.num_sequences, num_tokens=job.num_prompt_tokens)
            foreseen = await forecast(job, services, arrival_s=record.time_s)
            generation = Generation(job, services, reservation, record, id_prefix=self.ID_PREFIX, forecast=foreseen)
            if job.stream:
                await self._stream(generation, record, send)
            else:
                await send_bytes(send, await self._whole(generation))

    async def _stream(self, generation: Generation, record: AccessRecord, send: Send) -> None:
        events = await self._events(generation)
        started = False
        try:
            async with generation:
                async for deltas in generation:
                    data = events.write(deltas) if started else events.begin() + events.write(deltas)
                    if not started:
                        started = True
                        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                    if data:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
            last = events.end()
        except Exception as error:
            if not started:
                raise
            failure = from_exception(error)
            record.note_error(failure)
            last = event(failure.body) + DONE
        await send({"type": "http.response.body", "body": last})

    @abstractmethod
    async def _job(self, request: _R, scheduling: Scheduling) -> Job: ...

    @abstractmethod
    async def _whole(self, generation: Generation) -> bytes: ...

    @abstractmethod
    async def _events(self, generation: Generation) -> ChatEvents | CompletionEvents: ...


class ChatCompletions(_GenerationRoute[ChatCompletionRequest]):
    """POST /v1/chat/completions."""

    ID_PREFIX = "chatcmpl"
    _record_type = ChatCompletionRequest

    async def _job(self, request: ChatCompletionRequest, scheduling: Scheduling) -> Job:
        return await chat_job(request, scheduling, self._services)

    async def _whole(self, generation: Generation) -> bytes:
        return await chat_answer(generation, self._services.model_name, self._services.prompts)

    async def _events(self, generation: Generation) -> ChatEvents:
        return ChatEvents(generation, self._services.model_name, self._services.prompts)


class Completions(_GenerationRoute[CompletionRequest]):
    """POST /v1/completions."""

    ID_PREFIX = "cmpl"
    _record_type = CompletionRequest

    async def _job(self, request: CompletionRequest, scheduling: Scheduling) -> Job:
        return await completion_job(request, scheduling, self._services)

    async def _whole(self, generation: Generation) -> bytes:
        return await completion_answer(generation, self._services.model_name, self._services.prompts)

    async def _events(self, generation: Generation) -> CompletionEvents:
        echoes = await echoed_texts(generation, self._services.prompts)
        return CompletionEvents(generation, self._services.model_name, self._services.prompts, echoes)
