"""A waiting line shared by tenants: whoever has been served least is first, each tenant's own requests in order.

There may be as many tenants as requests, so they are in a heap. What a tenant has been served only grows: an entry that
is out of date is too small, comes up too early, and is put right then.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from headway.core.queue.base import WaitingQueue
from headway.core.queue.line import Line, first_index, insert
from headway.core.request import Request

_Entry = tuple[float, int, str]  # what a tenant has had, arrival index of its first request, the tenant


class SharedQueue(WaitingQueue):
    """`served`: what a tenant has had until now. The second place is that of another tenant, if there is one."""

    def __init__(self, served: Callable[[str], float]) -> None:
        self._served = served
        self._lines: dict[str, Line] = {}  # of each tenant with a request
        self._heap: list[_Entry] = []
        self._in_heap: dict[str, _Entry] = {}  # by tenant; an entry of the heap that is not in here is dead
        self._num_tokens_of: dict[str, int] = {}  # likewise
        self._front: list[Request] = []
        self._num_requests = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        for line in self._lines.values():
            yield from line.values()

    def is_waiting(self, tenant: str) -> bool:
        """Whether any request of this tenant waits."""
        return tenant in self._lines

    def num_tokens_of(self, tenant: str) -> int:
        """Of all waiting requests of this tenant together."""
        return self._num_tokens_of.get(tenant, 0)

    def first_tenant(self) -> str | None:
        """Whoever is first, also between two steps, when some have been served since anybody looked."""
        self._look(1)
        return self._front[0].options.tenant if self._front else None

    def push(self, request: Request) -> None:
        tenant = request.options.tenant
        line = self._lines.setdefault(tenant, Line())
        insert(line, request)
        if first_index(line) == request.arrival_index:
            self._enter(tenant)
        self._num_requests += 1
        self._num_tokens_of[tenant] = self._num_tokens_of.get(tenant, 0) + request.num_tokens
        self.num_tokens += request.num_tokens
        self._front.clear()

    def peek(self, index: int = 0) -> Request | None:
        if len(self._front) <= index:
            self._look(index + 1)
        return self._front[index] if index < len(self._front) else None

    def remove(self, request: Request) -> None:
        tenant = request.options.tenant
        line = self._lines[tenant]
        was_first = first_index(line) == request.arrival_index
        del line[request.arrival_index]
        if not line:
            del self._lines[tenant], self._in_heap[tenant], self._num_tokens_of[tenant]
        else:
            self._num_tokens_of[tenant] -= request.num_tokens
            if was_first:
                self._enter(tenant)
        self._clean_up()
        self._num_requests -= 1
        self.num_tokens -= request.num_tokens
        self._front.clear()

    def advance(self, now_s: float) -> None:
        self._front.clear()

    def _look(self, num_places: int) -> None:
        """Fill the front with the first requests of the first tenants, then with their second ones, and so on."""
        entries: list[_Entry] = []
        while len(entries) < num_places and (entry := self._pop()) is not None:
            if not entries or entry != entries[-1]:  # who has come back is in the heap twice
                entries.append(entry)
        for entry in entries:
            heapq.heappush(self._heap, entry)
        lines = [iter(self._lines[tenant].values()) for _, _, tenant in entries]
        self._front.clear()
        while lines and len(self._front) < num_places:
            firsts = [(line, next(line, None)) for line in lines]
            lines = [line for line, request in firsts if request is not None]
            self._front += [request for _, request in firsts if request is not None]

    def _enter(self, tenant: str) -> None:
        """A tenant's entry in the heap, as it is now."""
        entry = (self._served(tenant), first_index(self._lines[tenant]), tenant)
        self._in_heap[tenant] = entry
        heapq.heappush(self._heap, entry)

    def _pop(self) -> _Entry | None:
        """The entry of the tenant that has had least, as it is now. It has to be put back."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            served, _, tenant = entry
            if self._in_heap.get(tenant) is not entry:
                continue
            if self._served(tenant) > served:
                self._enter(tenant)
                continue
            return entry
        return None

    def _clean_up(self) -> None:
        """Dead entries must not outnumber the living."""
        if len(self._heap) > 2 * len(self._in_heap) + 64:
            self._heap = list(self._in_heap.values())
            heapq.heapify(self._heap)

    def check_invariants(self) -> None:
        living = {tenant: entry for entry in self._heap if self._in_heap.get(tenant := entry[2]) is entry}
        assert living.keys() == self._in_heap.keys() == self._lines.keys(), "a tenant would never be served, or twice"
        for tenant, line in self._lines.items():
            assert list(line) == sorted(line), f"the line of {tenant} is out of order"
            assert first_index(line) == living[tenant][1], f"another request of {tenant} is first"
            assert all(request.options.tenant == tenant for request in line.values()), "a request is in another's line"
        assert self._num_requests == sum(map(len, self._lines.values())), "the number of requests is wrong"
        assert self.num_tokens == sum(request.num_tokens for request in self), "the sum of waiting tokens is wrong"
