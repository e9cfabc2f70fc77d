"""Streams of what comes from the engine.

Each read of a stream gives everything that has arrived since the last one. A slow reader therefore gets fewer, longer
lists; nothing is lost, and the engine never waits for it. Streams of the engine's state hold a limited amount: one that
is full goes on from the present.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from headway.core.cache_report import MAX_REPORTED
from headway.wire.messages import Delta, Snapshot

MAX_SNAPSHOTS = 512
"""Steps that a viewer may lag behind before it misses some."""
MAX_UNREAD_BLOCKS = 32_768
"""Blocks that came or went and that a follower of caches has not read. One with more is told all that is there anew."""


class _Waiter:
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
        self._waiter = _Waiter()

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
    waiter = _Waiter()
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


class SnapshotStream:
    """Snapshots for one viewer, one by one. It never ends by itself, not even when the engine is restarted."""

    def __init__(self, on_close: Callable[[SnapshotStream], None]) -> None:
        self._on_close = on_close
        self._snapshots: deque[Snapshot] = deque(maxlen=MAX_SNAPSHOTS)
        self._closed = False
        self._waiter = _Waiter()

    def push(self, snapshot: Snapshot) -> None:
        """Called by the client for each snapshot."""
        self._snapshots.append(snapshot)
        self._waiter.wake()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Snapshot:
        while not self._snapshots:
            if self._closed:
                raise StopAsyncIteration
            await self._waiter.wait()
        return self._snapshots.popleft()

    def close(self) -> None:
        """Stop watching. Does nothing the second time."""
        if not self._closed:
            self._closed = True
            self._snapshots.clear()
            self._on_close(self)
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


class CacheEvent(NamedTuple):
    """What a replica's prefix cache holds, or how that has changed."""

    place: int
    epoch: int
    """Another one than before: the replica has a new process, and a new cache."""
    number: int
    """Of the last report that is in it: each has the number of the one before and 1. -1: nothing was reported."""
    block_size: int
    is_whole: bool
    """What was known of the replica before does not hold any more. What follows with the same number belongs to it."""
    stored: Sequence[bytes]
    evicted: Sequence[bytes] = ()


def present_state(
    digests: Iterable[bytes], *, place: int, epoch: int, number: int, block_size: int
) -> list[CacheEvent]:
    """All that a replica's prefix cache holds, in events that are not too large."""
    held = list(digests)
    starts = range(0, len(held), MAX_REPORTED) or (0,)
    return [
        CacheEvent(place, epoch, number, block_size, start == 0, held[start : start + MAX_REPORTED]) for start in starts
    ]


class CacheStream:
    """The prefix caches of all replicas, for one follower: what is there, then what changes.

    Of a replica whose state has to be told, at the beginning or after a change was lost, nothing is kept until the
    follower reads; it gets the state of that moment. So there is neither a gap before the changes that follow nor any
    of them twice, and one that has read too little is brought up to date in the same way.
    """

    def __init__(
        self,
        num_replicas: int,
        present: Callable[[int], list[CacheEvent]],
        on_close: Callable[[CacheStream], None],
    ) -> None:
        """`present` gives the state of a replica as it is now."""
        self._present = present
        self._on_close = on_close
        self._num_replicas = num_replicas
        self._untold: set[int] = set(range(num_replicas))  # replicas whose state comes next
        self._states: deque[CacheEvent] = deque()  # older than all changes
        self._changes: deque[CacheEvent] = deque()
        self._num_unread = 0  # blocks in changes
        self._closed = False
        self._waiter = _Waiter()

    def push(self, change: CacheEvent) -> None:
        """Called by the client for each change."""
        if change.place in self._untold:
            return
        self._changes.append(change)
        self._num_unread += _num_blocks(change)
        if self._num_unread > MAX_UNREAD_BLOCKS:
            self._untold = set(range(self._num_replicas))
            self._states.clear()
            self._changes.clear()
            self._num_unread = 0
        self._waiter.wake()

    def start_anew(self, place: int) -> None:
        """Called by the client when changes do not tell what became of a replica's state."""
        self._untold.add(place)
        self._states = deque(event for event in self._states if event.place != place)
        self._changes = deque(event for event in self._changes if event.place != place)
        self._num_unread = sum(map(_num_blocks, self._changes))
        self._waiter.wake()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> CacheEvent:
        while True:
            if self._closed:
                raise StopAsyncIteration
            while self._untold:
                self._states.extend(self._present(self._untold.pop()))
            if self._states:
                return self._states.popleft()
            if self._changes:
                change = self._changes.popleft()
                self._num_unread -= _num_blocks(change)
                return change
            await self._waiter.wait()

    def close(self) -> None:
        """Follow no more. Does nothing the second time."""
        if not self._closed:
            self._closed = True
            self._states.clear()
            self._changes.clear()
            self._on_close(self)
            self._waiter.wake()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _num_blocks(event: CacheEvent) -> int:
    return len(event.stored) + len(event.evicted)
