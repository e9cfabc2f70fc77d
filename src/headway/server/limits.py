"""How much may wait: a queue bounded by requests and by prompt tokens.

A request waits from the moment its body is here until its first token has come. How many tokens it has is first guessed
from the size of its body, so that a full queue costs nobody the work of tokenising; the guess is replaced by the truth
as soon as that is known. An empty queue takes any one request, so nothing is refused forever.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from headway.server.errors import overloaded

BYTES_PER_TOKEN = 4
"""What a token of text is long on average, JSON included; a guess that is soon replaced."""


class QueueLimits:
    """Counts what waits and refuses what does not fit."""

    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_requests = 0
        self.num_tokens = 0

    def reserve(self, *, body_bytes: int) -> Reservation:
        """A place for a request of which only the size is known; 429 if there is none."""
        guess = body_bytes // BYTES_PER_TOKEN
        self._check(1, guess)
        return Reservation(self, 1, guess)

    def _check(self, num_requests: int, num_tokens: int) -> None:
        if self.num_requests == 0:
            return
        if self.num_requests + num_requests > self.max_requests:
            raise overloaded(
                f"The queue is full: {self.num_requests} requests are waiting. Please retry later.", code="queue_full"
            )
        if self.num_tokens + num_tokens > self.max_tokens:
            raise overloaded(
                f"The queue is full: {self.num_tokens} prompt tokens are waiting. Please retry later.",
                code="queue_full",
            )


class Reservation:
    """One HTTP request's part of the queue; a context manager that gives back what is left of it."""

    def __init__(self, limits: QueueLimits, num_requests: int, num_tokens: int) -> None:
        self._limits = limits
        self._num_requests = 0
        self._num_tokens = 0
        self._add(num_requests, num_tokens)

    def settle(self, *, num_requests: int, num_tokens: int) -> None:
        """Replace the guess by what the request really is; 429 if that does not fit."""
        self.give_back(self._num_requests, self._num_tokens)
        self._limits._check(num_requests, num_tokens)
        self._add(num_requests, num_tokens)

    def give_back(self, num_requests: int, num_tokens: int) -> None:
        """These wait no longer."""
        self._add(-num_requests, -num_tokens)

    def _add(self, num_requests: int, num_tokens: int) -> None:
        self._num_requests += num_requests
        self._num_tokens += num_tokens
        self._limits.num_requests += num_requests
        self._limits.num_tokens += num_tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back(self._num_requests, self._num_tokens)
