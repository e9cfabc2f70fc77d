"""When waiting requests may enter the batch, and when finished ones leave it: the eras of batching.

    static       a batch is formed, sealed and computed to the end of its longest answer; then the next one
                 ▇▇▇▇▇▇▇▇  ▇▇▇▇▇▇▇▇
                 ▇▇▇░░░░░  ▇▇▇▇▇░░░        ░ finished, but seat and memory are held until all are
    dynamic      the same, but a batch is formed when it is full or its first request has waited long enough, and of
                 requests of about the same length
    continuous   requests enter at any step, and leave with their last token
                 ▇▇▇▇▇▇▇▇▇▇▇▇▇
                 ▇▇▇▇▇▇▇▇▇▇

A finished request of a sealed batch computes nothing more, which is cheaper than most static batching was. Its answer
is complete for the outside when the batch is, whatever has ended it.

A beam search is one member of its batch, though the scheduler sees a request per beam and position: a beam leaves with
its token, and its forks join the batch that it was in, as soon as there is room.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable

from headway.core.live_requests import LiveRequests
from headway.core.queue import GroupedQueue, WaitingQueue
from headway.core.request import Request, RequestStatus
from headway.core.scheduler_output import RequestUpdate


class Entrants(enum.Enum):
    """Which waiting requests may enter the batch in a step."""

    NONE = "none"
    FORKS = "forks"
    """The batch is sealed: only forks of its own beams."""
    ALL = "all"


class ContinuousBatching:
    """Requests enter at any step and leave with their last token."""

    seals = False
    """Whether a batch is computed to its end before other requests may enter."""

    def create_queue(self, create: Callable[[], WaitingQueue]) -> WaitingQueue:
        """The waiting queue: the policy's, unless the era has an order of its own."""
        return create()

    def opens_at_s(self, live: LiveRequests, *, now_s: float) -> float:
        """When the next requests may enter, if the batch is empty."""
        return now_s

    def entrants(self, live: LiveRequests, *, now_s: float) -> Entrants:
        """Which waiting requests may enter now."""
        return Entrants.ALL

    def may_enter(self, request: Request, entrants: Entrants) -> bool:
        """Whether this waiting request is one of them."""
        return True

    def note_admitted(self, live: LiveRequests, entrants: Entrants, *, is_step_full: bool) -> None:
        """Note that all waiting requests that could enter in this step have. `is_step_full`: the step had no tokens for
        more of them."""

    def end(self, request: Request, status: RequestStatus, live: LiveRequests) -> bool:
        """End a request that has its last token, or has failed. Returns whether it has ended; otherwise it ends with
        its batch."""
        live.finish(request.request_id, status)
        return True

    def release(self, live: LiveRequests) -> list[RequestUpdate]:
        """End the held requests, if all of their batch are; their tokens have come before. Returns their ends."""
        return []

    def release_after(self, requests: Iterable[Request], live: LiveRequests) -> list[RequestUpdate]:
        """The same, when the result of a step with these requests has been taken in."""
        return []


class StaticBatching(ContinuousBatching):
    """A batch is formed until no request waits, or there is no seat or memory left. Then it is sealed."""

    seals = True

    def __init__(self) -> None:
        self._is_forming = False

    def entrants(self, live: LiveRequests, *, now_s: float) -> Entrants:
        first = live.waiting.peek(0)
        starts_with_fork = first is not None and first.is_fork
        if not self._is_forming and (live.num_in_batch or starts_with_fork):
            return Entrants.FORKS if starts_with_fork else Entrants.NONE
        is_open = live.num_in_batch > 0 or self.opens_at_s(live, now_s=now_s) <= now_s
        return Entrants.ALL if is_open else Entrants.NONE

    def may_enter(self, request: Request, entrants: Entrants) -> bool:
        return entrants is Entrants.ALL or request.is_fork

    def note_admitted(self, live: LiveRequests, entrants: Entrants, *, is_step_full: bool) -> None:
        others_may_follow = is_step_full and live.num_free_seats > 0 and len(live.waiting) > 0
        self._is_forming = entrants is Entrants.ALL and others_may_follow

    def end(self, request: Request, status: RequestStatus, live: LiveRequests) -> bool:
        is_failure = status is RequestStatus.FINISHED_ERROR
        if is_failure or request.is_beam or request.status is not RequestStatus.RUNNING:
            return super().end(request, status, live)
        live.hold(request, status)
        return False

    def release(self, live: LiveRequests) -> list[RequestUpdate]:
        if live.running:
            return []
        held = list(live.held.items())
        for request, status in held:
            live.finish(request.request_id, status)
        return [RequestUpdate(request.request_id, (), (), status) for request, status in held]

    def release_after(self, requests: Iterable[Request], live: LiveRequests) -> list[RequestUpdate]:
        # The forks of a beam follow in the same batch: the engine adds them before it asks for the next plan.
        if not live.held or live.running or any(request.is_beam for request in requests):
            return []
        return self.release(live)


class DynamicBatching(StaticBatching):
    """Requests of a class of lengths, whose longest is at most twice its shortest, wait for each other."""

    def __init__(self, *, window_s: float, max_num_seqs: int) -> None:
        super().__init__()
        self._window_s = window_s
        self._max_num_seqs = max_num_seqs
        self._class: int | None = None  # of the batch that is being formed
        self._queue = GroupedQueue(_length_class, self._rank)

    def create_queue(self, create: Callable[[], WaitingQueue]) -> WaitingQueue:
        """Grouped by class of lengths, whatever the policy; the class with the earliest arrival is first."""
        return self._queue

    def _rank(self, request: Request) -> tuple[bool, bool, int]:
        """Requests that may enter the batch that is being formed come first."""
        length_class = _length_class(request)
        return length_class != _FORKS, length_class != self._class, request.arrival_index

    def opens_at_s(self, live: LiveRequests, *, now_s: float) -> float:
        first = self._queue.peek(0)
        if first is None or first.is_fork or self._queue.num_alike(first) >= self._max_num_seqs:
            return now_s
        return first.arrival_s + self._window_s

    def entrants(self, live: LiveRequests, *, now_s: float) -> Entrants:
        if not live.num_in_batch:
            self._class = None
        entrants = super().entrants(live, now_s=now_s)
        if entrants is not Entrants.NONE and not live.num_in_batch:
            first = self._queue.peek(0)
            self._class = None if first is None else _length_class(first)
        return entrants

    def may_enter(self, request: Request, entrants: Entrants) -> bool:
        return super().may_enter(request, entrants) and _length_class(request) in (_FORKS, self._class)


_FORKS = -1
"""The class of forks: whatever their length, they belong to the batch of the beams that they continue."""


def _length_class(request: Request) -> int:
    """By the tokens of prompt and answer together, as far as they are known or predicted."""
    if request.is_fork:
        return _FORKS
    num_tokens = request.num_prompt_tokens + (request.options.predicted_tokens or 0.0)
    return int(num_tokens).bit_length()


def create_batching(name: str, *, window_s: float, max_num_seqs: int) -> ContinuousBatching:
    """static, dynamic or continuous"""
    if name == "dynamic":
        return DynamicBatching(window_s=window_s, max_num_seqs=max_num_seqs)
    return StaticBatching() if name == "static" else ContinuousBatching()
