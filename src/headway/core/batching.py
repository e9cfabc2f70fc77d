"""When waiting requests may enter the batch, and when finished ones leave it: the eras of batching.

    static       a batch is formed, sealed and computed to the end of its longest answer; then the next one
                 ▇▇▇▇▇▇▇▇  ▇▇▇▇▇▇▇▇
                 ▇▇▇░░░░░  ▇▇▇▇▇░░░        ░ finished, but place and memory are kept until all are
    dynamic      the same, but a batch is formed when it is full or its first request has waited long enough, and of
                 requests of about the same length
    continuous   anybody enters at any step, and leaves with its last token
                 ▇▇▇▇▇▇▇▇▇▇▇▇▇
                 ▇▇▇▇▇▇▇▇▇▇

A finished request of a sealed batch computes nothing more, which is kinder than most static batching was. Its answer is
complete for the outside when the batch is, whatever has ended it.

A beam search is one member of its batch, though the scheduler sees a request per beam and position: a beam leaves with
its token, and those that follow it (`Request.goes_on`) join the batch that it was in, as soon as there is room.
"""

from __future__ import annotations

from collections.abc import Callable

from headway.core.queue import GroupedQueue, WaitingQueue
from headway.core.request import Request

CreateQueue = Callable[[], WaitingQueue]


class ContinuousBatching:
    """Always open."""

    seals = False
    """Whether finished requests are held until the batch is done."""

    def create_queue(self, create: CreateQueue) -> WaitingQueue:
        """The policy's own line."""
        return create()

    def opens_at_s(self, waiting: WaitingQueue, *, num_seats: int, now_s: float) -> float:
        """When the next requests may enter, if no batch is under way."""
        return now_s

    def is_open(self, waiting: WaitingQueue, *, num_in_batch: int, num_seats: int, now_s: float) -> bool:
        """Whether requests may enter now."""
        return True

    def is_sealed(self, waiting: WaitingQueue, *, num_in_batch: int) -> bool:
        """Whether only beams may enter, those that follow others of the same batch."""
        return False

    def may_join(self, request: Request) -> bool:
        """Whether this one may, where others do."""
        return True

    def formed(self, *, goes_on: bool) -> None:
        """All that could enter in this step have. `goes_on`: the step was full, others may follow in the next."""


class StaticBatching(ContinuousBatching):
    """Open while a batch is being formed: until nobody waits, or there is no place or memory left."""

    seals = True

    def __init__(self) -> None:
        self._is_forming = False

    def is_open(self, waiting: WaitingQueue, *, num_in_batch: int, num_seats: int, now_s: float) -> bool:
        if self.is_sealed(waiting, num_in_batch=num_in_batch):
            return _has_followers(waiting)
        return num_in_batch > 0 or self.opens_at_s(waiting, num_seats=num_seats, now_s=now_s) <= now_s

    def is_sealed(self, waiting: WaitingQueue, *, num_in_batch: int) -> bool:
        return not self._is_forming and (num_in_batch > 0 or _has_followers(waiting))

    def formed(self, *, goes_on: bool) -> None:
        self._is_forming = goes_on


class DynamicBatching(StaticBatching):
    """Requests of a class of lengths, whose longest is at most twice its shortest, wait for each other."""

    def __init__(self, window_s: float) -> None:
        super().__init__()
        self._window_s = window_s
        self._class: int | None = None  # of the batch that is being formed
        self._lines = GroupedQueue(_length_class, self._rank)

    def create_queue(self, create: CreateQueue) -> WaitingQueue:
        """A line for each class of lengths, whatever the policy says; the first is the one whose first came first."""
        return self._lines

    def _rank(self, request: Request) -> tuple[bool, bool, int]:
        """Who may join comes first."""
        length_class = _length_class(request)
        return length_class != _FOLLOWERS, length_class != self._class, request.arrival_index

    def opens_at_s(self, waiting: WaitingQueue, *, num_seats: int, now_s: float) -> float:
        first = waiting.peek(0)
        if first is None or first.goes_on or self._lines.num_alike(first) >= num_seats:
            return now_s
        return first.arrival_s + self._window_s

    def is_open(self, waiting: WaitingQueue, *, num_in_batch: int, num_seats: int, now_s: float) -> bool:
        if not num_in_batch:
            self._class = None
        is_open = super().is_open(waiting, num_in_batch=num_in_batch, num_seats=num_seats, now_s=now_s)
        if is_open and not num_in_batch:
            first = waiting.peek(0)
            self._class = None if first is None else _length_class(first)
        return is_open

    def may_join(self, request: Request) -> bool:
        return _length_class(request) in (_FOLLOWERS, self._class)


_FOLLOWERS = -1
"""The class of beams that follow others: whatever their length, they belong to the batch that these were in."""


def _length_class(request: Request) -> int:
    """By the tokens of prompt and answer together, as far as they are known or predicted."""
    if request.goes_on:
        return _FOLLOWERS
    num_tokens = request.num_prompt_tokens + (request.options.predicted_tokens or 0.0)
    return int(num_tokens).bit_length()


def _has_followers(waiting: WaitingQueue) -> bool:
    first = waiting.peek(0)
    return first is not None and first.goes_on


def create_batching(name: str, *, window_s: float) -> ContinuousBatching:
    """static, dynamic or continuous"""
    if name == "dynamic":
        return DynamicBatching(window_s)
    return StaticBatching() if name == "static" else ContinuousBatching()
