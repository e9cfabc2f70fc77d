"""Streams of the state of engines, for viewers and followers. Their buffers are limited: a stream that is full
continues from the present state, and the engine never waits for a reader."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from headway.core.kv.cache_report import MAX_REPORTED
from headway.front.streams import Waiter
from headway.wire.messages import Snapshot

MAX_SNAPSHOTS = 512
"""The number of unread steps after which a viewer misses some."""
MAX_UNREAD_BLOCKS = 32_768
"""The limit of unread block changes for a follower of caches. A follower with more gets the whole state anew."""


class SnapshotStream:
    """The snapshots for one viewer. The stream never ends by itself, not even when the engine is restarted."""

    def __init__(self, on_close: Callable[[SnapshotStream], None]) -> None:
        self._on_close = on_close
        self._snapshots: deque[Snapshot] = deque(maxlen=MAX_SNAPSHOTS)
        self._closed = False
        self._waiter = Waiter()

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
        """Stop watching. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._snapshots.clear()
            self._on_close(self)
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


class CacheEvent(NamedTuple):
    """The content of a replica's prefix cache, or a change of it."""

    place: int
    epoch: int
    """A new value means that the replica has a new process and a new cache."""
    number: int
    """The number of the last report included. Reports are numbered consecutively; -1 means that there was none."""
    block_size: int
    is_whole: bool
    """Whether this event replaces all that was known of the replica. Later events with the same number belong to the
    same state."""
    stored: Sequence[bytes]
    evicted: Sequence[bytes] = ()


def present_state(
    digests: Iterable[bytes], *, place: int, epoch: int, number: int, block_size: int
) -> list[CacheEvent]:
    """The whole content of a replica's prefix cache, split into events of limited size."""
    held = list(digests)
    starts = range(0, len(held), MAX_REPORTED) or (0,)
    return [
        CacheEvent(place, epoch, number, block_size, start == 0, held[start : start + MAX_REPORTED]) for start in starts
    ]


class CacheStream:
    """The prefix caches of all replicas, for one follower: first their content, then the changes.

    While a replica's whole state has to be sent (at the beginning, or after a lost change), nothing is buffered for it.
    When the follower reads, it gets the state of that moment, so the changes that come later follow without gap or
    repetition. A follower that reads too slowly is brought up to date in the same way.
    """

    def __init__(
        self,
        num_replicas: int,
        present: Callable[[int], list[CacheEvent]],
        on_close: Callable[[CacheStream], None],
    ) -> None:
        """`present` returns the current state of a replica."""
        self._present = present
        self._on_close = on_close
        self._num_replicas = num_replicas
        self._unsent_states: set[int] = set(range(num_replicas))  # replicas whose state comes next
        self._states: deque[CacheEvent] = deque()  # older than all changes
        self._changes: deque[CacheEvent] = deque()
        self._num_unread = 0  # blocks in changes
        self._closed = False
        self._waiter = Waiter()

    def push(self, change: CacheEvent) -> None:
        """Called by the client for each change."""
        if change.place in self._unsent_states:
            return
        self._changes.append(change)
        self._num_unread += _num_blocks(change)
        if self._num_unread > MAX_UNREAD_BLOCKS:
            self._unsent_states = set(range(self._num_replicas))
            self._states.clear()
            self._changes.clear()
            self._num_unread = 0
        self._waiter.wake()

    def start_anew(self, place: int) -> None:
        """Called by the client when a replica's state is lost and must be sent again."""
        self._unsent_states.add(place)
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
            while self._unsent_states:
                self._states.extend(self._present(self._unsent_states.pop()))
            if self._states:
                return self._states.popleft()
            if self._changes:
                change = self._changes.popleft()
                self._num_unread -= _num_blocks(change)
                return change
            await self._waiter.wait()

    def close(self) -> None:
        """Stop following. A second call does nothing."""
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
