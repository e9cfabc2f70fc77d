"""Builds the outputs that `LLM` returns from the deltas that an engine process sends."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import cast

from headway.engine.request_preparer import PreparedRequest
from headway.errors import InvalidRequestError, RequestFailedError
from headway.outputs import (
    CompletionOutput,
    FinishReason,
    GrowingOutput,
    Logprob,
    LogprobsOfOnePosition,
    RequestMetrics,
    RequestOutput,
)
from headway.wire.messages import Delta, PositionLogprobs, RequestTimings


class OutputBuilder:
    """Builds one request's outputs from its deltas."""

    def __init__(self, request: PreparedRequest) -> None:
        self._request = request
        self._prompt_token_ids = list(request.prompt_token_ids)
        self._arrival_s = time.monotonic()
        self._grown = GrowingOutput(request.params.n)
        self._unfinished = set(range(request.params.n))
        self._logprob_sums = [0.0] * request.params.n
        self.completions: list[CompletionOutput] = []
        """As of the last output."""

    def take(self, deltas: Sequence[Delta]) -> RequestOutput:
        """Return the output after these deltas. Raises `InvalidRequestError` if the request was refused, and
        `RequestFailedError` if it failed."""
        new: list[CompletionOutput] = []
        for delta in deltas:
            new += self._completions(delta)
        last = deltas[-1]
        timings = last.timings
        delta_output = RequestOutput(
            self._request.request_id,
            self._request.prompt,
            self._prompt_token_ids,
            next((_prompt_logprobs(delta) for delta in deltas if delta.prompt_logprobs is not None), None),
            new,
            last.is_last,
            0 if timings is None else timings.num_cached_tokens,
            self._metrics(timings),
            None if last.embedding is None else array("f", last.embedding),
        )
        self._grown.add(delta_output)
        output = self._grown.output()
        if output.finished:  # a search may have found fewer than were asked for
            output.outputs = [each for each in output.outputs if each.finish_reason is not None]
        self.completions = output.outputs
        for delta in deltas:
            if delta.error is not None:
                raise self._error(delta, output)
        return output

    def _completions(self, delta: Delta) -> list[CompletionOutput]:
        """The changed completions. The end of the whole request (an abort or an error) ends all unfinished ones."""
        reason = cast("FinishReason | None", delta.finish_reason)
        if reason in ("abort", "error"):
            ended, self._unfinished = sorted(self._unfinished), set()
            return [self._completion(delta, index, reason) for index in ended]
        if reason is not None:
            self._unfinished.discard(delta.index)
        return [self._completion(delta, delta.index, reason)]

    def _completion(self, delta: Delta, index: int, reason: FinishReason | None) -> CompletionOutput:
        is_own = index == delta.index
        logprobs = [_as_dict(position) for position in delta.logprobs] if delta.logprobs and is_own else None
        if delta.logprobs and is_own:
            self._logprob_sums[index] += sum(position[0].logprob for position in delta.logprobs)
        has_sum = self._request.params.logprobs is not None
        return CompletionOutput(
            index,
            delta.text if is_own else "",
            delta.token_ids if is_own else [],
            self._logprob_sums[index] if has_sum else delta.cumulative_logprob,
            logprobs,
            reason,
            delta.stop_reason if is_own else None,
        )

    def _metrics(self, timings: RequestTimings | None) -> RequestMetrics:
        """The request's metrics. The engine reports the duration of each phase at the end."""
        if timings is None:
            return RequestMetrics(self._arrival_s)
        scheduled_s = self._arrival_s + timings.queue_s
        first_token_s = scheduled_s + timings.prefill_s
        return RequestMetrics(
            self._arrival_s,
            first_scheduled_s=scheduled_s,
            first_token_s=first_token_s,
            finished_s=first_token_s + timings.decode_s,
            num_preemptions=timings.num_preemptions,
        )

    def _error(self, delta: Delta, output: RequestOutput) -> Exception:
        assert delta.error is not None
        request_id = self._request.request_id
        why = delta.error.replace(f"'{delta.request_id}'", f"'{request_id}'")
        if delta.error_status == InvalidRequestError.http_status:
            return InvalidRequestError(why, param=delta.error_param)
        return RequestFailedError({request_id: why}, [output])


def _prompt_logprobs(delta: Delta) -> list[LogprobsOfOnePosition | None]:
    return [None if position is None else _as_dict(position) for position in delta.prompt_logprobs or ()]


def _as_dict(position: PositionLogprobs) -> LogprobsOfOnePosition:
    return {each.token_id: Logprob(each.logprob, each.rank, each.text) for each in position}
