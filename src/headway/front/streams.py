"""Streams of what comes from the engine for a request, and the outputs that they add up to.

Each read of a stream gives everything that has arrived since the last one. A slow reader therefore gets fewer, longer
lists; nothing is lost, and the engine never waits for it.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

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

if TYPE_CHECKING:
    from headway.engine.input_processor import PreparedRequest


class Waiter:
    """Lets one task sleep until there is news."""

    __slots__ = ("_future",)

    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Until the next `wake`."""
        self._future = future = asyncio.get_running_loop().create_future()
        try:
            await future
        finally:
            self._future = None

    def wake(self) -> None:
        """There is news."""
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


class RequestStream:
    """The deltas of one request, for one reader. It ends after the one with `is_last`.

    Closing it earlier aborts the request; use it as a context manager, so that a cancelled task does that as well.
    """

    __slots__ = ("_abort", "_deltas", "_ended", "_has_begun", "_on_end", "_waiter", "request_id")

    def __init__(self, request_id: str, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._abort = abort
        self._deltas: list[Delta] = []
        self._ended = False
        self._has_begun = False
        self._on_end: Callable[[], None] | None = None
        self._waiter = Waiter()

    def abort_by(self, abort: Callable[[str], None]) -> None:
        """The request is in other hands now."""
        self._abort = abort

    def when_ended(self, on_end: Callable[[], None]) -> None:
        """Have this called when the request has ended in any way."""
        self._on_end = on_end

    def _note_end(self) -> None:
        self._ended = True
        if self._on_end is not None:
            self._on_end()

    @property
    def has_begun(self) -> bool:
        """Whether the engine has computed anything for it, as far as is known here."""
        return self._has_begun

    def note_begun(self) -> None:
        """Called by the client when the request enters the batch."""
        self._has_begun = True

    def push(self, delta: Delta) -> None:
        """Called by the client for each delta."""
        self._has_begun = True
        self._deltas.append(delta)
        if delta.is_last and not self._ended:
            self._note_end()
        self._waiter.wake()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Delta]:
        while not self._deltas:
            if self._ended:
                raise StopAsyncIteration
            await self._waiter.wait()
        return self._take()

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def end(self, last: Delta) -> None:
        """Abort the request, unless it has ended; its reader gets this delta as the last one."""
        if not self._ended:
            self._abort(self.request_id)
            self.push(last)

    def close(self) -> None:
        """Abort the request, unless it has ended; what was not read is dropped. Does nothing the second time."""
        self._deltas = []
        if not self._ended:
            self._note_end()
            self._abort(self.request_id)
            self._waiter.wake()

    async def aclose(self) -> None:
        """`close`, as async iterators call it."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def merged(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, list[Delta]]]:
    """The deltas of several streams as they come, each with the number of its stream. These streams must not be read
    otherwise any more."""
    waiter = Waiter()
    for stream in streams:
        stream._waiter = waiter
    unread = dict(enumerate(streams))
    while unread:
        for number, stream in list(unread.items()):
            if stream._deltas:
                yield number, stream._take()
            elif stream._ended:
                del unread[number]
        if unread and not any(stream._deltas or stream._ended for stream in unread.values()):
            await waiter.wait()


class AnswerBuilder:
    """One request's deltas, put together to the outputs that `LLM` gives."""

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
        """The output after these deltas. Raises what they say if the request was refused or has failed."""
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
        """What is new. An end of the whole request, which no single completion has reached, ends all that go on."""
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
        """The engine says at the end how long each part took."""
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
