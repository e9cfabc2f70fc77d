"""A waiting line in the order of a key, at a cost per operation that does not grow with the line.

A heap holds the crowd; a short sorted list, `front`, holds the first few, which is where the scheduler looks. Removal
from the heap is lazy: the entry stays until it surfaces or until dead entries outnumber the living.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from headway.core.queue.base import WaitingQueue
from headway.core.request import Request

_Entry = tuple[Any, int, int, Request]  # key, place, arrival index (unique, so requests are never compared), request


class KeyedQueue(WaitingQueue):
    """Smallest key first, then in order of arrival. A key stays the same while its request waits."""

    def __init__(self, key: Callable[[Request], Any], *, front_size: int) -> None:
        self._key = key
        self._front_size = front_size
        self._front: list[_Entry] = []
        self._heap: list[_Entry] = []
        self._in_heap: dict[int, _Entry] = {}  # by arrival index; an entry of the heap that is not in here is dead
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._front) + len(self._in_heap)

    def __iter__(self) -> Iterator[Request]:
        for entry in itertools.chain(self._front, self._in_heap.values()):
            yield entry[3]

    def push(self, request: Request) -> None:
        self.num_tokens += request.num_tokens
        self._place(self._entry(request))

    def peek(self, index: int = 0) -> Request | None:
        if index >= self._front_size:
            raise IndexError(f"only the first {self._front_size} places can be looked at, not place {index}")
        while len(self._front) <= index:
            entry = self._pop_from_heap()
            if entry is None:
                return None
            self._front.append(entry)
        return self._front[index][3]

    def first(self, num_places: int) -> list[Request]:
        """The requests at the first places, as far as there are any."""
        self.peek(num_places - 1)
        return [entry[3] for entry in self._front[:num_places]]

    def remove(self, request: Request) -> None:
        if self._in_heap.pop(request.arrival_index, None) is not None:
            if len(self._heap) > 2 * len(self._in_heap) + 64:
                self._heap = list(self._in_heap.values())
                heapq.heapify(self._heap)
        else:
            self._remove_from_front(request)
        self.num_tokens -= request.num_tokens

    def _entry(self, request: Request) -> _Entry:
        return (self._key(request), request.queue_place, request.arrival_index, request)

    def _place(self, entry: _Entry) -> None:
        if self._front and entry < self._front[-1]:
            bisect.insort(self._front, entry)
            if len(self._front) > self._front_size:
                self._push_to_heap(self._front.pop())
        else:
            self._push_to_heap(entry)

    def _remove_from_front(self, request: Request) -> None:
        for place, entry in enumerate(self._front):
            if entry[3] is request:
                del self._front[place]
                return
        raise KeyError(request.request_id)

    def _push_to_heap(self, entry: _Entry) -> None:
        heapq.heappush(self._heap, entry)
        self._in_heap[entry[2]] = entry

    def _pop_from_heap(self) -> _Entry | None:
        """The first living entry."""
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
