"""Stores of KV blocks outside this engine's memory, and the transfers between them and slots.

    scheduler's plan ── BlockMoves.fetched, .stored ──► BlockTransfers ──► a store: a folder, other replicas
                                                              │                 │ on threads of its own
    scheduler  ◄── fetch_done, store_done ── engine, between steps ◄── done ────┘

No step waits for a transfer. A failed transfer only means that a block did not arrive, and its tokens are computed.
"""

from __future__ import annotations

import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from headway.core.kv.moves import BlockMoves

if TYPE_CHECKING:
    from torch import Tensor

    Slot = memoryview | Tensor
    """Room for a block: bytes of host memory, or uint8 [bytes] on the device."""

Done = Callable[[bytes, bool], None]
"""(digest, whether the transfer succeeded); may be called by any thread."""


# A fetch is reported in this many parts, each of at least this many blocks; the last part is reported in halves.
_NUM_PARTS, _LEAST_PART = 8, 8


class BlockStore(ABC):
    """Blocks by digest outside this engine's memory. One thread calls the methods, which return at once. The store's
    own threads do the work and call `done` exactly once for each digest, whatever happens."""

    @abstractmethod
    def fetch(
        self, digests: Sequence[bytes], slots: Sequence[Slot], source: str, done: Done, *, is_use: bool = True
    ) -> None:
        """For each digest in order, fill its slot exactly and call `done(digest, True)`, or call `done(digest, False)`,
        after which nothing writes to the slot. Without `is_use` the fetch does not count as a use in the order of last
        use."""

    def store(self, digest: bytes, slot: Slot, done: Done) -> None:
        """Store a block, whose slot must not change until `done`. A store that cannot do this calls `done(digest,
        False)`."""
        done(digest, False)

    def digests(self) -> Collection[bytes]:
        """The digests of all blocks in the store, the least recently used first."""
        return ()

    def note_order(self, digests: Sequence[bytes]) -> None:
        """Note that these blocks, if present, were used last, in this order."""
        return  # not every store has an order

    def take_changes(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """Digests that other engines have added and digests that are gone, since the last call."""
        return (), ()

    def clear(self) -> None:
        """Delete all blocks, after those that are being stored now."""
        return  # a store that keeps none has nothing to delete

    @property
    def max_blocks(self) -> int:
        """How many blocks the store may hold; 0: it keeps none."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """End transfers in progress soon, and the threads with them. The store cannot be used afterwards."""


class Transferred(NamedTuple):
    """A transfer that has ended."""

    digest: bytes
    ok: bool
    is_fetch: bool
    seconds: float
    """For a fetch: its share of the time that fetches took."""


class Slots(Protocol):
    """The memory that blocks are fetched to, such as `HostBlocks`."""

    def bytes_of(self, slot: int) -> Slot:
        """The memory of a slot."""
        ...

    def settle(self, slots: Iterable[int]) -> None:
        """Wait until no copy in progress uses these slots."""
        ...


class NoSlots:
    """Slots for an engine without room for blocks."""

    def bytes_of(self, slot: int) -> Slot:
        raise LookupError(f"there is no slot {slot}")

    def settle(self, slots: Iterable[int]) -> None:
        """Do nothing, as nothing is ever copied."""


class BlockTransfers:
    """Begins transfers and collects those that have ended. One thread uses it, besides the callbacks of stores."""

    def __init__(self, slots: Slots, *, disk: BlockStore | None = None, peers: BlockStore | None = None) -> None:
        """`disk`: the target of stores, and the source "" of fetches. `peers`: all other sources. `close` closes
        both."""
        self.slots = slots
        self.disk, self.peers = disk, peers
        self._ended: deque[Transferred] = deque()
        self._has_news = False  # whether it is worth while to look at them
        self._num_begun = 0
        self._num_taken = 0
        self._news_come = threading.Condition()
        self._on_end: Callable[[], None] | None = None
        self._clocks = {False: _FetchClock(), True: _FetchClock()}  # whether it is of other replicas

    @property
    def num_under_way(self) -> int:
        """The number of transfers whose end has not been taken."""
        return self._num_begun - self._num_taken

    def wake(self, on_end: Callable[[], None] | None) -> None:
        """Set a function that any thread calls when a store has ended, another part of a fetch has arrived, or a block
        of it fails."""
        self._on_end = on_end

    def begin(self, moves: BlockMoves, *, is_use: bool = True) -> None:
        """Begin the transfers of a plan. Each of them ends, successfully or not. If this raises, none has begun.
        `is_use` is as in `BlockStore.fetch`."""
        self.slots.settle([slot for _, slot, _ in moves.fetched] + [slot for _, slot in moves.stored])
        self._num_begun += len(moves.fetched) + len(moves.stored)
        by_source: dict[str, list[tuple[bytes, int]]] = {}
        for digest, slot, source in moves.fetched:
            by_source.setdefault(source, []).append((digest, slot))
        for source, wanted in by_source.items():
            self._fetch(source, wanted, is_use=is_use)
        for digest, slot in moves.stored:
            self._store(digest, slot)

    def _fetch(self, source: str, wanted: Sequence[tuple[bytes, int]], *, is_use: bool) -> None:
        store, clock, begun_s = self.peers if source else self.disk, self._clocks[bool(source)], time.monotonic()
        num_left, part = itertools.count(len(wanted) - 1, -1), max(_LEAST_PART, len(wanted) // _NUM_PARTS)

        def done(digest: bytes, ok: bool) -> None:
            left = next(num_left)
            wakes = not ok or left % part == 0 or (left < part and left.bit_count() == 1)
            self._end(Transferred(digest, ok, True, clock.lap(begun_s)), wakes=wakes)

        if store is None:
            for digest, _ in wanted:
                done(digest, False)
        else:
            views = [self.slots.bytes_of(slot) for _, slot in wanted]
            store.fetch([digest for digest, _ in wanted], views, source, done, is_use=is_use)

    def _store(self, digest: bytes, slot: int) -> None:
        def done(digest: bytes, ok: bool) -> None:
            self._end(Transferred(digest, ok, False, 0.0), wakes=True)

        if self.disk is None:
            done(digest, False)
        else:
            self.disk.store(digest, self.slots.bytes_of(slot), done)

    def _end(self, ended: Transferred, *, wakes: bool) -> None:
        self._ended.append(ended)
        if not wakes:
            return
        with self._news_come:
            self._has_news = True
            self._news_come.notify_all()
        if self._on_end is not None:
            self._on_end()

    @property
    def has_news(self) -> bool:
        """Whether a transfer has ended that is worth waking the engine for."""
        return self._has_news

    def take(self) -> list[Transferred]:
        """Return the transfers that have ended since the last call."""
        self._has_news, ended = False, []
        while self._ended:
            ended.append(self._ended.popleft())
        self._num_taken += len(ended)
        return ended

    def wait(self, timeout_s: float) -> bool:
        """Wait until `has_news`, at most `timeout_s`. Returns whether it is set."""
        with self._news_come:
            return self._news_come.wait_for(lambda: self._has_news, timeout_s)

    def settle(self, timeout_s: float) -> bool:
        """Wait until no transfer is in progress, and forget all results. Returns False if that took longer than
        `timeout_s`."""
        until_s = time.monotonic() + timeout_s
        while self.num_under_way and (left_s := until_s - time.monotonic()) > 0:
            self.wait(left_s)
            self.take()
        return not self.num_under_way

    def close(self) -> None:
        """Close the stores."""
        for store in (self.disk, self.peers):
            if store is not None:
                store.close()


class _FetchClock:
    """Divides the time in which fetches are in progress among their blocks. The blocks' seconds add up to that time,
    however many fetches run at once."""

    def __init__(self) -> None:
        self._last_s = 0.0
        self._lock = threading.Lock()

    def lap(self, begun_s: float) -> float:
        """The seconds since the last block arrived, or since this one's fetch was begun if that was later."""
        with self._lock:
            now_s = time.monotonic()
            seconds, self._last_s = now_s - max(self._last_s, begun_s), now_s
            return seconds
