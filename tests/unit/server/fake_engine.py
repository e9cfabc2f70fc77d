"""An engine client without an engine behind: what it answers is written down by the test, or pushed by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import httpx
import numpy as np
from starlette.types import ASGIApp, Message, Scope

from headway.core.kv.manager import CacheReset
from headway.errors import EngineUnavailableError
from headway.front.engine_client import Health
from headway.front.streams import RequestStream
from headway.front.watch_streams import CacheEvent, CacheStream, SnapshotStream, present_state
from headway.outputs import SilentProgress
from headway.predict.prediction_thread import PredictionThread
from headway.server.admission.service_classes import ONE_CLASS, ServiceClasses
from headway.server.app import create_app
from headway.server.server_config import ServerConfig
from headway.server.services import Services
from headway.structured.helper_jobs import do_job
from headway.structured.helper_processes import Limits
from headway.tokenizer import Tokenizer, tokenizer_from_gguf
from headway.wire.engine_stats import EngineStats
from headway.wire.messages import AddRequest, Delta, EngineReady, RequestForecast, RequestTimings, TokenLogprob
from tests.unit.engine_stats import engine_stats
from tests.unit.tokenizer.small import byte_level_metadata

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
JSON = {"content-type": "application/json"}
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "Hi"}]
NEEDED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    COMPLETIONS: {"prompt": "Hi"},
    EMBEDDINGS: {"input": "Hi"},
    RESPONSES: {"input": "Hi"},
    "/v1/responses/input_tokens": {"input": "Hi"},
    MESSAGES: {"model": "small", "max_tokens": 50, "messages": HI},
    "/v1/messages/count_tokens": {"model": "small", "messages": HI},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1]},
}
"""The least that each API takes."""
BEAMS = {"n": 2, "best_of": 4, "use_beam_search": True}
BEST = {"n": 2, "best_of": 4}
SEARCHES = [BEAMS, BEST]
_T = TypeVar("_T")


def small_tokenizer() -> Tokenizer:
    return tokenizer_with(CHAT_TEMPLATE)


def tokenizer_with(template: str) -> Tokenizer:
    return tokenizer_from_gguf(byte_level_metadata(pre="gpt-2", **{"tokenizer.chat_template": template}))


def infill_tokenizer() -> Tokenizer:
    tokenizer = small_tokenizer()
    tokenizer.backend.add_special_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"])
    return tokenizer


def engine_ready(**changes: Any) -> EngineReady:
    fields: dict[str, Any] = {
        "model": "small",
        "max_model_len": 256,
        "vocab_size": 600,
        "num_blocks": 100,
        "block_size": 16,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "device": "cpu",
        "dtype": "float32",
        "scheduling_policy": "priority",
        "hidden_size": 4,
    }
    return EngineReady(**(fields | changes))


class FakeEngine:
    """Says "Hello world." to everybody, unless `manual`: then deltas come only by `push`."""

    def __init__(self, *, manual: bool = False, words: tuple[str, ...] = ("Hello", " world", ".")) -> None:
        self.info: EngineReady | None = engine_ready()
        self.stats: EngineStats = engine_stats(num_free_blocks=100)
        self.num_restarts = self.num_resumed = 0
        self.replicas: list[Any] = []
        self.prefill_outcomes: dict[str, int] = {}
        self.health = Health(True, "")
        self.requests: list[AddRequest] = []
        self.aborted: list[str] = []
        self.listeners: list[Callable[[EngineStats], None]] = []
        self.streams: dict[str, RequestStream] = {}
        self.forecast: tuple[float, float | None] | None = None
        """What it expects of each request: seconds to the first token, and to the last."""
        self.cached: list[bytes] = []
        self.followers: list[CacheStream] = []
        self.resets: list[bool] = []
        """For each reset of the caches, whether the disk is cleared too."""
        self._manual = manual
        self._words = words

    def submit(self, request: AddRequest, stream: RequestStream | None = None) -> RequestStream:
        if not self.health.ok:
            raise EngineUnavailableError(self.health.reason)
        self.requests.append(request)
        stream = RequestStream(request.request_id, self._abort) if stream is None else stream
        stream.abort_by(self._abort)
        self.streams[request.request_id] = stream
        if self.forecast is not None:
            stream.note_forecast(RequestForecast(request.request_id, *self.forecast))
        if not self._manual:
            asyncio.get_running_loop().call_soon(self._answer, request)
        return stream

    def watch(self, place: int = 0) -> SnapshotStream:
        return SnapshotStream(lambda stream: None)

    def follow_caches(self) -> CacheStream:
        """Of one replica, which holds `cached`."""
        stream = CacheStream(1, self._present_cache, self.followers.remove)
        self.followers.append(stream)
        if not self._manual:
            stream.close()
        return stream

    def _present_cache(self, place: int) -> list[CacheEvent]:
        return present_state(self.cached, place=place, epoch=0, number=6, block_size=16)

    async def reset_caches(self, *, with_disk: bool = False) -> CacheReset:
        self.resets.append(with_disk)
        return CacheReset(5, 2)

    def add_step_listener(self, listener: Callable[[EngineStats], None]) -> None:
        self.listeners.append(listener)

    def push(self, delta: Delta) -> None:
        self.streams[delta.request_id].push(delta)

    async def asked(self, number: int = 1) -> str:
        """When there have been so many requests, the id of the first."""
        await until(lambda: len(self.requests) >= number)
        return self.requests[0].request_id

    async def answer(self, text: str = "a", **more: Any) -> None:
        """A token for the first request, once it is there; `more` is of the delta."""
        self.push(Delta(await self.asked(), text=text, token_ids=[1], **more))

    def _abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def _answer(self, request: AddRequest) -> None:
        """Each of the `n` completions gets the same words, one per delta, as far as `max_tokens` lets it. Those that
        cannot be streamed tell their progress for each word, and give all of them at once."""
        params = request.params
        assert params is not None
        words = self._words[: params.max_tokens]
        reason = "stop" if words == self._words else "length"
        if not params.can_stream:
            width = params.num_choices
            for place in range(len(words)):
                self.push(Delta(request.request_id, progress=SilentProgress(0 if place else width, width)))
        for index in range(params.n):
            for place, word in enumerate(words if params.can_stream else ["".join(words)]):
                is_end = not params.can_stream or place == len(words) - 1
                is_last = is_end and index == params.n - 1
                self.push(
                    Delta(
                        request.request_id,
                        index=index,
                        text=word,
                        token_ids=[300 + place] if params.can_stream else list(range(300, 300 + len(words))),
                        logprobs=None
                        if params.logprobs is None
                        else [_logprobs(300 + place, params.logprobs, params.logprob_token_ids or ())],
                        finish_reason=reason if is_end else None,
                        is_last=is_last,
                        timings=RequestTimings(0.1, 0.2, 0.3, 1, 4) if is_last else None,
                        prompt_logprobs=self._prompt_logprobs(request) if not place and not index else None,
                        embedding=_vector(request) if is_last else None,
                    )
                )

    def _prompt_logprobs(self, request: AddRequest) -> list[list[TokenLogprob] | None] | None:
        assert request.params is not None
        number = request.params.prompt_logprobs
        if number is None:
            return None
        return [None, *(_logprobs(token_id, number) for token_id in request.prompt_token_ids[1:])]


def _vector(request: AddRequest) -> bytes | None:
    """Of length 5 times the number of tokens."""
    assert request.params is not None
    if request.params.pooling is None:
        return None
    number = len(request.prompt_token_ids)
    return np.array([3 * number, 0, 4 * number, 0], dtype=np.float32).tobytes()


def _logprobs(token_id: int, number: int, named: Sequence[int] = ()) -> list[TokenLogprob]:
    """The chosen token is the second best."""
    best = [TokenLogprob(token_id + 1, -0.25, 1, None), TokenLogprob(token_id, -0.5, 2, None)]
    return [best[1], *best[:number], *(TokenLogprob(each, -float(each), None, None) for each in named)]


class HelpersInThreads:
    """Does the jobs of helper processes without processes. Nothing is compiled, and nothing is limited."""

    def prepare(self) -> None: ...

    async def run_async(self, job: bytes, limits: Limits) -> bytes:
        return await asyncio.to_thread(do_job, None, job)

    def close(self) -> None: ...


class FakeServer:
    """The application around a fake engine, with clients for it."""

    def __init__(
        self,
        engine: FakeEngine | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        classes: ServiceClasses = ONE_CLASS,
        lengths: PredictionThread | None = None,
        **options: Any,
    ) -> None:
        self.engine = engine or FakeEngine()
        self.tokenizer = tokenizer or small_tokenizer()
        self.services = Services.create(
            ServerConfig(**options),
            self.engine,
            self.tokenizer,
            model_name="small",
            classes=classes,
            lengths=lengths,
            create_helpers=HelpersInThreads,
        )
        self.app: ASGIApp = create_app(self.services)

    def client(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(app=self.app, raise_app_exceptions=False),
            base_url="http://127.0.0.1",
            **options,
        )

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One request, from outside of any event loop."""

        async def send() -> httpx.Response:
            async with self.client() as client:
                return await client.request(method, path, **options)

        return run(send())

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.call("POST", path, json=body, **options)

    def send(self, path: str, **fields: Any) -> httpx.Response:
        """What the API needs at least, and these fields."""
        return self.post(path, NEEDED[path] | fields)

    def begin(self, path: str, headers: dict[str, str] | None = None, **fields: Any) -> RawClient:
        """The same by a client that may leave; in an event loop."""
        return RawClient(self.app, path, NEEDED[path] | fields, headers)

    def chat(self, content: str = "Hi", **fields: Any) -> httpx.Response:
        return self.send(CHAT, **{"messages": [{"role": "user", "content": content}], **fields})

    def complete(self, prompt: Any = "Hi", **fields: Any) -> httpx.Response:
        return self.send(COMPLETIONS, prompt=prompt, **fields)


def run(work: Awaitable[_T]) -> _T:
    """Drive a coroutine, with an end to it."""

    async def limited() -> _T:
        return await asyncio.wait_for(work, 20)

    return asyncio.run(limited())


def events(response: httpx.Response) -> list[Any]:
    """The JSON of a stream's events; its end is checked."""
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


class RawClient:
    """A client that can leave: drives the application message by message."""

    def __init__(
        self, app: ASGIApp, path: str, body: Any, headers: dict[str, str] | None = None, *, method: str = "POST"
    ) -> None:
        self.sent: list[Message] = []
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        scope: Scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in (JSON | (headers or {})).items()],
            "client": ("test", 1),
        }
        self.task = asyncio.ensure_future(app(scope, self._incoming.get, self._send))  # type: ignore[arg-type]

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    async def leave(self) -> None:
        """Disconnect, and wait until the server has noticed."""
        self._incoming.put_nowait({"type": "http.disconnect"})
        await self.task


async def until(condition: Callable[[], Any]) -> None:
    """Let others work until something is so; `run` has the time limit."""
    while not condition():
        await asyncio.sleep(0.001)
