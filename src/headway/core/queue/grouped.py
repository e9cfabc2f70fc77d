"""Waiting queues of several groups, each in order of arrival: which group's first request goes first may change.

GroupedQueue   a few groups; all their first requests are compared whenever the queue is looked at
TenantQueue    a group for each tenant, of which there may be as many as requests: they are in a heap
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from itertools import islice, takewhile
from typing import Any

from headway.core.queue.base import WaitingQueue
from headway.core.request import Request

_Entry = tuple[float, int, str]  # what a tenant has had, arrival index of its first request, the tenant


class ArrivalList:
    """Requests in order of arrival. One that was preempted is inserted at a cost that does not grow with the list: most
    of those before it have gone, since it was admitted once."""

    def __init__(self) -> None:
        self._requests: OrderedDict[int, Request] = OrderedDict()  # by arrival index, and in its order

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def insert(self, request: Request) -> None:
        requests, index = self._requests, request.arrival_index
        is_last = not requests or next(reversed(requests)) < index
        requests[index] = request
        if not is_last:
            before = list(takewhile(lambda other: other < index, requests))
            for one in (index, *reversed(before)):
                requests.move_to_end(one, last=False)

    def remove(self, request: Request) -> None:
        del self._requests[request.arrival_index]

    def first_index(self) -> int:
        """The arrival index of the first request; there must be one."""
        return next(iter(self._requests))

    def check_invariants(self) -> None:
        assert list(self._requests) == sorted(self._requests), "requests are out of order"


class GroupedQueue(WaitingQueue):
    """`group`: a few dozen different values at most. `rank`: smallest first; in a group never less than that of an
    earlier arrival, but it may change at any time.

        1 – 63 tokens     ▣ ▣ ▣ ▣ …
        64 – 127          ▣ ▣ …            the ranks of the first ones are compared, no others
        128 – 255         ▣ …
    """

    def __init__(self, group: Callable[[Request], Hashable], rank: Callable[[Request], Any]) -> None:
        self._group_of = group
        self._rank = rank
        self._groups: dict[Hashable, ArrivalList] = {}
        self._group_by_index: dict[int, Hashable] = {}
        self._front: list[Request] = []  # what was looked at since the last change
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._group_by_index)

    def __iter__(self) -> Iterator[Request]:
        for group in self._groups.values():
            yield from group

    def num_alike(self, request: Request) -> int:
        """How many requests wait in the group of a waiting one."""
        return len(self._groups[self._group_by_index[request.arrival_index]])

    def push(self, request: Request) -> None:
        name = self._group_of(request)
        self._groups.setdefault(name, ArrivalList()).insert(request)
        self._group_by_index[request.arrival_index] = name
        self.num_tokens += request.num_tokens
        self._front.clear()

    def peek(self, index: int = 0) -> Request | None:
        while len(self._front) <= index:
            following = self._following()
            if following is None:
                return None
            self._front.append(following)
        return self._front[index]

    def remove(self, request: Request) -> None:
        name = self._group_by_index.pop(request.arrival_index)
        group = self._groups[name]
        group.remove(request)
        if not group:
            del self._groups[name]
        self.num_tokens -= request.num_tokens
        self._front.clear()

    def advance(self, now_s: float) -> None:
        self._front.clear()  # ranks have changed

    def _following(self) -> Request | None:
        """The first of all that are not in `_front`."""
        taken = [self._group_by_index[request.arrival_index] for request in self._front]
        best, best_rank = None, None
        for name, group in self._groups.items():
            request = next(islice(group, taken.count(name), None), None)
            if request is not None:
                rank = (self._rank(request), request.arrival_index)
                if best_rank is None or rank < best_rank:
                    best, best_rank = request, rank
        return best

    def check_invariants(self) -> None:
        for name, group in self._groups.items():
            assert group, f"group {name} is empty"
            group.check_invariants()
            assert all(self._group_by_index[request.arrival_index] == name for request in group), (
                "a request is in another group"
            )
        assert len(self._group_by_index) == sum(map(len, self._groups.values())), "a request is lost or twice there"
        assert self.num_tokens == sum(request.num_tokens for request in self), "the sum of waiting tokens is wrong"


class TenantQueue(WaitingQueue):
    """The tenant that has been served least is first; the second request is that of another tenant, if there is one.

    `served`: what a tenant has had until now, which only grows. So an entry of the heap that is out of date is too
    small, comes up too early, and is corrected then.
    """

    def __init__(self, served: Callable[[str], float]) -> None:
        self._served = served
        self._groups: dict[str, ArrivalList] = {}  # of each tenant with a request
        self._heap: list[_Entry] = []
        self._in_heap: dict[str, _Entry] = {}  # by tenant; an entry of the heap that is not in here is dead
        self._num_tokens_of: dict[str, int] = {}  # likewise
        self._front: list[Request] = []
        self._num_requests = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        for group in self._groups.values():
            yield from group

    def is_waiting(self, tenant: str) -> bool:
        """Whether any request of this tenant waits."""
        return tenant in self._groups

    def num_tokens_of(self, tenant: str) -> int:
        """Of all waiting requests of this tenant together."""
        return self._num_tokens_of.get(tenant, 0)

    def first_tenant(self) -> str | None:
        """The tenant that is first now, also between two steps, when some have been served since the last look."""
        self._look(1)
        return self._front[0].options.tenant if self._front else None

    def push(self, request: Request) -> None:
        tenant = request.options.tenant
        group = self._groups.setdefault(tenant, ArrivalList())
        group.insert(request)
        if group.first_index() == request.arrival_index:
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
        group = self._groups[tenant]
        was_first = group.first_index() == request.arrival_index
        group.remove(request)
        if not group:
            del self._groups[tenant], self._in_heap[tenant], self._num_tokens_of[tenant]
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

    def _look(self, num_requests: int) -> None:
        """Fill the front with the first requests of the first tenants, then with their second ones, and so on."""
        entries: list[_Entry] = []
        while len(entries) < num_requests and (entry := self._pop()) is not None:
            if not entries or entry != entries[-1]:  # a tenant whose first request has come back is in the heap twice
                entries.append(entry)
        for entry in entries:
            heapq.heappush(self._heap, entry)
        groups = [iter(self._groups[tenant]) for _, _, tenant in entries]
        self._front.clear()
        while groups and len(self._front) < num_requests:
            firsts = [(group, next(group, None)) for group in groups]
            groups = [group for group, request in firsts if request is not None]
            self._front += [request for _, request in firsts if request is not None]

    def _enter(self, tenant: str) -> None:
        """Push a tenant's entry, as it is now."""
        entry = (self._served(tenant), self._groups[tenant].first_index(), tenant)
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
        """Rebuild the heap when dead entries outnumber the others."""
        if len(self._heap) > 2 * len(self._in_heap) + 64:
            self._heap = list(self._in_heap.values())
            heapq.heapify(self._heap)

    def check_invariants(self) -> None:
        valid = {tenant: entry for entry in self._heap if self._in_heap.get(tenant := entry[2]) is entry}
        assert valid.keys() == self._in_heap.keys() == self._groups.keys(), "a tenant would never be served, or twice"
        for tenant, group in self._groups.items():
            group.check_invariants()
            assert group.first_index() == valid[tenant][1], f"another request of {tenant} is first"
            assert all(request.options.tenant == tenant for request in group), "a request is in another's group"
        assert self._num_requests == sum(map(len, self._groups.values())), "the number of requests is wrong"
        assert self.num_tokens == sum(request.num_tokens for request in self), "the sum of waiting tokens is wrong"
