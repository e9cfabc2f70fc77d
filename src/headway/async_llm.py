"""The API for asyncio programs: `async for output in AsyncLLM(model).generate(prompt, SamplingParams(...))`.

generate ──► check, tokenise (in threads) ──► predict a length, if wanted ──► engine process
                                                                                   │ deltas
async for ◄── one RequestOutput for all that has come since the last ◄─────────────┘
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from headway.async_outputs import OutputBuilder
from headway.config import EngineConfig
from headway.core.request_options import RequestOptions
from headway.engine.prompt_forms import Prompt, num_chars_of, options_each, take_options
from headway.engine.request_preparer import PreparedRequest, RequestPreparer
from headway.errors import EngineUnavailableError, InvalidRequestError
from headway.front.deployment import Deployment
from headway.front.engine_client import EngineClient
from headway.front.roles import Roles
from headway.front.streams import RequestStream
from headway.loader.chosen_model import load_model_tokenizer
from headway.outputs import EmbeddingRequestOutput, RequestOutput, check_dimensions
from headway.predict import AnswerLengths, PromptView
from headway.predict.prediction_thread import Ended, PredictionThread
from headway.sampling_params import SamplingParams
from headway.tokenizer import Tokenizer
from headway.tokenizer.tokenizer import TokenizerThreads
from headway.wire.messages import AddRequest, Delta

Message = Mapping[str, Any]

NOT_STARTED = "the engine has not been started: await start(), or use 'async with'"


class AsyncLLM:
    """A model in a separate process, for programs with an event loop. Options are those of `LLM`.

    >>> async with AsyncLLM() as llm:
    ...     async for output in llm.generate("The capital of France is", SamplingParams(max_tokens=8)):
    ...         print(output.outputs[0].text)

    Any number of requests may run at once: they share the batch. An `AsyncLLM` may only be used in the event loop in
    which it was started. If the engine process dies or hangs, it is restarted, and requests continue after the tokens
    that they have.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        tokenizer_threads: int = 2,
        engine_factory: str | None = None,
        resume: bool = True,
        replicas: int = 1,
        router: str = "prefix-aware",
        roles: str | None = None,
        **options: Any,
    ) -> None:
        """Check the options without starting anything. The default is the embedded model.

        `replicas`: the number of engine processes, each with a GPU or a share of the cores; `router` divides requests
        among them. `roles`, such as "prefill=1,decode=2", instead divides prefill and decode among processes. Without
        `resume`, requests fail when their process ends.

        `engine_factory`, "module:function", builds the engine in place of the usual one, for tests.
        """
        given = {name: _plain(value) for name, value in {"model": model, **options}.items()}
        self._config = EngineConfig.from_options(**given)
        deployment = Deployment(
            given,
            factory=engine_factory,
            log_level=_log_level(),
            num_replicas=replicas,
            router=router,
            roles=None if roles is None else Roles.parse(roles),
        )
        self._client = EngineClient(deployment, resumes=resume)
        self._threads = TokenizerThreads(tokenizer_threads)
        self._preparer: RequestPreparer | None = None
        self._lengths: PredictionThread | None = None
        self._has_begun = False
        self._live: dict[str, _LiveRequest] = {}
        self._ids = itertools.count()
        self._engine_ids = itertools.count()

    # ---- its life -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine process and wait until it takes requests. Raises `EngineStartError` or `ModelError` if it
        cannot start. May be called only once; `async with` calls it."""
        if self._has_begun:
            raise RuntimeError("An AsyncLLM can be started only once.")
        self._has_begun = True
        starting = asyncio.create_task(self._client.start())
        try:
            lengths = AnswerLengths.from_config(self._config.prediction)
            self._lengths = None if lengths is None else PredictionThread(lengths)
            tokenizer = await asyncio.to_thread(load_model_tokenizer, self._config.model)
            await starting
        except BaseException:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await self.shutdown()
            raise
        info = self._client.info
        assert info is not None
        self._preparer = RequestPreparer(
            tokenizer=tokenizer, vocab_size=info.vocab_size, max_model_len=info.max_model_len
        )

    async def shutdown(self, drain_s: float = 0.0) -> None:
        """End the engine process after its requests have ended, or after `drain_s` seconds. Requests left then fail
        with `RequestFailedError`. Can be called again."""
        await self._client.shutdown(drain_s)
        self._threads.close()
        if self._lengths is not None:
            await asyncio.to_thread(self._lengths.close)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    @property
    def is_ready(self) -> bool:
        """Whether requests are currently accepted and make progress."""
        return self._preparer is not None and self._client.health.ok

    async def check_health(self) -> None:
        """Raise `EngineUnavailableError`, with the reason, unless `is_ready`."""
        if not self.is_ready:
            raise EngineUnavailableError(self._client.health.reason or NOT_STARTED)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `InvalidRequestError` if it has none."""
        return self._started().get_tokenizer()

    # ---- requests -------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        options: RequestOptions | None = None,
        **named_options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the growing output of one prompt; the last output has `finished` set. Prompt and options are as in
        `LLM.generate`. A reader that is slower than the engine gets fewer outputs but no less content.

        An invalid request raises `InvalidRequestError` before anything runs. A request that fails later raises
        `RequestFailedError`, with its output so far. If the returned tokens are known only at the end (`best_of`,
        `use_beam_search`), there is a single output. Closing or dropping the generator, or cancelling the task that
        waits for it, aborts the request.
        """
        (own_options,) = options_each(1, options, named_options)
        return self._run(lambda: prompt, num_chars_of(prompt), sampling_params, request_id, own_options)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: RequestOptions | None = None,
        **more: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation. `tools`, in OpenAI's format, become part of the prompt. Keywords that are not options
        go to the model's chat template. Everything else is as in `generate`."""
        (own_options,) = options_each(1, options, take_options(more))

        def chat_prompt() -> list[int]:
            return self._started().chat_token_ids(messages, tools=tools, **more)

        num_chars = sum(len(str(part)) for part in (*messages, *(tools or ())))
        return self._run(chat_prompt, num_chars, sampling_params, request_id, own_options)

    async def embed(
        self,
        prompt: Prompt,
        *,
        pooling: str = "mean",
        dimensions: int | None = None,
        normalize: bool = True,
        request_id: str | None = None,
        options: RequestOptions | None = None,
        **named_options: Any,
    ) -> EmbeddingRequestOutput:
        """Return the embedding of a prompt, as `LLM.embed` does."""
        self._started()
        assert self._client.info is not None
        check_dimensions(dimensions, self._client.info.hidden_size)
        params = SamplingParams.for_embedding(pooling)
        outputs = [each async for each in self.generate(prompt, params, request_id, options=options, **named_options)]
        return EmbeddingRequestOutput.of(outputs[-1], dimensions=dimensions, normalize=normalize)

    async def abort(self, request_id: str) -> None:
        """End a request. Its generator yields a last output with the finish reason "abort". An id that is not live is
        ignored."""
        live = self._live.get(request_id)
        if live is not None:
            live.abort()

    async def _run(
        self,
        make_prompt: Callable[[], Prompt],
        num_chars: int,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        options: RequestOptions,
    ) -> AsyncGenerator[RequestOutput, None]:
        preparer = self._started()
        live = self._enter(request_id)
        params = SamplingParams() if sampling_params is None else sampling_params

        def prepare() -> PreparedRequest:
            return preparer.prepare(live.request_id, make_prompt(), params, options)

        prediction: _Prediction | None = None
        answer: OutputBuilder | None = None
        try:
            request = await self._threads.run(prepare, num_chars=num_chars)
            answer = OutputBuilder(request)
            prediction = await self._predict(request)
            if live.is_aborted:
                yield answer.take([live.last_delta])
                return
            guess = None if prediction is None else prediction.num_tokens
            engine_id = f"{live.request_id}-{next(self._engine_ids)}"
            live.stream = self._client.submit(_message(engine_id, request, guess))
            async for deltas in live.stream:
                news = [delta for delta in deltas if delta.progress is None]
                if news:
                    yield answer.take(news)
        finally:
            del self._live[live.request_id]
            if live.stream is not None:
                live.stream.close()
            if prediction is not None and answer is not None:
                self._note_lengths(prediction, answer)

    def _started(self) -> RequestPreparer:
        if self._preparer is None:
            raise EngineUnavailableError(NOT_STARTED)
        return self._preparer

    def _enter(self, request_id: str | None) -> _LiveRequest:
        if request_id is None:
            request_id = next(own for number in self._ids if (own := str(number)) not in self._live)
        if not isinstance(request_id, str) or not request_id:
            raise InvalidRequestError(f"request_id must be a non-empty string, not {request_id!r}.", param="request_id")
        if request_id in self._live:
            raise InvalidRequestError(f"Request id '{request_id}' is already in use.", param="request_id")
        live = self._live[request_id] = _LiveRequest(request_id)
        return live

    async def _predict(self, request: PreparedRequest) -> _Prediction | None:
        """Predict a request's length. Returns None for a beam search, or if lengths are neither predicted nor
        logged."""
        if self._lengths is None or request.params.use_beam_search:
            return None
        arrival_s = time.time()
        if request.options.predicted_tokens is not None:
            return _Prediction(request.view, request.options.predicted_tokens, arrival_s)
        (guess,) = await self._lengths.predict([request.view])
        return _Prediction(request.view, guess, arrival_s)

    def _note_lengths(self, prediction: _Prediction, answer: OutputBuilder) -> None:
        assert self._lengths is not None
        for completion in answer.completions:
            reason = completion.finish_reason or "abort"
            ended = Ended(prediction.prompt, len(completion.token_ids), reason, prediction.arrival_s)
            self._lengths.note_end(ended)


@dataclass(frozen=True, slots=True)
class _Prediction:
    """The predicted length of a prompt's completions."""

    prompt: PromptView
    num_tokens: float | None
    arrival_s: float
    """In seconds since 1970."""


class _LiveRequest:
    """A request whose generator is running."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.stream: RequestStream | None = None
        self.is_aborted = False

    @property
    def last_delta(self) -> Delta:
        """The delta that its reader gets when it is aborted."""
        return Delta(self.request_id, finish_reason="abort", is_last=True)

    def abort(self) -> None:
        self.is_aborted = True
        if self.stream is not None:
            self.stream.end(self.last_delta)


def _message(request_id: str, request: PreparedRequest, guess: float | None) -> AddRequest:
    """The request as a message for the engine process. Unlike the caller's id, `request_id` is never reused, so that
    deltas still in flight for an aborted request cannot reach a later one."""
    options = request.options
    if guess is not None:
        options = dataclasses.replace(options, predicted_tokens=guess)
    return AddRequest(request_id, list(request.prompt_token_ids), request.params, options)


def _plain(value: Any) -> Any:
    """Convert a path to text, which a message can carry."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _log_level() -> str:
    """The log level for the engine process: that of this process."""
    level = logging.getLogger("headway").getEffectiveLevel()
    return next((name for name, value in logging.getLevelNamesMapping().items() if value == level), "WARNING")
