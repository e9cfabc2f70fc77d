"""One completion of a request as its user sees it: text, logprobs, stop strings, finish reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from headway.core import Request, RequestStatus, RequestUpdate, TokenLogprobs
from headway.engine.detokenizer import IncrementalDetokenizer, StopChecker
from headway.engine.request_preparer import PreparedRequest
from headway.outputs import CompletionOutput, Delivered, FinishReason, Logprob, LogprobsOfOnePosition
from headway.tokenizer import Tokenizer


class Completion:
    """The state of one completion of a request."""

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
        self._ending: tuple[FinishReason, int | str | None] | None = None  # known, perhaps not reported yet
        self._eos_token_ids = frozenset(() if tokenizer is None else tokenizer.eos_token_ids)
        self._token_text = None if tokenizer is None else tokenizer.token_text
        self._text: list[str] = []
        self._num_sent = 0  # tokens that deltas have reported
        self._stops = StopChecker(params.stop_strings, include_in_output=params.include_stop_str_in_output)
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(tokenizer, request.prompt_token_ids, params.skip_special_tokens)

    def resume(self, delivered: Delivered, child: Request) -> None:
        """Restore the state that this completion had in another engine after these tokens. All of it was delivered,
        except perhaps the end."""
        for token_id in delivered.token_ids:
            self.token_ids.append(token_id)
            if self._detokenizer is not None:
                text = self._detokenizer.append((token_id,))
                self._stops.append(text, search=len(self.token_ids) >= self.params.min_tokens)
        self._num_sent = len(self.token_ids)
        if self.logprobs is not None:
            self.logprobs = [{}] * self._num_sent
        status = child.ends_with(self._num_sent, self.token_ids[-1]) if self.token_ids else None
        if self._stops.matched is not None:
            self._ending = ("stop", self._stops.matched)
        elif status is not None:
            last = self.token_ids[-1] if status is RequestStatus.FINISHED_STOPPED else None
            self._ending = (cast(FinishReason, status.value), None if last in self._eos_token_ids else last)
        if delivered.is_finished:
            self.finish_reason = "stop"  # whatever it was: it is not delivered again
        elif self._ending is not None:
            self.tell_end()

    def take(self, update: RequestUpdate) -> bool:
        """Add the new tokens of an update. Returns True if a stop string has just ended a sequence that the scheduler
        still runs; the caller must then end it in the scheduler and, if due, call `tell_end`."""
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
                last = None  # a request that its grammar ends has no stop token
                if last_status is RequestStatus.FINISHED_STOPPED and update.new_token_ids:
                    last = update.new_token_ids[-1]
                stop_reason = None if last in self._eos_token_ids else last
                self._finish_text((cast(FinishReason, last_status.value), stop_reason))
        if update.finish_status is not None:
            self.tell_end()
        return False

    def tell_end(self) -> None:
        """Report the ending that was found before, from now on."""
        assert self._ending is not None
        self.finish_reason, self.stop_reason = self._ending

    def abort(self) -> None:
        """End the completion with the finish reason "abort"."""
        self._finish_text(("abort", None))
        self.tell_end()

    def fail(self, why: str) -> None:
        """End the completion with an error, which is reported like any other end. Its text so far is kept."""
        self.error, self._ending = why, ("error", None)

    def output(self) -> CompletionOutput:
        """A record of the present state that later steps do not change. Arguments are passed by position, which is
        faster."""
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
        """What is new since the last delta. Its text is dropped here once returned. Arguments are by position, as
        above."""
        sent, self._num_sent = self._num_sent, len(self.token_ids)
        text, self._text = self._text, []
        return CompletionOutput(
            self.index,
            text[0] if len(text) == 1 else "".join(text),
            self.token_ids[sent:],
            self.cumulative_logprob,
            None if self.logprobs is None else self.logprobs[sent:],
            self.finish_reason,
            self.stop_reason,
        )

    def _take_text(self, update: RequestUpdate, last_status: RequestStatus | None) -> bool:
        """Add tokens and their text, up to a stop string; returns whether one was found. The text excludes a stop token
        at the end, unless the request asks for it."""
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
        """Set the ending and release held-back text. The ending is reported later, when the scheduler confirms it."""
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


def position_logprobs(record: TokenLogprobs, token_text: Callable[[int], str] | None = None) -> LogprobsOfOnePosition:
    """The record that users get: the position's token first, then the most likely ones, then those requested by id."""

    def text(token_id: int) -> str | None:
        return None if token_text is None else token_text(token_id)

    position = {record.token_id: Logprob(record.logprob, record.rank, text(record.token_id))}
    for index, (token_id, logprob) in enumerate(zip(record.top_ids, record.top_logprobs, strict=True)):
        position.setdefault(token_id, Logprob(logprob, index + 1, text(token_id)))
    for token_id, logprob in zip(record.named_ids, record.named_logprobs, strict=True):
        if token_id not in position:
            position[token_id] = Logprob(logprob, None, text(token_id))
    return position
