"""Sealed batches, the eras before continuous batching: when waiting requests may enter, and when finished ones leave.

    static       a batch is formed, sealed and computed to the end of its longest answer; then the next one
                 ▇▇▇▇▇▇▇▇  ▇▇▇▇▇▇▇▇
                 ▇▇▇░░░░░  ▇▇▇▇▇░░░        ░ finished, but seat and memory are held until all are
    dynamic      the same, but a batch is formed when it is full or its first request has waited long enough, and of
                 requests of about the same length
    continuous   requests enter at any step, and leave with their last token: `LiveRequests` itself
                 ▇▇▇▇▇▇▇▇▇▇▇▇▇
                 ▇▇▇▇▇▇▇▇▇▇

A finished request of a sealed batch computes nothing more, which is cheaper than most static batching was. Its answer
is complete for the outside when the batch is, whatever has ended it.

A beam search is one member of its batch, though the scheduler sees a request per beam and position: a beam leaves with
its token, and its forks join the batch that it was in, as soon as there is room.
"""

from __future__ import annotations

from headway.core.kv.manager import KVCacheManager
from headway.core.live_requests import Entrants, LiveRequests
from headway.core.policy import SchedulingPolicy
from headway.core.queue import GroupedQueue, WaitingQueue
from headway.core.request import Request, RequestStatus
from headway.core.scheduler_output import RequestUpdate


class StaticBatches(LiveRequests):
    """A batch is formed until no request waits, or there is no seat or memory left. Then it is sealed."""

    seals = True

    def __init__(
        self, *, waiting: WaitingQueue, kv_cache: KVCacheManager, policy: SchedulingPolicy, max_num_seqs: int
    ) -> None:
        super().__init__(waiting=waiting, kv_cache=kv_cache, policy=policy, max_num_seqs=max_num_seqs)
        self._is_forming = False

    def entrants(self) -> Entrants:
        first = self.waiting.peek(0)
        starts_with_fork = first is not None and first.is_fork
        if not self._is_forming and (self.num_in_batch or starts_with_fork):
            return Entrants.FORKS if starts_with_fork else Entrants.NONE
        is_open = self.num_in_batch > 0 or self.opens_at_s() <= self.now_s
        return Entrants.ALL if is_open else Entrants.NONE

    def may_enter(self, request: Request, entrants: Entrants) -> bool:
        return entrants is Entrants.ALL or request.is_fork

    def note_admitted(self, entrants: Entrants, *, is_step_full: bool) -> None:
        others_may_follow = is_step_full and self.num_free_seats > 0 and len(self.waiting) > 0
        self._is_forming = entrants is Entrants.ALL and others_may_follow

    def end(self, request: Request, status: RequestStatus) -> bool:
        is_failure = status is RequestStatus.FINISHED_ERROR
        if is_failure or request.is_beam or request.status is not RequestStatus.RUNNING:
            return super().end(request, status)
        request.move_to(RequestStatus.HELD)
        self._stop_running(request)
        self.held[request] = status
        return False

    def release(self) -> list[RequestUpdate]:
        if self.running:
            return []
        held = list(self.held.items())
        for request, status in held:
            self.finish(request.request_id, status)
        return [RequestUpdate(request.request_id, (), (), status) for request, status in held]


class DynamicBatches(StaticBatches):
    """Requests of a class of lengths, whose longest is at most twice its shortest, wait for each other."""

    def __init__(
        self, *, kv_cache: KVCacheManager, policy: SchedulingPolicy, max_num_seqs: int, window_s: float
    ) -> None:
        # Grouped by class of lengths, whatever the policy; the class with the earliest arrival is first.
        self._queue = GroupedQueue(_length_class, self._rank)
        super().__init__(waiting=self._queue, kv_cache=kv_cache, policy=policy, max_num_seqs=max_num_seqs)
        self._window_s = window_s
        self._class: int | None = None  # of the batch that is being formed

    def _rank(self, request: Request) -> tuple[bool, bool, int]:
        """Requests that may enter the batch that is being formed come first."""
        length_class = _length_class(request)
        return length_class != _FORKS, length_class != self._class, request.arrival_index

    def opens_at_s(self) -> float:
        first = self._queue.peek(0)
        if first is None or first.is_fork or self._queue.num_alike(first) >= self._max_num_seqs:
            return self.now_s
        return first.arrival_s + self._window_s

    def entrants(self) -> Entrants:
        if not self.num_in_batch:
            self._class = None
        entrants = super().entrants()
        if entrants is not Entrants.NONE and not self.num_in_batch:
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
