"""A waiting line shared by tenants: whoever has been served least is first, each tenant's own requests in order.

There may be as many tenants as requests, so they are in a heap. What a tenant has been served only grows: an entry that
is out of date is too small, comes up too early, and is put right then.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator

from headway.core.queue.base import WaitingQueue
from headway.core.request import Request


class SharedQueue(WaitingQueue):
    """`served`: what a tenant has had until now. The second place is that of another tenant, if there is one."""

    def __init__(self, served: Callable[[str], float]) -> None:
        self._served = served
        self._lines: dict[str, OrderedDict[int, Request]] = {}  # of each tenant with a request, by arrival index
        self._heap: list[tuple[float, int, str]] = []  # (served, arrival index of its first, tenant)
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

    def first_tenant(self) -> str | None:
        """Whoever is first, also between two steps, when some have been served since anybody looked."""
        self._look(1)
        return self._front[0].tenant if self._front else None

    def push(self, request: Request) -> None:
        line = self._lines.setdefault(request.tenant, OrderedDict())
        is_first = not line or request.arrival_index < next(iter(line))
        is_last = not line or request.arrival_index > next(reversed(line))
        line[request.arrival_index] = request
        if not is_last:
            self._lines[request.tenant] = OrderedDict(sorted(line.items()))
        if is_first:
            heapq.heappush(self._heap, (self._served(request.tenant), request.arrival_index, request.tenant))
        self._num_requests += 1
        self.num_tokens += request.num_tokens
        self._front.clear()

    def peek(self, index: int = 0) -> Request | None:
        if len(self._front) <= index:
            self._look(index + 1)
        return self._front[index] if index < len(self._front) else None

    def remove(self, request: Request) -> None:
        line = self._lines[request.tenant]
        was_first = next(iter(line)) == request.arrival_index
        del line[request.arrival_index]
        if not line:
            del self._lines[request.tenant]
        elif was_first:
            heapq.heappush(self._heap, (self._served(request.tenant), next(iter(line)), request.tenant))
        self._num_requests -= 1
        self.num_tokens -= request.num_tokens
        self._front.clear()

    def advance(self, now_s: float) -> None:
        self._front.clear()

    def _look(self, num_places: int) -> None:
        """Fill the front with the first requests of the first tenants, then with their second ones, and so on."""
        entries: list[tuple[float, int, str]] = []
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

    def _pop(self) -> tuple[float, int, str] | None:
        """The entry of the tenant that has had least, as it is now."""
        while self._heap:
            served, index, tenant = heapq.heappop(self._heap)
            line = self._lines.get(tenant)
            if line is None or next(iter(line)) != index:
                continue  # there is another entry for this tenant, or it does not wait any more
            current = self._served(tenant)
            if current > served:
                heapq.heappush(self._heap, (current, index, tenant))
                continue
            return served, index, tenant
        return None

    def check_invariants(self) -> None:
        firsts = {(index, tenant) for _, index, tenant in self._heap}
        for tenant, line in self._lines.items():
            assert list(line) == sorted(line), f"the line of {tenant} is out of order"
            assert (next(iter(line)), tenant) in firsts, f"{tenant} would never be served"
            assert all(request.tenant == tenant for request in line.values()), "a request is in another's line"
        assert self._num_requests == sum(map(len, self._lines.values())), "the number of requests is wrong"
        assert self.num_tokens == sum(request.num_tokens for request in self), "the sum of waiting tokens is wrong"
