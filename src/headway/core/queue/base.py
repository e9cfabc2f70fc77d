"""The interface of waiting queues, and `KeyedQueue`, which sorts by a key and serves most policies.

The scheduler looks only at the first few requests of a queue. So `KeyedQueue` keeps these in a short sorted list,
`front`, and the others in a heap. Removal from the heap is lazy: an entry stays until it reaches the top, or until dead
entries outnumber the living ones.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from headway.core.request import Request

QueueEntry = tuple[Any, int, int, Request]
"""(key, order index, arrival index, request). Arrival indices are unique, so requests are not compared."""


class WaitingQueue(ABC):
    """The waiting requests. No operation that the scheduler uses in a step may slow down with their number."""

    num_tokens: int
    """The sum over all waiting requests. The number of tokens of a request does not change while it waits."""

    @property
    def num_overdue(self) -> int:
        """How many requests at the front have waited so long that no other may pass them."""
        return 0

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """Iterate over all waiting requests, in no particular order."""

    @abstractmethod
    def push(self, request: Request) -> None:
        """Insert a new or preempted request in its place."""

    @abstractmethod
    def peek(self, index: int = 0) -> Request | None:
        """Return the request at this index from the front, or `None`. Only the first few can be looked at."""

    def first_short(self, max_tokens: int) -> Request | None:
        """Return the first request with at most about `max_tokens` tokens, wherever it is in the queue. Returns `None`
        if there is none, or if the queue would have to search all requests for it."""
        return None

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is in the queue, because it has ended."""

    def admit(self, request: Request) -> None:
        """Take a request out because it is admitted to the batch."""
        self.remove(request)

    def advance(self, now_s: float) -> None:  # noqa: B027 - most orders do not depend on time
        """Set the time of the step that is planned next."""

    @abstractmethod
    def check_invariants(self) -> None:
        """Raise `AssertionError` if the order or the bookkeeping is broken."""


class KeyedQueue(WaitingQueue):
    """A queue sorted by key, smallest first, then by arrival. A key must not change while its request waits."""

    def __init__(self, key: Callable[[Request], Any], *, front_size: int) -> None:
        self._key = key
        self._front_size = front_size
        self._front: list[QueueEntry] = []
        self._heap: list[QueueEntry] = []
        self._in_heap: dict[int, QueueEntry] = {}  # by arrival index; a heap entry that is not in here is dead
        self._sizes = SizeIndex()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._front) + len(self._in_heap)

    def __iter__(self) -> Iterator[Request]:
        for entry in itertools.chain(self._front, self._in_heap.values()):
            yield entry[3]

    def push(self, request: Request) -> None:
        self.num_tokens += request.num_tokens
        entry = self._entry(request)
        self._sizes.push(entry)
        self._insert(entry)

    def peek(self, index: int = 0) -> Request | None:
        if index >= self._front_size:
            raise IndexError(f"only the first {self._front_size} requests can be looked at, not index {index}")
        while len(self._front) <= index:
            entry = self._pop_from_heap()
            if entry is None:
                return None
            self._front.append(entry)
        return self._front[index][3]

    def first(self, num_requests: int) -> list[Request]:
        """Return the first `num_requests` requests, or all if there are fewer."""
        self.peek(num_requests - 1)
        return [entry[3] for entry in self._front[:num_requests]]

    def first_short(self, max_tokens: int) -> Request | None:
        """Return the first request with at most `max_tokens` tokens, after rounding up by an eighth at most."""
        return self._sizes.first(max_tokens)

    def remove(self, request: Request) -> None:
        self._sizes.remove(request)
        if self._in_heap.pop(request.arrival_index, None) is not None:
            if len(self._heap) > 2 * len(self._in_heap) + 64:
                self._heap = list(self._in_heap.values())
                heapq.heapify(self._heap)
        else:
            self._remove_from_front(request)
        self.num_tokens -= request.num_tokens

    def _entry(self, request: Request) -> QueueEntry:
        return (self._key(request), request.order_index, request.arrival_index, request)

    def _insert(self, entry: QueueEntry) -> None:
        if self._front and entry < self._front[-1]:
            bisect.insort(self._front, entry)
            if len(self._front) > self._front_size:
                self._push_to_heap(self._front.pop())
        else:
            self._push_to_heap(entry)

    def _remove_from_front(self, request: Request) -> None:
        for index, entry in enumerate(self._front):
            if entry[3] is request:
                del self._front[index]
                return
        raise KeyError(request.request_id)

    def _push_to_heap(self, entry: QueueEntry) -> None:
        heapq.heappush(self._heap, entry)
        self._in_heap[entry[2]] = entry

    def _pop_from_heap(self) -> QueueEntry | None:
        """Remove the first living entry from the heap and return it; `None` if there is none."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._in_heap.get(entry[2]) is not entry:
                continue
            del self._in_heap[entry[2]]
            return entry
        return None

    def check_invariants(self) -> None:
        assert self._front == sorted(self._front), "the front of the queue is out of order"
        living = [entry for entry in self._heap if self._in_heap.get(entry[2]) is entry]
        assert len(living) == len(self._in_heap), "a waiting request is not in the heap, or is in it twice"
        assert len(self._front) <= self._front_size, "the front of the queue is too long"
        assert self.num_tokens == sum(request.num_tokens for request in self), "the sum of waiting tokens is wrong"
        if self._front and living:
            assert self._front[-1] < min(living), "the heap holds a request that belongs in the front"
        self._sizes.check_invariants(set(self))


class SizeIndex:
    """An index of waiting requests by their number of tokens, which does not change while they wait. It finds the first
    short request wherever it is in the queue. There is a heap for each size, with lazy removal."""

    def __init__(self) -> None:
        self._heaps: dict[int, list[QueueEntry]] = {}  # by the number of tokens, rounded up
        self._living: dict[int, QueueEntry] = {}  # by arrival index
        self._num_entries = 0  # in all heaps, including dead entries

    def push(self, entry: QueueEntry) -> None:
        self._living[entry[2]] = entry
        heapq.heappush(self._heaps.setdefault(_rounded_up(entry[3].num_tokens), []), entry)
        self._num_entries += 1

    def remove(self, request: Request) -> None:
        del self._living[request.arrival_index]
        if self._num_entries > 2 * len(self._living) + 64:
            living = list(self._living.values())
            self._heaps.clear()
            self._num_entries = 0
            for entry in living:
                self.push(entry)

    def first(self, max_tokens: int) -> Request | None:
        sizes = [size for size in self._heaps if size <= max_tokens]
        first = min(filter(None, map(self._first_of, sizes)), default=None)
        return None if first is None else first[3]

    def _first_of(self, size: int) -> QueueEntry | None:
        heap = self._heaps[size]
        while heap:
            if self._living.get(heap[0][2]) is heap[0]:
                return heap[0]
            heapq.heappop(heap)
            self._num_entries -= 1
        del self._heaps[size]
        return None

    def check_invariants(self, waiting: set[Request]) -> None:
        assert {entry[3] for entry in self._living.values()} == waiting, (
            "a waiting request has no size, or one too many"
        )
        entries = [(size, entry) for size, heap in self._heaps.items() for entry in heap]
        assert len(entries) == self._num_entries <= 2 * len(self._living) + 65, "dead entries pile up"
        living = {entry[3]: size for size, entry in entries if self._living.get(entry[2]) is entry}
        assert living == {request: _rounded_up(request.num_tokens) for request in waiting}, "a size is wrong"


def _rounded_up(num_tokens: int) -> int:
    """Round up to one of the eight sizes between two powers of two."""
    shift = max(0, num_tokens.bit_length() - 4)
    return -(-num_tokens >> shift) << shift
