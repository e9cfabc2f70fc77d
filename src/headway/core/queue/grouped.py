"""A waiting line of few groups. Within a group the order is that of arrival and never changes; which group's head is
first may change at any time, so all heads are compared whenever somebody asks.

    1 – 63 tokens     ▣ ▣ ▣ ▣ …
    64 – 127          ▣ ▣ …            the ranks of the first ones are compared, no others
    128 – 255         ▣ …
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import islice
from typing import Any

from headway.core.queue.base import WaitingQueue
from headway.core.queue.line import Line, insert
from headway.core.request import Request


class GroupedQueue(WaitingQueue):
    """`group`: a few dozen different values at most. `rank`: smallest first; in a group never less than that of one
    before."""

    def __init__(self, group: Callable[[Request], Hashable], rank: Callable[[Request], Any]) -> None:
        self._group_of = group
        self._rank = rank
        self._groups: dict[Hashable, Line] = {}
        self._group_by_index: dict[int, Hashable] = {}
        self._front: list[Request] = []  # what was looked at since the last change
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._group_by_index)

    def __iter__(self) -> Iterator[Request]:
        for group in self._groups.values():
            yield from group.values()

    def num_alike(self, request: Request) -> int:
        """How many wait in the group of a request that does."""
        return len(self._groups[self._group_by_index[request.arrival_index]])

    def push(self, request: Request) -> None:
        name = self._group_of(request)
        insert(self._groups.setdefault(name, Line()), request)
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
        del group[request.arrival_index]
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
            request = next(islice(group.values(), taken.count(name), None), None)
            if request is not None:
                rank = (self._rank(request), request.arrival_index)
                if best_rank is None or rank < best_rank:
                    best, best_rank = request, rank
        return best

    def check_invariants(self) -> None:
        for name, group in self._groups.items():
            assert group, f"group {name} is empty"
            assert list(group) == sorted(group), f"group {name} is out of order"
            assert all(self._group_by_index[index] == name for index in group), "a request is in another group"
        assert len(self._group_by_index) == sum(map(len, self._groups.values())), "a request is lost or twice there"
        assert self.num_tokens == sum(request.num_tokens for request in self), "the sum of waiting tokens is wrong"
