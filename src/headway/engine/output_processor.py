"""From sampled tokens to what a user sees: text, logprobs, stop strings, finish reasons, timings."""

from __future__ import annotations

import dataclasses
import logging
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from headway.core import (
    NewRequest,
    PooledPrompt,
    PromptLogprobs,
    Request,
    RequestStatus,
    RequestUpdate,
    SchedulerOutput,
    TokenLogprobs,
)
from headway.engine.detokenizer import IncrementalDetokenizer, StopChecker
from headway.engine.input_processor import PreparedRequest
from headway.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    LogprobsOfOnePosition,
    RequestMetrics,
    RequestOutput,
    SilentProgress,
    Streaming,
    Told,
)
from headway.sampling_params import SamplingParams
from headway.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

OUTPUT_FAILED = "its tokens could not be made into an output"
_NO_PROGRESS = SilentProgress(0, 0)


class _Completion:
    """One of a request's sequences, as far as it has come."""

    def __init__(self, index: int, request: PreparedRequest, tokenizer: Tokenizer | None) -> None:
        child = request.children[index]
        params = child.sampling_params
        assert params is not None
        self.index = index
        self.params = params
        self.request_id = child.request_id
        self.token_ids: list[int] = []
        self.logprobs: list[LogprobsOfOnePosition] | None = None if params.logprobs is None else []
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self._ending: tuple[FinishReason, int | str | None] | None = None  # known, perhaps not told yet
        self._eos_token_ids = frozenset(() if tokenizer is None else tokenizer.eos_token_ids)
        self._token_text = None if tokenizer is None else tokenizer.token_text
        self._text: list[str] = []
        self._num_told = 0  # tokens that deltas have told of
        self._stops = StopChecker(params.stop_strings, include_in_output=params.include_stop_str_in_output)
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(tokenizer, request.prompt_token_ids, params.skip_special_tokens)

    def resume(self, told: Told, child: Request) -> None:
        """Stand where it stood elsewhere after these tokens, of which everything was told but perhaps the end."""
        for token_id in told.token_ids:
            self.token_ids.append(token_id)
            if self._detokenizer is not None:
                text = self._detokenizer.append((token_id,))
                self._stops.append(text, search=len(self.token_ids) >= self.params.min_tokens)
        self._num_told = len(self.token_ids)
        if self.logprobs is not None:
            self.logprobs = [{}] * self._num_told
        status = child.ends_with(self._num_told, self.token_ids[-1]) if self.token_ids else None
        if self._stops.matched is not None:
            self._ending = ("stop", self._stops.matched)
        elif status is not None:
            last = self.token_ids[-1] if status is RequestStatus.FINISHED_STOPPED else None
            self._ending = (cast(FinishReason, status.value), None if last in self._eos_token_ids else last)
        if told.is_finished:
            self.finish_reason = "stop"  # whatever it was: it is not told again
        elif self._ending is not None:
            self.tell_end()

    def take(self, update: RequestUpdate) -> bool:
        """Take in new tokens. Returns whether a stop string has just ended what the scheduler thinks goes on: then the
        caller has to tell both that it is over."""
        if self._ending is None:
            last_status = update.finish_status or update.last_status
            num_before, is_stopped = len(self.token_ids), False
            if self._detokenizer is None:
                self.token_ids += update.new_token_ids
            else:
                is_stopped = self._take_text(update, last_status)
            if self.logprobs is not None:
                self._take_logprobs(update.logprobs[: len(self.token_ids) - num_before])
            if is_stopped:
                self._finish_text(("stop", self._stops.matched))
                if last_status is None:
                    return True
            if self._ending is None and last_status is not None:
                self.error = update.error
                last = None  # a request that its grammar ends has no last token of its own
                if last_status is RequestStatus.FINISHED_STOPPED and update.new_token_ids:
                    last = update.new_token_ids[-1]
                stop_reason = None if last in self._eos_token_ids else last
                self._finish_text((cast(FinishReason, last_status.value), stop_reason))
        if update.finish_status is not None:
            self.tell_end()
        return False

    def tell_end(self) -> None:
        """What has ended it before is told from now on."""
        assert self._ending is not None
        self.finish_reason, self.stop_reason = self._ending

    def abort(self) -> None:
        """End it where it is."""
        self._finish_text(("abort", None))
        self.tell_end()

    def fail(self, why: str) -> None:
        """End it for a reason of its own, which is told as any other end. The text that it has stays as it is."""
        self.error, self._ending = why, ("error", None)

    def output(self) -> CompletionOutput:
        """A record of the present state that later steps do not change. By position: made for every streamed token."""
        return CompletionOutput(
            self.index,
            self._joined_text() if self._text else "",
            self.token_ids.copy(),
            self.cumulative_logprob,
            None if self.logprobs is None else self.logprobs.copy(),
            self.finish_reason,
            self.stop_reason,
        )

    def delta(self) -> CompletionOutput:
        """What is new since the last delta, whose text is then forgotten. By position, as above."""
        told, self._num_told = self._num_told, len(self.token_ids)
        text, self._text = self._text, []
        return CompletionOutput(
            self.index,
            text[0] if len(text) == 1 else "".join(text),
            self.token_ids[told:],
            self.cumulative_logprob,
            None if self.logprobs is None else self.logprobs[told:],
            self.finish_reason,
            self.stop_reason,
        )

    def _take_text(self, update: RequestUpdate, last_status: RequestStatus | None) -> bool:
        """Tokens and their text, up to a stop string; returns whether there was one. A stop token ends the text and is
        not part of it, unless the request wants it to be."""
        assert self._detokenizer is not None
        num_shown = len(update.new_token_ids)
        if last_status is RequestStatus.FINISHED_STOPPED and not self.params.include_stop_str_in_output:
            num_shown -= 1
        for place, token_id in enumerate(update.new_token_ids):
            self.token_ids.append(token_id)
            if place < num_shown:
                text = self._detokenizer.append((token_id,))
                self._text.append(self._stops.append(text, search=len(self.token_ids) >= self.params.min_tokens))
                if self._stops.matched is not None:
                    return True
        return False

    def _take_logprobs(self, records: Sequence[TokenLogprobs]) -> None:
        assert self.logprobs is not None and self.cumulative_logprob is not None
        for record in records:
            self.logprobs.append(position_logprobs(record, self._token_text))
            self.cumulative_logprob += record.logprob

    def _finish_text(self, ending: tuple[FinishReason, int | str | None]) -> None:
        """No token follows; how it ended is told when the scheduler says so."""
        has_text = self._detokenizer is not None and self._ending is None and self._stops.matched is None
        self._ending = ending
        if has_text:
            assert self._detokenizer is not None
            self._text.append(self._stops.append(self._detokenizer.finish(), search=False))
            self._text.append(self._stops.finish())

    def _joined_text(self) -> str:
        if len(self._text) > 1:
            self._text = ["".join(self._text)]
        return self._text[0]


class _Pool:
    """The mean of a prompt's hidden states, as far as they have come. Sums are kept in double precision."""

    def __init__(self) -> None:
        self._next = 0
        self._num_tokens = 0
        self._total: NDArray[np.float64] | None = None

    def add(self, part: PooledPrompt) -> None:
        """The next part, or the first: a request that was preempted goes on where it was, or begins again."""
        new = np.frombuffer(part.total, dtype=np.float32).astype(np.float64)
        if self._total is None or part.start < self._next:
            self._total, self._num_tokens = new, part.num_tokens
        elif part.start == self._next:
            self._total, self._num_tokens = self._total + new, self._num_tokens + part.num_tokens
        else:
            raise RuntimeError(f"hidden states of prompt tokens {self._next} to {part.start} are missing")
        self._next = part.start + part.num_tokens

    def mean(self) -> array[float] | None:
        """None if the request has ended before anything was computed."""
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
        self._changed: dict[_Completion, None] = {}  # in the step that is being processed; for deltas only
        self.completions = [_Completion(index, request, tokenizer) for index in range(len(request.children))]
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
        """One of its sequences enters the batch; only the first time counts. Returns whether it was."""
        if self._metrics.first_scheduled_s is not None:
            return False
        self._metrics = dataclasses.replace(self._metrics, first_scheduled_s=now_s)
        self._num_cached_tokens = new.num_computed_tokens
        return True

    def note_prompt_told(self) -> None:
        """What there is to say of its prompt is known."""
        self._has_told_prompt = True

    def note_changed(self, completion: _Completion) -> None:
        """The next delta has news of this completion."""
        self._changed[completion] = None

    def note_failure(self, why: str) -> None:
        """One of its completions has failed."""
        self.error = why

    def note_first_token(self, now_s: float) -> None:
        """Its first token has come."""
        self._metrics = dataclasses.replace(self._metrics, first_token_s=now_s)

    def take_prompt_logprobs(self, found: PromptLogprobs, token_text: Callable[[int], str] | None) -> None:
        """After a preemption, or from a second completion, known positions come again and are passed over."""
        assert self.prompt_logprobs is not None
        new = found.values[max(0, len(self.prompt_logprobs) - found.start) :]
        self.prompt_logprobs.extend(position_logprobs(record, token_text) for record in new)

    def take_pooled(self, part: PooledPrompt) -> None:
        """More of the vector of its prompt."""
        assert self._pool is not None
        self._pool.add(part)

    def news(self, now_s: float) -> RequestOutput:
        """The output that the request's user has asked for."""
        return self._delta(now_s) if self.stream == "delta" else self._output(now_s)

    def _delta(self, now_s: float) -> RequestOutput:
        """What is new since the last delta. By position: made for every streamed token."""
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
        """A record of the present state that later steps do not change. By position: made for every streamed token."""
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
        """Made anew only when there is news, which most tokens do not bring."""
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
    """How long ago the request came."""


@dataclass(frozen=True, slots=True)
class ProcessedStep:
    """What users get from a step."""

    outputs: list[RequestOutput]
    errors: dict[str, str]
    """By id of the requests among `outputs` of which a completion has failed, now or before: why."""
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
        """`stop` ends a sequence in which a stop string was found, and says whether that is to be told now; otherwise
        an update will. `on_end` is told of every completion that ends, aborted ones included."""
        self._tokenizer = tokenizer
        self._stop = stop
        self._on_end = on_end
        self._token_text = None if tokenizer is None else tokenizer.token_text
        self._live: dict[str, _LiveRequest] = {}
        self._owner: dict[str, tuple[_LiveRequest, _Completion]] = {}  # by child id

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    @property
    def num_unfinished(self) -> int:
        """Requests that still have a completion to end."""
        return len(self._live)

    def add(self, request: PreparedRequest, *, stream: Streaming, now_s: float) -> None:
        """Start to follow a request; `stream` says when it gives outputs, and of which kind."""
        live = _LiveRequest(request, self._tokenizer, stream=stream, arrival_time_s=now_s)
        self._live[request.request_id] = live
        for child, completion in zip(request.children, live.completions, strict=True):
            self._owner[child.request_id] = (live, completion)

    def resume(self, request_id: str, told: Sequence[Told], *, now_s: float) -> RequestOutput | None:
        """A request that was just added goes on from elsewhere, where this was told of its completions. Returns the
        ends that are still to be told, if there are any."""
        live = self._live[request_id]
        ended = []
        for completion, own, child in zip(live.completions, told, live.request.children, strict=True):
            completion.resume(own, child)
            if completion.finish_reason is not None and not own.is_finished:
                ended.append(completion)
                live.note_changed(completion)
        if any(own.token_ids for own in told):
            live.note_first_token(now_s)
            live.note_prompt_told()
        if not ended:
            return None
        output = live.news(now_s)
        if output.finished:
            self._forget(live)
        return output

    def abort(self, request_id: str, *, now_s: float) -> tuple[RequestOutput, list[str]]:
        """End a request. Returns its last output and its sequences that the scheduler still has."""
        live = self._live[request_id]
        running = [completion for completion in live.completions if completion.finish_reason is None]
        for completion in running:
            completion.abort()
            self._tell_end(live, completion, now_s)
            live.note_changed(completion)
        self._forget(live)
        return live.news(now_s), [completion.request_id for completion in running]

    def forget_all(self) -> None:
        """Follow nothing any more, and tell nothing of it."""
        self._live.clear()
        self._owner.clear()

    def note_launched(self, output: SchedulerOutput, *, now_s: float) -> list[str]:
        """A step has been launched. To be called before any later result is taken in: its requests are alive, and
        those that are not followed here are beams. Returns which requests have begun with it."""
        begun = []
        for new in output.new_requests:
            if new.request_id in self._owner:
                live = self._owner[new.request_id][0]
                if live.note_scheduled(new, now_s):
                    begun.append(live.request.request_id)
        return begun

    def process(self, updates: Sequence[RequestUpdate], *, now_s: float) -> ProcessedStep:
        """Take in a step's result and say what changed for users."""
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

    def _take(self, completion: _Completion, update: RequestUpdate) -> bool:
        """As `_Completion.take`; a sequence whose tokens cannot be made into text fails alone."""
        try:
            return completion.take(update)
        except Exception:
            logger.exception("the output of %s could not be made", update.request_id)
            completion.fail(OUTPUT_FAILED)
            if update.finish_status is not None:
                completion.tell_end()
            return update.finish_status is None and update.last_status is None

    def _tell_end(self, live: _LiveRequest, completion: _Completion, now_s: float) -> None:
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
    """One of the request's sequences had so many tokens, and has so many now."""
    known = progress.get(request_id, _NO_PROGRESS)
    is_start = num_tokens_before == 0 < num_tokens
    progress[request_id] = SilentProgress(
        known.num_started + is_start, known.num_tokens + num_tokens - num_tokens_before
    )


def position_logprobs(record: TokenLogprobs, token_text: Callable[[int], str] | None = None) -> LogprobsOfOnePosition:
    """The record users get: the position's token first, then the most likely ones, then those that were named."""

    def text(token_id: int) -> str | None:
        return None if token_text is None else token_text(token_id)

    position = {record.token_id: Logprob(record.logprob, record.rank, text(record.token_id))}
    for index, (token_id, logprob) in enumerate(zip(record.top_ids, record.top_logprobs, strict=True)):
        position.setdefault(token_id, Logprob(logprob, index + 1, text(token_id)))
    for token_id, logprob in zip(record.named_ids, record.named_logprobs, strict=True):
        if token_id not in position:
            position[token_id] = Logprob(logprob, None, text(token_id))
    return position


def choose_best(completions: list[CompletionOutput], params: SamplingParams) -> list[CompletionOutput]:
    """The `n` best, numbered anew from the best on; of equals, the one that came first. What is compared is the
    log-probability per token, the end-of-sequence token included: the sum would favour short ones. Logprobs were needed
    to find them and are shown only if they were asked for."""
    hidden: dict[str, Any] = {"logprobs": None, "cumulative_logprob": None} if params.logprobs is None else {}
    best = sorted(completions, key=_rank)[: params.n]
    return [dataclasses.replace(completion, index=index, **hidden) for index, completion in enumerate(best)]


def _rank(completion: CompletionOutput) -> tuple[bool, float]:
    """Smallest first. A failure comes before everything else, since it must not be hidden behind the others."""
    assert completion.cumulative_logprob is not None
    num_tokens = len(completion.token_ids)
    per_token = completion.cumulative_logprob / num_tokens if num_tokens else -math.inf
    return (completion.finish_reason != "error", -per_token)
