"""Which requests are due: those with a time of their own, and those that wait for the end of another.

The turns of a conversation follow each other: turn k is due `think_s` after the end of turn k - 1, and not before its
own arrival time.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Protocol

from headway.errors import ConfigError


class Timed(Protocol):
    """A request, as far as its time goes; the fields are those of `BenchRequest`."""

    @property
    def arrival_s(self) -> float: ...
    @property
    def after(self) -> int | None: ...
    @property
    def think_s(self) -> float: ...


class Agenda:
    """The requests of some work that have not been sent yet, by number."""

    def __init__(self, work: Sequence[Timed]) -> None:
        """`ConfigError` if a request waits for one that does not stand before it: it might wait for ever."""
        self._work = work
        self._due: list[tuple[float, int]] = []
        self._followers: defaultdict[int, list[int]] = defaultdict(list)
        self._num_left = len(work)
        for index, request in enumerate(work):
            if request.after is None:
                self._due.append((request.arrival_s, index))
            elif 0 <= request.after < index:
                self._followers[request.after].append(index)
            else:
                raise ConfigError(f"Request {index} follows request {request.after}, which does not stand before it.")
        heapq.heapify(self._due)

    def __len__(self) -> int:
        """How many have not been taken, those included whose time is not known yet."""
        return self._num_left

    @property
    def next_due_s(self) -> float:
        """When the next one with a time is due; infinity while all wait for others."""
        return self._due[0][0] if self._due else float("inf")

    def take_due(self, now_s: float) -> Iterator[tuple[int, float]]:
        """Those that are due, in order of their times: (number, when it was due)."""
        while self._due and self._due[0][0] <= now_s:
            due_s, index = heapq.heappop(self._due)
            self._num_left -= 1
            yield index, due_s

    def ended(self, index: int, at_s: float) -> None:
        """A request has ended: whoever waits for it has a time now."""
        for follower in self._followers.pop(index, ()):
            request = self._work[follower]
            heapq.heappush(self._due, (max(request.arrival_s, at_s + request.think_s), follower))
