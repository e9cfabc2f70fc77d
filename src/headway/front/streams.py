"""Streams of the deltas that the engine sends for a request.

Each read of a stream gives everything that has arrived since the last one. A slow reader therefore gets fewer, longer
lists; nothing is lost, and the engine never waits for it. A read also returns, perhaps with an empty list, when the
engine's forecast for the request has come.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Self

from headway.wire.messages import Delta, RequestForecast


class Waiter:
    """Lets one task sleep until there is news."""

    __slots__ = ("_future",)

    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Wait until the next `wake`."""
        self._future = future = asyncio.get_running_loop().create_future()
        try:
            await future
        finally:
            self._future = None

    def wake(self) -> None:
        """Wake the waiting task, if there is one."""
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


class RequestStream:
    """The deltas of one request, for one reader. The stream ends after the delta with `is_last`.

    Closing it earlier aborts the request. Use it as a context manager, so that a cancelled task also closes it.
    """

    __slots__ = (
        "_abort",
        "_deltas",
        "_ended",
        "_has_begun",
        "_has_news",
        "_on_end",
        "_waiter",
        "forecast",
        "request_id",
    )

    def __init__(self, request_id: str, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._abort = abort
        self._deltas: list[Delta] = []
        self._ended = False
        self._has_begun = False
        self._has_news = False  # a forecast that the reader has not seen
        self.forecast: RequestForecast | None = None
        """What the engine expected when it queued the request; None if it has not sent that."""
        self._on_end: Callable[[], None] | None = None
        self._waiter = Waiter()

    def abort_by(self, abort: Callable[[str], None]) -> None:
        """Use this function to abort the request from now on."""
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
        """Whether the engine is known to have computed something for the request."""
        return self._has_begun

    def note_begun(self) -> None:
        """Called by the client when the request enters the batch."""
        self._has_begun = True

    def note_forecast(self, forecast: RequestForecast) -> None:
        """Called by the client with the engine's forecast. Only the first one counts, which the reader may have passed
        on: a request that moves to another engine may get another one there."""
        if self.forecast is None and not self._ended:
            self.forecast, self._has_news = forecast, True
            self._waiter.wake()

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
        while not self._deltas and not self._has_news:
            if self._ended:
                raise StopAsyncIteration
            await self._waiter.wait()
        return self._take()

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        self._has_news = False
        return deltas

    @property
    def has_unread(self) -> bool:
        """Whether a read would return at once."""
        return bool(self._deltas) or self._has_news

    def end(self, last: Delta) -> None:
        """Abort the request unless it has ended. Its reader gets this delta as the last one."""
        if not self._ended:
            self._abort(self.request_id)
            self.push(last)

    def close(self) -> None:
        """Abort the request unless it has ended, and drop unread deltas. A second call does nothing."""
        self._deltas = []
        self._has_news = False
        if not self._ended:
            self._note_end()
            self._abort(self.request_id)
            self._waiter.wake()

    async def aclose(self) -> None:
        """The same as `close`, under the name that async iterators use."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def merged(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, list[Delta]]]:
    """Yield the deltas of several streams as they arrive, each with the number of its stream. The streams must not be
    read in any other way afterwards."""
    waiter = Waiter()
    for stream in streams:
        stream._waiter = waiter
    unread = dict(enumerate(streams))
    while unread:
        for number, stream in list(unread.items()):
            if stream.has_unread:
                yield number, stream._take()
            elif stream._ended:
                del unread[number]
        if unread and not any(stream.has_unread or stream._ended for stream in unread.values()):
            await waiter.wait()
