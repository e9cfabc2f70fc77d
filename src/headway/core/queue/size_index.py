"""Waiting requests by the size of their prompts, to find the first short one however many others are before it.

There is a heap for each size, with lazy removal: an entry stays until it surfaces, or dead ones outnumber the living.
"""

from __future__ import annotations

import heapq
from typing import Any

from headway.core.request import Request

QueueEntry = tuple[Any, int, int, Request]
"""(key, order index, arrival index, request). Arrival indices are unique, so requests are not compared."""


class SizeIndex:
    """Waiting requests by their number of tokens, which does not change while they wait."""

    def __init__(self) -> None:
        self._heaps: dict[int, list[QueueEntry]] = {}  # by the number of tokens, rounded up
        self._living: dict[int, QueueEntry] = {}  # by arrival index
        self._num_entries = 0  # in the heaps, dead ones too

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
    """To one of eight sizes between two powers of two."""
    shift = max(0, num_tokens.bit_length() - 4)
    return -(-num_tokens >> shift) << shift
