"""What a waiting queue is to the scheduler, which looks at its first few requests only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from itertools import takewhile

from headway.core.request import Request


class WaitingQueue(ABC):
    """Requests that wait. No operation may take longer because more of them do."""

    num_tokens: int
    """Of all waiting requests together; does not change for one that waits."""

    @property
    def num_overdue(self) -> int:
        """How many requests at its front have waited too long to be passed by any other."""
        return 0

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """All waiting requests, in no particular order."""

    @abstractmethod
    def push(self, request: Request) -> None:
        """Insert a request where it belongs: a new one, or one that was preempted."""

    @abstractmethod
    def peek(self, index: int = 0) -> Request | None:
        """The request at this index from the front, or `None`. Only the first few can be looked at."""

    def first_short(self, max_tokens: int) -> Request | None:
        """The first request with at most about `max_tokens` tokens, however many others are before it; `None` where
        finding it would take a look at all of them."""
        return None

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is: it has ended."""

    def admit(self, request: Request) -> None:
        """Take a request out because it enters the batch."""
        self.remove(request)

    def advance(self, now_s: float) -> None:  # noqa: B027 - most orders do not depend on time
        """Set the time of the step that is about to be planned."""

    @abstractmethod
    def check_invariants(self) -> None:
        """Raise `AssertionError` if the order or the bookkeeping is broken."""


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
