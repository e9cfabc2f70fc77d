"""What a waiting line is to the scheduler, which looks at its first few places only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from headway.core.request import Request


class WaitingQueue(ABC):
    """Requests that wait. No operation may take longer because more of them do."""

    num_tokens: int
    """Of all waiting requests together; does not change for one that waits."""

    @property
    def num_overdue(self) -> int:
        """Requests at its front that have waited too long to be passed by any other."""
        return 0

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """All waiting requests, in no particular order."""

    @abstractmethod
    def push(self, request: Request) -> None:
        """Put a request in its place: a new one, or one that comes back from preemption."""

    @abstractmethod
    def peek(self, index: int = 0) -> Request | None:
        """The request at this place from the front, or `None`. Only the first few places can be looked at."""

    def first_short(self, max_tokens: int) -> Request | None:
        """The first request with at most about so many tokens, however many others are before it, where the line can
        tell without looking at all of them."""
        return None

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands: it has ended."""

    def admit(self, request: Request) -> None:
        """Take a request out because it enters the batch."""
        self.remove(request)

    def advance(self, now_s: float) -> None:  # noqa: B027 - most orders do not depend on time
        """A step is about to be planned, at this time."""

    @abstractmethod
    def check_invariants(self) -> None:
        """Raise `AssertionError` if the order or the bookkeeping is broken."""
