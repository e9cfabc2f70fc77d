"""Streams of the state of engines, for viewers and followers. They hold a limited amount: one that is full goes on from
the present, and the engine never waits for its reader."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from headway.core.kv.cache_report import MAX_REPORTED
from headway.front.streams import Waiter
from headway.wire.messages import Snapshot

MAX_SNAPSHOTS = 512
"""Steps that a viewer may lag behind before it misses some."""
MAX_UNREAD_BLOCKS = 32_768
"""Blocks that came or went and that a follower of caches has not read. A follower with more gets all that is there
anew."""


class SnapshotStream:
    """Snapshots for one viewer, one by one. It never ends by itself, not even when the engine is restarted."""

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

    Of a replica whose state has to be sent, at the beginning or after a change was lost, nothing is kept until the
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
        """Called by the client when changes do not say what became of a replica's state."""
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
