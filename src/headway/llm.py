"""The offline API: `LLM(model).generate(prompts, SamplingParams(...))`."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from headway.config import OFFLINE_OPTIONS, EngineConfig
from headway.core.request_options import RequestOptions
from headway.engine.engine_thread import EngineThread
from headway.engine.llm_engine import LLMEngine
from headway.engine.prompt_forms import Prompt, as_prompts, one_each, options_each, take_options
from headway.engine.request_preparer import PreparedRequest
from headway.errors import InvalidRequestError, RequestFailedError
from headway.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    EmbeddingRequestOutput,
    GrowingOutput,
    RequestOutput,
    check_dimensions,
)
from headway.sampling_params import BeamSearchParams, SamplingParams
from headway.tokenizer import Tokenizer

Message = Mapping[str, Any]
_BAR_S = 0.1  # how often a progress bar is drawn while nothing ends


class LLM:
    """A model in this process. Options are those of `headway.config`, as keywords. The default is the embedded model.

    >>> llm = LLM()
    >>> llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text

    It may be used from several threads, and several calls and streams may run at once: they share the batch, and each
    gets its own outputs. A background thread steps the engine while any of them waits. A call interrupted by Ctrl-C or
    another exception leaves no requests behind.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> None:
        """`progress(done_bytes, total_bytes)` is called while weights are read. By default a progress bar is drawn on a
        terminal."""
        config = EngineConfig.from_options(model=model, **{**OFFLINE_OPTIONS, **options})
        with _Bar("Loading", is_shown=sys.stderr.isatty(), stays=False) as bar:

            def show(done: int, total: int) -> None:
                bar.draw(done, total, f"of {total / 2**20:,.0f} MiB")

            self.engine = LLMEngine.from_config(config, progress=progress or show)
        self._thread = EngineThread(self.engine)
        self._ids = itertools.count()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `InvalidRequestError` if it has none."""
        return self.engine.preparer.get_tokenizer()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        use_tqdm: bool | None = None,
        **named_options: Any,
    ) -> list[RequestOutput]:
        """Complete one or many prompts, batched. Outputs are in the order of the prompts. A prompt is text, token ids
        (a list, or an array or tensor with one dimension), or a dict with `prompt` or `prompt_token_ids`.

        All requests are checked before any runs. A request that fails later does not end the others: when all are done,
        `RequestFailedError` is raised with their outputs. `use_tqdm`: whether to show a progress bar; the default is to
        show it on a terminal.

        `options` inform the scheduler and the cache about a request. Give one record for all prompts, or a list with
        one per prompt. Each field of `RequestOptions` is also a keyword here, with one value or one per prompt:
        `generate(prompts, priority=[2, 1])`. `scheduling_policy` determines which options are used; the others have no
        effect. `cache_salt` and `cache_ttl_s` are always used: only requests with the same salt share cached prefixes,
        and a prefix stays cached for the given time if at all possible. If `predicted_tokens` is not given,
        `length_predictor` predicts it, if there is one.
        """
        many = as_prompts(prompts)
        params = one_each(sampling_params or SamplingParams(), len(many), "sampling_params", SamplingParams)
        each = options_each(len(many), options, named_options)
        requests = [
            self.engine.prepare(self._next_id(), prompt, own_params, own_options)
            for prompt, own_params, own_options in zip(many, params, each, strict=True)
        ]
        return self._run(requests, use_tqdm)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: bool | None = None
    ) -> list[BeamSearchOutput]:
        """Return the `beam_width` most likely continuations of each prompt, the best first.

        `generate` does the same with `SamplingParams(use_beam_search=True, ...)`. This method returns the results in
        vLLM's form.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequestError(f"params must be BeamSearchParams, not {type(params).__name__}.", param="params")
        outputs = self.generate(prompts, params.sampling_params(), use_tqdm=use_tqdm)
        return [BeamSearchOutput([self._sequence(output, each) for each in output.outputs]) for output in outputs]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        use_tqdm: bool | None = None,
        **more: Any,
    ) -> list[RequestOutput]:
        """Answer one or several conversations. `tools`, in OpenAI's format, become part of the prompts; tool calls in
        an answer are not parsed. Keywords that are fields of `RequestOptions` are as in `generate`. All others go to
        the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        named_options = take_options(more)
        prompts = [self.chat_prompt(each, tools=tools, **more) for each in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, options=options, use_tqdm=use_tqdm, **named_options)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str = "mean",
        dimensions: int | None = None,
        normalize: bool = True,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        use_tqdm: bool | None = None,
        **named_options: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Return an embedding of each prompt: the mean of the model's final hidden states (`pooling="mean"`) or the
        last one ("last"), cut to `dimensions` numbers and, with `normalize`, scaled to length 1. Prompts and options
        are as in `generate`."""
        check_dimensions(dimensions, self.engine.model_config.hidden_size)
        outputs = self.generate(
            prompts, SamplingParams.for_embedding(pooling), options=options, use_tqdm=use_tqdm, **named_options
        )
        return [EmbeddingRequestOutput.of(each, dimensions=dimensions, normalize=normalize) for each in outputs]

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_options: Any,
    ) -> list[int]:
        """The token ids that the model's chat template makes from a conversation."""
        return self.engine.preparer.chat_token_ids(messages, tools=tools, **template_options)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        options: RequestOptions | None = None,
        **named_options: Any,
    ) -> Stream:
        """Yield the growing output of one request after each token. Closing or dropping the iterator early aborts the
        request, even if nothing was read. Options are as in `generate`."""
        (own_options,) = options_each(1, options, named_options)
        request_id = self._next_id() if request_id is None else request_id
        request = self.engine.prepare(request_id, prompt, sampling_params or SamplingParams(), own_options)
        stream = Stream(self._thread, request)
        try:
            stream.start()
        except BaseException:
            stream.close()
            raise
        return stream

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request of any thread. Returns its output so far, or `None` if there is no such request. A stream ends
        there; `generate` returns the output so far, with the finish reason "abort"."""
        return self._thread.abort(request_id)

    def shutdown(self) -> None:
        """Free the model and its cache. Calls that wait in other threads get an error."""
        self._thread.stop()
        self.engine.shutdown()

    def _next_id(self) -> str:
        """The next number that is not the id of a live request."""
        return next(request_id for number in self._ids if not self.engine.is_live(request_id := str(number)))

    def _sequence(self, output: RequestOutput, completion: CompletionOutput) -> BeamSearchSequence:
        assert completion.cumulative_logprob is not None
        prompt, tokenizer = output.prompt, self.engine.tokenizer
        if prompt is None:
            prompt = "" if tokenizer is None else tokenizer.decode(output.prompt_token_ids)
        return BeamSearchSequence(
            tokens=output.prompt_token_ids + completion.token_ids,
            text=prompt + completion.text,
            cum_logprob=completion.cumulative_logprob,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )

    def _run(self, requests: Sequence[PreparedRequest], use_tqdm: bool | None) -> list[RequestOutput]:
        """Run these requests and wait until all are done. If anything is raised, even by Ctrl-C, they are all
        aborted."""
        done: dict[str, RequestOutput] = {}
        errors: dict[str, str] = {}
        is_shown = sys.stderr.isatty() if use_tqdm is None else use_tqdm
        ticket = self._thread.open_call()
        try:
            ticket.submit(requests, stream=False)
            started_s, num_tokens_before = time.perf_counter(), self._thread.num_tokens
            with _Bar("Requests", is_shown=is_shown, stays=True) as bar:
                while len(done) < len(requests):
                    delivery = ticket.take(timeout_s=_BAR_S if is_shown else None)
                    if delivery is not None:
                        done |= {output.request_id: output for output in delivery.outputs}
                        errors |= delivery.errors
                    rate = (self._thread.num_tokens - num_tokens_before) / (time.perf_counter() - started_s)
                    bar.draw(
                        len(done),
                        len(requests),
                        f"{len(done)}/{len(requests)}, {rate:,.0f} tok/s, {self._thread.num_running} running",
                    )
        finally:
            ticket.close()
        outputs = [done[request.request_id] for request in requests]
        if errors:
            raise RequestFailedError(errors, outputs)
        return outputs


class Stream(Iterator[RequestOutput]):
    """The growing outputs of one request. It computes only while this or another caller waits for an output."""

    def __init__(self, thread: EngineThread, request: PreparedRequest) -> None:
        self._ticket = thread.open_stream(num_completions=request.params.n)
        self._request = request
        self._grown = GrowingOutput(request.params.n)
        self._is_over = False

    def start(self) -> None:
        """Queue the request."""
        self._ticket.submit([self._request], stream="delta")

    def __next__(self) -> RequestOutput:
        if self._is_over:
            raise StopIteration
        try:
            return self._next()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Abort the request if it has not ended. Can be called again."""
        self._is_over = True
        self._ticket.close()

    def _next(self) -> RequestOutput:
        delivery = self._ticket.take()
        assert delivery is not None
        if not delivery.outputs:  # aborted
            raise StopIteration
        (delta,) = delivery.outputs
        self._is_over = delta.finished
        self._grown.add(delta)
        output = self._grown.output()
        if delivery.errors:
            raise RequestFailedError(delivery.errors, [output])
        return output


class _Bar:
    """A progress bar on stderr. It is not one of tqdm's, because these share locks with all bars of the process. Ctrl-C
    at a bad moment would leave a lock taken, and the next call in another thread would wait for ever."""

    def __init__(self, name: str, *, is_shown: bool, stays: bool) -> None:
        self._name, self._is_shown, self._stays = name, is_shown, stays
        self._drawn = ""
        self._next_s = 0.0

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            sys.stderr.write("\n" if self._stays else f"\r{' ' * len(self._drawn)}\r")
            sys.stderr.flush()

    def draw(self, done: int, total: int, note: str) -> None:
        """Draw the bar, but not more often than it can be read. The end is always drawn."""
        now_s = time.perf_counter()
        if self._is_shown and (now_s >= self._next_s or done == total):
            self._next_s = now_s + _BAR_S
            line = f"{self._name}: {done / max(total, 1):4.0%} {note}"
            sys.stderr.write(f"\r{line.ljust(len(self._drawn))}")
            sys.stderr.flush()
            self._drawn = line
