"""Turns sampled tokens into what a user sees: text, logprobs, stop strings, finish reasons, timings."""

from __future__ import annotations

import dataclasses
import logging
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core import (
    NewRequest,
    PooledPrompt,
    PromptLogprobs,
    RequestUpdate,
    SchedulerOutput,
)
from headway.engine.completion import Completion, position_logprobs
from headway.engine.request_preparer import PreparedRequest
from headway.outputs import (
    CompletionOutput,
    Delivered,
    FinishReason,
    LogprobsOfOnePosition,
    RequestMetrics,
    RequestOutput,
    SilentProgress,
    Streaming,
)
from headway.sampling_params import SamplingParams
from headway.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

OUTPUT_FAILED = "its tokens could not be made into an output"
_NO_PROGRESS = SilentProgress(0, 0)


class _Pool:
    """The mean of the hidden states of a prompt's tokens computed so far. Sums are kept in double precision."""

    def __init__(self) -> None:
        self._next = 0
        self._num_tokens = 0
        self._total: NDArray[np.float64] | None = None

    def add(self, part: PooledPrompt) -> None:
        """Add the next part, or start anew with the first: a preempted request continues where it was or begins again.
        `RuntimeError` if tokens between the parts are missing."""
        new = np.frombuffer(part.total, dtype=np.float32).astype(np.float64)
        if self._total is None or part.start < self._next:
            self._total, self._num_tokens = new, part.num_tokens
        elif part.start == self._next:
            self._total, self._num_tokens = self._total + new, self._num_tokens + part.num_tokens
        else:
            raise RuntimeError(f"hidden states of prompt tokens {self._next} to {part.start} are missing")
        self._next = part.start + part.num_tokens

    def mean(self) -> array[float] | None:
        """Return the mean, or None if the request ended before anything was computed."""
        if self._total is None:
            return None
        return array("f", (self._total / self._num_tokens).astype(np.float32).tobytes())


class _LiveRequest:
    """A request from its arrival until its last completion has ended."""

    def __init__(
        self, request: PreparedRequest, tokenizer: Tokenizer | None, *, stream: Streaming, arrival_time_s: float
    ) -> None:
        self.request = request
        self.stream = stream
        self.tells_progress = not request.params.can_stream
        self.error: str | None = None  # of a completion that has failed
        self._changed: dict[Completion, None] = {}  # in the step that is being processed; for deltas only
        self.completions = [Completion(index, request, tokenizer) for index in range(len(request.children))]
        self.prompt_logprobs: list[LogprobsOfOnePosition | None] | None = (
            None if request.params.prompt_logprobs is None else [None]
        )
        self._pool = None if request.params.pooling is None else _Pool()
        self._has_told_prompt = False
        self._num_cached_tokens = 0
        self._metrics = RequestMetrics(arrival_time_s)
        self._prompt_token_ids = list(request.prompt_token_ids)  # shared by all outputs

    @property
    def is_finished(self) -> bool:
        return None not in [completion.finish_reason for completion in self.completions]

    @property
    def has_tokens(self) -> bool:
        return self._metrics.first_token_s is not None

    @property
    def arrival_time_s(self) -> float:
        return self._metrics.arrival_time_s

    def note_scheduled(self, new: NewRequest, now_s: float) -> bool:
        """Note that one of the request's sequences enters the batch. Only the first time counts; returns whether this
        was it."""
        if self._metrics.first_scheduled_s is not None:
            return False
        self._metrics = dataclasses.replace(self._metrics, first_scheduled_s=now_s)
        self._num_cached_tokens = new.num_computed_tokens
        return True

    def note_prompt_told(self) -> None:
        """Note that everything about the prompt has already been delivered."""
        self._has_told_prompt = True

    def note_changed(self, completion: Completion) -> None:
        """Include this completion in the next delta."""
        self._changed[completion] = None

    def note_failure(self, why: str) -> None:
        """Note that one of the request's completions has failed."""
        self.error = why

    def note_first_token(self, now_s: float) -> None:
        """Note when the request's first token was sampled."""
        self._metrics = dataclasses.replace(self._metrics, first_token_s=now_s)

    def take_prompt_logprobs(self, found: PromptLogprobs, token_text: Callable[[int], str] | None) -> None:
        """Append new prompt logprobs. Positions that are known already, which a preemption or a second completion
        repeats, are skipped."""
        assert self.prompt_logprobs is not None
        new = found.values[max(0, len(self.prompt_logprobs) - found.start) :]
        self.prompt_logprobs.extend(position_logprobs(record, token_text) for record in new)

    def take_pooled(self, part: PooledPrompt) -> None:
        """Add a part of the prompt's hidden states to its pooled vector."""
        assert self._pool is not None
        self._pool.add(part)

    def news(self, now_s: float) -> RequestOutput:
        """The output in the form that the user asked for: a delta or the cumulative state."""
        return self._delta(now_s) if self.stream == "delta" else self._output(now_s)

    def _delta(self, now_s: float) -> RequestOutput:
        """What is new since the last delta. Arguments are passed by position, which is faster: this runs for every
        streamed token."""
        finished = self.is_finished
        changed, self._changed = self._changed, {}
        prompt_logprobs = None if self._has_told_prompt else self.prompt_logprobs
        self._has_told_prompt = True
        return RequestOutput(
            self.request.request_id,
            self.request.prompt,
            self._prompt_token_ids,
            prompt_logprobs,
            [completion.delta() for completion in changed],
            finished,
            self._num_cached_tokens,
            self._present_metrics(now_s) if finished else self._metrics,
            None if self._pool is None or not finished else self._pool.mean(),
        )

    def _output(self, now_s: float) -> RequestOutput:
        """A record of the present state that later steps do not change. Arguments are passed by position, as in
        `_delta`."""
        finished = self.is_finished
        outputs = [completion.output() for completion in self.completions]
        if len(outputs) > self.request.params.n:
            outputs = choose_best(outputs, self.request.params)
        return RequestOutput(
            self.request.request_id,
            self.request.prompt,
            self._prompt_token_ids,
            None if self.prompt_logprobs is None else self.prompt_logprobs.copy(),
            outputs,
            finished,
            self._num_cached_tokens,
            self._present_metrics(now_s if finished else None),
            None if self._pool is None or not finished else self._pool.mean(),
        )

    def _present_metrics(self, finished_s: float | None) -> RequestMetrics:
        """The metrics. A new record is made only when something has changed, which is rare."""
        num_preemptions = 0
        for child in self.request.children:
            num_preemptions += child.num_preemptions
        if finished_s is not None or num_preemptions != self._metrics.num_preemptions:
            self._metrics = dataclasses.replace(self._metrics, finished_s=finished_s, num_preemptions=num_preemptions)
        return self._metrics


@dataclass(frozen=True, slots=True)
class EndedCompletion:
    """One of a request's sequences has ended."""

    request: PreparedRequest
    num_tokens: int
    finish_reason: FinishReason
    age_s: float
    """The time since the request arrived."""


@dataclass(frozen=True, slots=True)
class ProcessedStep:
    """What users get from a step."""

    outputs: list[RequestOutput]
    errors: dict[str, str]
    """By request id: why a completion has failed, in this step or an earlier one. Only for requests in `outputs`."""
    progress: dict[str, SilentProgress]
    """By request id."""


class OutputProcessor:
    """Keeps every live request's user-side state."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        stop: Callable[[str], bool],
        on_end: Callable[[EndedCompletion], None] | None = None,
    ) -> None:
        """`stop` ends a sequence in which a stop string was found. It returns whether the end is to be reported now;
        otherwise a later update reports it. `on_end` is called for every completion that ends, aborted ones
        included."""
        self._tokenizer = tokenizer
        self._stop = stop
        self._on_end = on_end
        self._token_text = None if tokenizer is None else tokenizer.token_text
        self._live: dict[str, _LiveRequest] = {}
        self._owner: dict[str, tuple[_LiveRequest, Completion]] = {}  # by child id

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    @property
    def num_unfinished(self) -> int:
        """The number of requests with at least one unfinished completion."""
        return len(self._live)

    def add(self, request: PreparedRequest, *, stream: Streaming, now_s: float) -> None:
        """Start to follow a request. `stream` says when it gives outputs and of which kind."""
        live = _LiveRequest(request, self._tokenizer, stream=stream, arrival_time_s=now_s)
        self._live[request.request_id] = live
        for child, completion in zip(request.children, live.completions, strict=True):
            self._owner[child.request_id] = (live, completion)

    def resume(self, request_id: str, delivered: Sequence[Delivered], *, now_s: float) -> RequestOutput | None:
        """Continue a request that was just added from where another engine left it. `delivered` is what that engine has
        delivered of each completion. Returns an output with the completions that have ended but whose end was not
        delivered, or None."""
        live = self._live[request_id]
        ended = []
        for completion, own, child in zip(live.completions, delivered, live.request.children, strict=True):
            completion.resume(own, child)
            if completion.finish_reason is not None and not own.is_finished:
                ended.append(completion)
                live.note_changed(completion)
        if any(own.token_ids for own in delivered):
            live.note_first_token(now_s)
            live.note_prompt_told()
        if not ended:
            return None
        output = live.news(now_s)
        if output.finished:
            self._forget(live)
        return output

    def abort(self, request_id: str, *, now_s: float) -> tuple[RequestOutput, list[str]]:
        """End a request. Returns its last output and the ids of its sequences that the scheduler still has."""
        live = self._live[request_id]
        running = [completion for completion in live.completions if completion.finish_reason is None]
        for completion in running:
            completion.abort()
            self._tell_end(live, completion, now_s)
            live.note_changed(completion)
        self._forget(live)
        return live.news(now_s), [completion.request_id for completion in running]

    def forget_all(self) -> None:
        """Stop following all requests, without any output."""
        self._live.clear()
        self._owner.clear()

    def note_launched(self, output: SchedulerOutput, *, now_s: float) -> list[str]:
        """Note the requests of a launched step. It must be called before any later result is processed: until then all
        its requests are live, and those not followed here are beams. Returns the ids of requests scheduled for the
        first time."""
        begun = []
        for new in output.new_requests:
            if new.request_id in self._owner:
                live = self._owner[new.request_id][0]
                if live.note_scheduled(new, now_s):
                    begun.append(live.request.request_id)
        return begun

    def process(self, updates: Sequence[RequestUpdate], *, now_s: float) -> ProcessedStep:
        """Process a step's result and return what changed for users."""
        errors: dict[str, str] = {}
        changed: dict[_LiveRequest, None] = {}
        progress: dict[str, SilentProgress] = {}
        for update in updates:
            live, completion = self._owner[update.request_id]
            if update.prompt_logprobs is not None or update.pooled is not None:
                if update.prompt_logprobs is not None:
                    live.take_prompt_logprobs(update.prompt_logprobs, self._token_text)
                if update.pooled is not None:
                    live.take_pooled(update.pooled)
                continue
            if not completion.token_ids and update.new_token_ids and not live.has_tokens:
                live.note_first_token(now_s)
            num_tokens_before = len(completion.token_ids)
            if self._take(completion, update) and self._stop(update.request_id):
                completion.tell_end()
            if live.tells_progress:
                _add_progress(progress, live.request.request_id, num_tokens_before, len(completion.token_ids))
            if completion.error is not None:
                live.note_failure(completion.error)
            if live.stream or completion.finish_reason is not None:
                changed[live] = None
                if live.stream == "delta":
                    live.note_changed(completion)
                if completion.finish_reason is not None:
                    self._tell_end(live, completion, now_s)
        outputs = []
        for live in changed:
            if live.stream or live.is_finished:
                output = live.news(now_s)
                outputs.append(output)
                if live.error is not None:
                    errors[output.request_id] = live.error
                if output.finished:
                    self._forget(live)
        return ProcessedStep(outputs, errors, progress)

    def _take(self, completion: Completion, update: RequestUpdate) -> bool:
        """Call `Completion.take`. A sequence whose tokens cannot be turned into text fails alone."""
        try:
            return completion.take(update)
        except Exception:
            logger.exception("the output of %s could not be made", update.request_id)
            completion.fail(OUTPUT_FAILED)
            if update.finish_status is not None:
                completion.tell_end()
            return update.finish_status is None and update.last_status is None

    def _tell_end(self, live: _LiveRequest, completion: Completion, now_s: float) -> None:
        if self._on_end is not None:
            assert completion.finish_reason is not None
            age_s = now_s - live.arrival_time_s
            self._on_end(
                EndedCompletion(live.request, len(completion.token_ids), completion.finish_reason, max(age_s, 0.0))
            )

    def _forget(self, live: _LiveRequest) -> None:
        del self._live[live.request.request_id]
        for child in live.request.children:
            del self._owner[child.request_id]


def _add_progress(
    progress: dict[str, SilentProgress], request_id: str, num_tokens_before: int, num_tokens: int
) -> None:
    """Record that a sequence of this request has grown from `num_tokens_before` to `num_tokens` tokens."""
    known = progress.get(request_id, _NO_PROGRESS)
    is_start = num_tokens_before == 0 < num_tokens
    progress[request_id] = SilentProgress(
        known.num_started + is_start, known.num_tokens + num_tokens - num_tokens_before
    )


def choose_best(completions: list[CompletionOutput], params: SamplingParams) -> list[CompletionOutput]:
    """The `n` best completions, renumbered from the best; of equals, the one that came first wins. They are compared by
    log-probability per token, the end-of-sequence token included, because the sum would favour short ones. The logprobs
    needed for this are shown only if the user asked for them."""
    hidden: dict[str, Any] = {"logprobs": None, "cumulative_logprob": None} if params.logprobs is None else {}
    best = sorted(completions, key=_rank)[: params.n]
    return [dataclasses.replace(completion, index=index, **hidden) for index, completion in enumerate(best)]


def _rank(completion: CompletionOutput) -> tuple[bool, float]:
    """The sort key, smallest first. A failed completion comes before all others, so that it is never dropped."""
    assert completion.cumulative_logprob is not None
    num_tokens = len(completion.token_ids)
    per_token = completion.cumulative_logprob / num_tokens if num_tokens else -math.inf
    return (completion.finish_reason != "error", -per_token)
