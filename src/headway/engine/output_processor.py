"""From sampled tokens to what a user sees: text, logprobs, stop strings, finish reasons, timings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from headway.core import PromptLogprobs, RequestStatus, RequestUpdate
from headway.engine.detokenizer import IncrementalDetokenizer
from headway.engine.input_processor import PreparedRequest
from headway.engine.stop_strings import StopChecker
from headway.outputs import CompletionOutput, FinishReason, LogprobsOfOnePosition, RequestMetrics, RequestOutput
from headway.tokenizer import Tokenizer

if TYPE_CHECKING:
    from headway.runner.logprobs import TokenLogprobs


class _Completion:
    """One of a request's `n` sequences, as far as it has come."""

    def __init__(self, index: int, request: PreparedRequest, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self.index = index
        self.params = params
        self.request_id = request.children[index].request_id
        self.token_ids: list[int] = []
        self.logprobs: list[LogprobsOfOnePosition] | None = None if params.logprobs is None else []
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self._eos_token_ids = frozenset(() if tokenizer is None else tokenizer.eos_token_ids)
        self._token_text = None if tokenizer is None else tokenizer.token_text
        self._text: list[str] = []
        self._stops = StopChecker(params.stop_strings, include_in_output=params.include_stop_str_in_output)
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(tokenizer, request.prompt_token_ids, params.skip_special_tokens)

    def take(self, update: RequestUpdate) -> bool:
        """Take in a step's result. Returns whether a stop string has just ended what the scheduler thinks goes on."""
        self._take_logprobs(update)
        stopped_by_token = update.finish_status is RequestStatus.FINISHED_STOPPED
        for place, token_id in enumerate(update.new_token_ids):
            self.token_ids.append(token_id)
            is_stop_token = stopped_by_token and place == len(update.new_token_ids) - 1
            self._take_text(token_id, is_stop_token=is_stop_token)
            if self._stops.matched is not None:
                self._end("stop", self._stops.matched)
                return update.finish_status is None
        if update.finish_status is not None:
            self.error = update.error
            last = update.new_token_ids[-1] if stopped_by_token else None
            self._end(cast(FinishReason, update.finish_status.value), None if last in self._eos_token_ids else last)
        return False

    def abort(self) -> None:
        """End it where it is."""
        self._end("abort", None)

    def output(self) -> CompletionOutput:
        """A record of the present state that later steps do not change."""
        return CompletionOutput(
            index=self.index,
            text=self._joined_text(),
            token_ids=self.token_ids.copy(),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs.copy(),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _take_text(self, token_id: int, *, is_stop_token: bool) -> None:
        """A stop token ends the text and is not part of it, unless the request wants it to be."""
        if self._detokenizer is None or (is_stop_token and not self.params.include_stop_str_in_output):
            return
        text = self._detokenizer.append([token_id])
        self._text.append(self._stops.append(text, search=len(self.token_ids) >= self.params.min_tokens))

    def _take_logprobs(self, update: RequestUpdate) -> None:
        if self.logprobs is None or self.cumulative_logprob is None:
            return
        for record in cast("Sequence[TokenLogprobs]", update.logprobs):
            self.logprobs.append(record.as_output(self._token_text))
            self.cumulative_logprob += record.logprob

    def _end(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        self.finish_reason = reason
        self.stop_reason = stop_reason
        if self._detokenizer is not None and self._stops.matched is None:
            self._text.append(self._stops.append(self._detokenizer.finish(), search=False))
            self._text.append(self._stops.finish())

    def _joined_text(self) -> str:
        if len(self._text) > 1:
            self._text = ["".join(self._text)]
        return self._text[0] if self._text else ""


class _LiveRequest:
    """A request from its arrival until its last completion has ended."""

    def __init__(
        self, request: PreparedRequest, tokenizer: Tokenizer | None, *, stream: bool, arrival_time_s: float
    ) -> None:
        self.request = request
        self.stream = stream
        self.arrival_time_s = arrival_time_s
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.num_preemptions = 0
        self.completions = [_Completion(index, request, tokenizer) for index in range(request.params.n)]
        self.prompt_logprobs: list[LogprobsOfOnePosition | None] | None = (
            None if request.params.prompt_logprobs is None else [None]
        )

    @property
    def is_finished(self) -> bool:
        return all(completion.finish_reason is not None for completion in self.completions)

    def take_prompt_logprobs(self, found: PromptLogprobs, token_text: Callable[[int], str] | None) -> None:
        """After a preemption, or from a second completion, known positions come again and are passed over."""
        assert self.prompt_logprobs is not None
        new = cast("Sequence[TokenLogprobs]", found.values[max(0, len(self.prompt_logprobs) - found.start) :])
        self.prompt_logprobs.extend(record.as_output(token_text) for record in new)

    def output(self, now_s: float) -> RequestOutput:
        finished = self.is_finished
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=list(self.request.prompt_token_ids),
            prompt_logprobs=None if self.prompt_logprobs is None else self.prompt_logprobs.copy(),
            outputs=[completion.output() for completion in self.completions],
            finished=finished,
            metrics=RequestMetrics(
                arrival_time_s=self.arrival_time_s,
                first_scheduled_s=self.first_scheduled_s,
                first_token_s=self.first_token_s,
                finished_s=now_s if finished else None,
                num_preemptions=self.num_preemptions,
            ),
        )


@dataclass(frozen=True, slots=True)
class ProcessedStep:
    """What users get from a step, and which sequences a stop string has ended behind the scheduler's back."""

    outputs: list[RequestOutput]
    stopped_request_ids: list[str]
    errors: dict[str, str]


class OutputProcessor:
    """Keeps every live request's user-side state."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._token_text = None if tokenizer is None else tokenizer.token_text
        self._live: dict[str, _LiveRequest] = {}
        self._owner: dict[str, tuple[_LiveRequest, _Completion]] = {}  # by child id

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    @property
    def num_unfinished(self) -> int:
        """Requests that still have a completion to end."""
        return len(self._live)

    def add(self, request: PreparedRequest, *, stream: bool, now_s: float) -> None:
        """Start to follow a request. With `stream`, every step that changes it gives an output, else only the last."""
        live = _LiveRequest(request, self._tokenizer, stream=stream, arrival_time_s=now_s)
        self._live[request.request_id] = live
        for child, completion in zip(request.children, live.completions, strict=True):
            self._owner[child.request_id] = (live, completion)

    def abort(self, request_id: str, *, now_s: float) -> tuple[RequestOutput, list[str]]:
        """End a request. Returns its last output and its sequences that the scheduler still has."""
        live = self._live[request_id]
        running = [completion for completion in live.completions if completion.finish_reason is None]
        for completion in running:
            completion.abort()
        self._forget(live)
        return live.output(now_s), [completion.request_id for completion in running]

    def note_scheduled(self, request_ids: Sequence[str], preempted: Sequence[str], *, now_s: float) -> None:
        """Remember when requests were first scheduled and how often they were preempted."""
        for request_id in request_ids:
            live = self._owner[request_id][0]
            if live.first_scheduled_s is None:
                live.first_scheduled_s = now_s
        for request_id in preempted:
            self._owner[request_id][0].num_preemptions += 1

    def process(
        self, updates: Sequence[RequestUpdate], prompt_logprobs: Sequence[tuple[str, PromptLogprobs]], *, now_s: float
    ) -> ProcessedStep:
        """Take in a step's result and say what changed for users."""
        for request_id, found in prompt_logprobs:
            self._owner[request_id][0].take_prompt_logprobs(found, self._token_text)
        stopped: list[str] = []
        errors: dict[str, str] = {}
        changed: dict[str, _LiveRequest] = {}
        for update in updates:
            live, completion = self._owner[update.request_id]
            if live.first_token_s is None and update.new_token_ids:
                live.first_token_s = now_s
            if completion.take(update):
                stopped.append(update.request_id)
            if completion.error is not None:
                errors[live.request.request_id] = completion.error
            if live.stream or completion.finish_reason is not None:
                changed[live.request.request_id] = live
        outputs = []
        for live in changed.values():
            if live.is_finished:
                self._forget(live)
            elif not live.stream:
                continue
            outputs.append(live.output(now_s))
        return ProcessedStep(outputs, stopped, errors)

    def _forget(self, live: _LiveRequest) -> None:
        del self._live[live.request.request_id]
        for child in live.request.children:
            del self._owner[child.request_id]
