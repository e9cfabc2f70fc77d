"""One HTTP request in the engine: it is submitted, its deltas are read and counted, and it is always cleaned up.

A `Generation` is entered, iterated and exited. Exiting early, for any reason, aborts what is still running. Each of
the `n` completions of each prompt is a choice of the answer; the `index` of a delta is the choice it belongs to.

A request that cannot stream may have more sequences than choices. Until it ends, the engine reports only how many of
them have started and how many tokens they have.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from http import HTTPStatus
from types import TracebackType
from typing import Self

from headway.errors import EngineUnavailableError
from headway.front.streams import RequestStream, merged
from headway.outputs import SilentProgress
from headway.predict import PromptView
from headway.predict.prediction_thread import Ended, Guesses, PredictionThread
from headway.server.admission.queue_limits import Reservation
from headway.server.api.api_errors import ApiError, as_sent, from_delta, unavailable
from headway.server.api.jobs import Job
from headway.server.api.prompts import Prompt
from headway.server.api.response_models import PromptTokensDetails, Usage
from headway.server.api.wait_report import AnswerMetrics, WaitReport
from headway.server.http.draining import shutting_down
from headway.server.metrics.access_log import AccessRecord
from headway.server.metrics.server_metrics import RequestShape, ServerMetrics
from headway.server.services import Services
from headway.wire.messages import AddRequest, Delta


class Generation:
    """The deltas of one request, for a single reader. Raises `ApiError` if it ends before all choices are complete."""

    def __init__(
        self,
        job: Job,
        services: Services,
        reservation: Reservation,
        record: AccessRecord,
        *,
        id_prefix: str,
        forecast: Forecast | None = None,
    ) -> None:
        self.id = f"{id_prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.job = job
        self._services = services
        self._metrics = services.metrics
        self._reservation = reservation
        self._record = record
        self._forecast = forecast
        self._streams: list[RequestStream] = []
        self._num_tokens = [0] * job.num_choices
        self._first_s: list[float | None] = [None] * job.num_choices
        self._last_s = [0.0] * job.num_choices
        self._num_output_tokens = 0
        self._has_first = False
        self._has_started = [False] * len(job.prompts)
        self._num_unfinished = job.num_choices
        self._num_cached_tokens = 0
        self._clock = asyncio.timeout(None)
        self.wait = WaitReport(record, services.metrics, has_output=not job.hide_output)
        salt = services.cache_salt(job.options.cache_salt, key=record.key)
        tenant = services.tenant(job.options.tenant, key=record.key)
        self._options = dataclasses.replace(job.options, cache_salt=salt, tenant=tenant)
        record.user = job.options.tenant or None
        record.stream = job.stream
        record.params = job.params
        record.num_prompt_tokens = job.num_prompt_tokens

    @property
    def usage(self) -> Usage:
        """Token counts so far, including those of sequences that are not returned."""
        prompt, output = self.job.num_prompt_tokens, 0 if self.job.hide_output else self._num_output_tokens
        return Usage(prompt, output, prompt + output, PromptTokensDetails(self._num_cached_tokens))

    async def __aenter__(self) -> Self:
        await self._clock.__aenter__()
        self._set_clock(self._services.config.queue_ttl_s)
        try:
            self._reservation.follow(self)
            for number, prompt in enumerate(self.job.prompts):
                request_id = self.id if len(self.job.prompts) == 1 else f"{self.id}-{number}"
                self._streams.append(self._submit(self._message(request_id, number, prompt)))
        except BaseException:
            self._close()
            self._clock.reschedule(None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        self._record.num_output_tokens = self._num_output_tokens
        try:
            await self._clock.__aexit__(kind, error, trace)
        except TimeoutError:
            raise self._out_of_time() from None

    @property
    def has_begun(self) -> bool:
        """Whether the engine has computed anything for this request."""
        return any(stream.has_begun for stream in self._streams)

    def drop(self) -> None:
        """End this request from another task that needs its place in the queue. The reader then raises the
        reservation's error."""
        for stream in self._streams:
            stream.end(Delta(stream.request_id, finish_reason="abort", is_last=True))

    async def __aiter__(self) -> AsyncIterator[list[Delta]]:
        if len(self._streams) == 1:
            async for deltas in self._streams[0]:
                self._note_forecasts()
                self._account(deltas)
                yield deltas
        else:
            async for number, deltas in merged(self._streams):
                self._note_forecasts()
                for delta in deltas:
                    delta.index += number * self.job.n
                self._account(deltas)
                yield deltas

    @property
    def metrics(self) -> AnswerMetrics | None:
        """The times of the request, which has ended; None if the answer does not show them."""
        if not self._services.config.enable_per_request_metrics:
            return None
        pairs = [(first_s, last_s) for first_s, last_s in zip(self._first_s, self._last_s) if first_s is not None]
        num_gaps = sum(number - 1 for number in self._num_tokens if number) if pairs else 0
        return self.wait.measured(
            num_gaps=num_gaps,
            gaps_s=sum(last_s - first_s for first_s, last_s in pairs),
            num_cached_tokens=self._num_cached_tokens,
        )

    def _note_forecasts(self) -> None:
        """Take over the forecasts when all have come."""
        if self._has_first or self.wait.expected_first_s is not None:
            return
        forecasts = [stream.forecast for stream in self._streams if stream.forecast is not None]
        if len(forecasts) == len(self._streams):
            self.wait.note_forecasts(forecasts, time.perf_counter())
            self._reservation.note_forecast(max(each.first_token_s for each in forecasts))

    def _message(self, request_id: str, number: int, prompt: Prompt) -> AddRequest:
        options = self._options
        if self._forecast is not None:
            options = dataclasses.replace(options, predicted_tokens=self._forecast.predicted[number])
        return AddRequest(request_id, prompt.token_ids, self.job.params, options)

    def _submit(self, request: AddRequest) -> RequestStream:
        try:
            return self._services.gate.submit(request)
        except EngineUnavailableError:
            if self._services.drain.is_refusing:
                raise shutting_down() from None
            raise

    def _account(self, deltas: list[Delta]) -> None:
        """Count tokens and measure latencies. This runs for every token of every stream."""
        now_s = time.perf_counter()
        for delta in deltas:
            num_tokens = len(delta.token_ids)
            if delta.progress is not None:
                self._note_progress(delta.index, delta.progress, now_s)
            elif num_tokens:
                index = delta.index
                self._num_tokens[index] += num_tokens
                if not self.job.is_silent:
                    self._num_output_tokens += num_tokens
                    self._note_tokens(index, num_tokens, now_s)
            if delta.finish_reason is not None:
                self._note_end(delta, now_s)
            if self.job.hide_output:
                _hide(delta)

    def _note_tokens(self, index: int, num_tokens: int, now_s: float) -> None:
        if self._first_s[index] is None:
            self._first_s[index] = now_s
            self._note_started(index, 1, now_s)
        else:
            self._metrics.observe_tokens(now_s - self._last_s[index], num_tokens)
        self._last_s[index] = now_s

    def _note_progress(self, index: int, progress: SilentProgress, now_s: float) -> None:
        """Count tokens that are not delivered before the end. The time between them is not measured."""
        self._num_output_tokens += progress.num_tokens
        if progress.num_started:
            self._note_started(index, progress.num_started, now_s)

    def _note_started(self, index: int, num_started: int, now_s: float) -> None:
        """Record that `num_started` sequences of this choice's prompt got their first token and left the queue."""
        for _ in range(num_started):
            self._metrics.observe_first_token(now_s - self._record.started_s)
        number = index // self.job.n
        is_first_of_prompt, self._has_started[number] = not self._has_started[number], True
        num_tokens = len(self.job.prompts[number].token_ids) if is_first_of_prompt else 0
        self._reservation.note_started(num_started, num_tokens)
        if not self._has_first:
            self._has_first = True
            self._record.first_token_s = now_s
            self.wait.note_first_token(now_s)
            self._set_clock(self._services.config.request_timeout_s)

    def _note_end(self, delta: Delta, now_s: float) -> None:
        index, reason = delta.index, str(delta.finish_reason)
        self._num_unfinished -= 1
        self.wait.note_end(now_s)
        self._metrics.finished[reason] += 1
        self._record.finish_reasons.append(reason)
        if self._forecast is not None:
            self._forecast.note_end(index, self._num_tokens[index], reason)
        if delta.timings is not None:
            self._num_cached_tokens += delta.timings.num_cached_tokens
            self._metrics.observe_request(self._shape(index // self.job.n), delta.timings)
            self._record.note_timings(delta.timings)
        if reason == "error":
            if delta.error_status == HTTPStatus.SERVICE_UNAVAILABLE and self._services.drain.is_refusing:
                raise shutting_down()
            error = from_delta(delta)
            raise error if self.job.constraint_path is None else as_sent(error, self.job.constraint_path)
        if reason == "abort":
            self._reservation.check()
            raise unavailable("The server ended the request before it was complete.", code="aborted")
        self._metrics.e2e_latency.observe(now_s - self._record.started_s)
        self._metrics.generation_length.observe(self._num_tokens[index])
        first_s = self._first_s[index]
        if first_s is not None and self._num_tokens[index] > 1:
            self._metrics.time_per_output_token.observe((now_s - first_s) / (self._num_tokens[index] - 1))

    def _shape(self, number: int) -> RequestShape:
        """Return what the prompt of this number asked for and got."""
        job = self.job
        completions = self._num_tokens[number * job.n : (number + 1) * job.n]
        return RequestShape(len(job.prompts[number].token_ids), job.n, job.params.max_tokens, max(completions))

    def _set_clock(self, limit_s: float) -> None:
        """Set the timeout to `limit_s` after arrival or to the limit of the whole request, whichever is earlier."""
        total_s = self._services.config.request_timeout_s
        limits = [limit for limit in (limit_s, total_s) if limit > 0]
        spent_s = time.perf_counter() - self._record.started_s
        now_s = asyncio.get_running_loop().time()
        self._clock.reschedule(now_s + max(0.0, min(limits) - spent_s) if limits else None)

    def _out_of_time(self) -> ApiError:
        config = self._services.config
        spent_s = time.perf_counter() - self._record.started_s
        if not self._has_first and not 0 < config.request_timeout_s <= spent_s:
            return unavailable(
                f"The request waited for {config.queue_ttl_s:g} s without a token.", code="queue_timeout"
            )
        return ApiError(504, f"The request took longer than {config.request_timeout_s:g} s.", code="request_timeout")

    def _close(self) -> None:
        for stream in self._streams:
            stream.close()
        self._metrics.finished["abort"] += self._num_unfinished
        self._record.finish_reasons += ["abort"] * self._num_unfinished
        self._num_unfinished = 0
        if self._forecast is not None:
            self._forecast.close(self._num_tokens)


def _hide(delta: Delta) -> None:
    """Remove a token that the client did not ask for."""
    delta.text, delta.token_ids, delta.logprobs, delta.stop_reason = "", [], None, None
    if delta.finish_reason is not None:
        delta.finish_reason = "length"


# ---- length predictions of a request and their errors ---------------------------------------------------------------


class Forecast:
    """The predicted lengths of one HTTP request's completions, compared with their actual lengths.

    Each prompt of the request has `n` completions. Choices are numbered across all prompts.
    """

    def __init__(
        self,
        prompts: Sequence[PromptView],
        predicted: Guesses,
        *,
        n: int,
        thread: PredictionThread,
        metrics: ServerMetrics,
        arrival_s: float,
    ) -> None:
        self.predicted = predicted
        """Predicted output tokens for the completions of each prompt; None if unknown."""
        self._prompts = prompts
        self._n = n
        self._thread = thread
        self._metrics = metrics
        self._arrival_s = arrival_s
        self._unfinished = set(range(n * len(prompts)))

    def note_end(self, index: int, num_tokens: int, finish_reason: str) -> None:
        """Record that a choice has ended. Call this once for each choice."""
        self._unfinished.discard(index)
        number = index // self._n
        self._thread.note_end(Ended(self._prompts[number], num_tokens, finish_reason, self._arrival_s))
        predicted = self.predicted[number]
        if predicted is not None and finish_reason in ("stop", "length"):
            self._metrics.observe_prediction_error(abs(math.log(predicted / max(num_tokens, 1))))

    def close(self, num_tokens: list[int]) -> None:
        """Record the unfinished choices as aborted. `num_tokens` has the number of tokens of each choice."""
        for index in sorted(self._unfinished):
            self.note_end(index, num_tokens[index], "abort")


async def forecast(
    prompts: Sequence[PromptView], *, n: int, thread: PredictionThread, metrics: ServerMetrics, arrival_s: float
) -> Forecast:
    """Predict the lengths of `n` completions of each prompt. `arrival_s` is when the request came, as Unix time."""
    started_s = time.perf_counter()
    predicted = await thread.predict(prompts)
    if thread.predicts:
        metrics.observe_prediction(time.perf_counter() - started_s, num_missing=predicted.count(None))
    return Forecast(prompts, predicted, n=n, thread=thread, metrics=metrics, arrival_s=arrival_s)
