"""Waiting queues that consist of groups in order of arrival. The order between the groups may change at any time.

GroupedQueue   a few groups; all their first requests are compared whenever the queue is inspected
TenantQueue    a group for each tenant; there may be as many tenants as requests, so they are in a heap
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from itertools import islice, takewhile
from typing import Any

from headway.core.queue.base import WaitingQueue
from headway.core.request import Request

_Entry = tuple[float, int, str]  # the service of a tenant, the arrival index of its first request, the tenant


class ArrivalList:
    """Requests in order of arrival. Inserting a preempted request costs about the same for any length of the list: it
    was admitted before, so most requests before it have left."""

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
        """Return the arrival index of the first request; there must be one."""
        return next(iter(self._requests))

    def check_invariants(self) -> None:
        assert list(self._requests) == sorted(self._requests), "requests are out of order"


class GroupedQueue(WaitingQueue):
    """A queue of a few groups. `group` returns a request's group; there may be a few dozen. `rank`: the smallest goes
    first. It may change at any time, but in a group it is never less than that of an earlier arrival.

        1 – 63 tokens     ▣ ▣ ▣ ▣ …
        64 – 127          ▣ ▣ …            only the ranks of the first ones are compared
        128 – 255         ▣ …
    """

    def __init__(self, group: Callable[[Request], Hashable], rank: Callable[[Request], Any]) -> None:
        self._group_of = group
        self._rank = rank
        self._groups: dict[Hashable, ArrivalList] = {}
        self._group_by_index: dict[int, Hashable] = {}
        self._front: list[Request] = []  # the first requests that were looked up since the last change
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._group_by_index)

    def __iter__(self) -> Iterator[Request]:
        for group in self._groups.values():
            yield from group

    def num_alike(self, request: Request) -> int:
        """Return how many requests wait in the group of this one."""
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
        """Return the first of all requests that are not in `_front`."""
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
    """A queue with a group for each tenant. The least served tenant is first; the second request is that of another
    tenant, if there is one.

    `served`: the service that a tenant has received so far, which only grows. So an outdated heap entry is too small:
    it reaches the top too early, and is corrected then.
    """

    def __init__(self, served: Callable[[str], float]) -> None:
        self._served = served
        self._groups: dict[str, ArrivalList] = {}  # the group of each tenant with a waiting request
        self._heap: list[_Entry] = []
        self._in_heap: dict[str, _Entry] = {}  # by tenant; a heap entry that is not in here is dead
        self._num_tokens_of: dict[str, int] = {}  # by tenant
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

    @property
    def num_tenants(self) -> int:
        """How many tenants have a waiting request."""
        return len(self._groups)

    def num_tokens_of(self, tenant: str) -> int:
        """Return the number of tokens of all waiting requests of this tenant together."""
        return self._num_tokens_of.get(tenant, 0)

    def first_tenant(self) -> str | None:
        """Return the tenant that is first now. It is current even if tenants have been served since the last lookup."""
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
            if not entries or entry != entries[-1]:  # a tenant is twice in the heap if its first request came back
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
        """Push the current entry of a tenant."""
        entry = (self._served(tenant), self._groups[tenant].first_index(), tenant)
        self._in_heap[tenant] = entry
        heapq.heappush(self._heap, entry)

    def _pop(self) -> _Entry | None:
        """Remove and return the current entry of the least served tenant. The caller must push it again."""
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
