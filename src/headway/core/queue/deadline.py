"""A waiting queue by deadlines. Requests that can be in time come first, tightest first; then late ones in order of
arrival, and then those without a deadline.

Under overload many deadlines pass in each step, and moving each request that becomes late would cost time for each. So
nothing is moved. Requests with a deadline are in two orders at once: in order of arrival, and by deadline, in slots of
1 ms. When a slot's time has passed, the whole slot is dropped, and its requests are late.

    deadlines   ▣ │ ▣ ▣ │ ▣ │ ▣ ▣ ▣ │ …        only the first slots are inspected
    arrival     ▣ ▣ ▣ ▣ ▣ ▣ ▣ …                the late requests are those that are not found there
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator

from headway.core.queue.base import KeyedQueue, WaitingQueue
from headway.core.request import Request

SLOTS_PER_S = 1024
LOOK_AHEAD = 4
"""How many requests are looked up at once: in most steps no more are admitted."""


class DeadlineQueue(WaitingQueue):
    """A queue by deadlines. `due_s`: when a request must have its first token, or `None`; it must not change. `lead_s`:
    how long before that a prompt with this many tokens must be started. It may change at any time, but must never be
    shorter for more tokens."""

    def __init__(
        self, due_s: Callable[[Request], float | None], lead_s: Callable[[int], float], *, front_size: int
    ) -> None:
        self._due_s = due_s
        self._lead_s = lead_s
        self._look_ahead = min(LOOK_AHEAD, front_size)
        self._now_s = 0.0
        self._slots: dict[int, dict[int, Request]] = {}  # requests that are not due yet, by slot and arrival index
        self._slot_numbers: list[int] = []  # in order
        self._most_tokens = 0  # the largest request that was ever queued
        self._with_deadline = KeyedQueue(lambda request: request.arrival_s, front_size=2 * front_size)
        self._without = KeyedQueue(lambda request: 0, front_size=front_size)
        self._front: list[Request] = []

    @property
    def num_tokens(self) -> int:  # type: ignore[override]
        return self._with_deadline.num_tokens + self._without.num_tokens

    def __len__(self) -> int:
        return len(self._with_deadline) + len(self._without)

    def __iter__(self) -> Iterator[Request]:
        yield from self._with_deadline
        yield from self._without

    def push(self, request: Request) -> None:
        self._front.clear()
        due_s = self._due_s(request)
        if due_s is None:
            self._without.push(request)
            return
        self._with_deadline.push(request)
        self._most_tokens = max(self._most_tokens, request.num_tokens)
        number = int(due_s * SLOTS_PER_S)
        if number not in self._slots:
            self._slots[number] = {}
            bisect.insort(self._slot_numbers, number)
        self._slots[number][request.arrival_index] = request

    def peek(self, index: int = 0) -> Request | None:
        if len(self._front) <= index:
            self._look(max(index + 1, self._look_ahead))
        return self._front[index] if index < len(self._front) else None

    def remove(self, request: Request) -> None:
        if request in self._front:
            self._front.remove(request)  # the others keep their order until `advance`
        due_s = self._due_s(request)
        if due_s is None:
            self._without.remove(request)
            return
        self._with_deadline.remove(request)
        number = int(due_s * SLOTS_PER_S)
        slot = self._slots.get(number, {})
        if slot.pop(request.arrival_index, None) is not None and not slot:
            del self._slots[number], self._slot_numbers[bisect.bisect_left(self._slot_numbers, number)]

    def advance(self, now_s: float) -> None:
        self._front.clear()
        self._now_s = now_s
        num_passed = bisect.bisect_left(self._slot_numbers, int(now_s * SLOTS_PER_S))
        for number in self._slot_numbers[:num_passed]:
            del self._slots[number]
        del self._slot_numbers[:num_passed]

    def _look(self, num_requests: int) -> None:
        front = self._first_in_time(num_requests)
        in_time = {request.arrival_index for request in front}
        index = 0
        while len(front) < num_requests and (request := self._with_deadline.peek(index)) is not None:
            index += 1
            if request.arrival_index not in in_time:
                front.append(request)
        index = 0
        while len(front) < num_requests and (request := self._without.peek(index)) is not None:
            index += 1
            front.append(request)
        self._front = front

    def _first_in_time(self, num_requests: int) -> list[Request]:
        """Return the requests that must be started first, of all that can still be in time; all if they are fewer."""
        least_lead_s, most_lead_s = self._lead_s(0), self._lead_s(self._most_tokens)
        first_slot = int((self._now_s + least_lead_s) * SLOTS_PER_S)  # all before are late, whatever their prompts
        found: list[tuple[float, int, int, Request]] = []
        for index in range(bisect.bisect_left(self._slot_numbers, first_slot), len(self._slot_numbers)):
            number = self._slot_numbers[index]
            if len(found) >= num_requests and number / SLOTS_PER_S - most_lead_s > found[num_requests - 1][0]:
                break
            for request in self._slots[number].values():
                begin_by_s = self._begin_by_s(request)
                if begin_by_s >= self._now_s:
                    found.append((begin_by_s, request.order_index, request.arrival_index, request))
            found.sort()
        return [request for _, _, _, request in found[:num_requests]]

    def _begin_by_s(self, request: Request) -> float:
        due_s = self._due_s(request)
        assert due_s is not None
        return due_s - self._lead_s(request.num_tokens)

    def check_invariants(self) -> None:
        self._with_deadline.check_invariants()
        self._without.check_invariants()
        assert self._slot_numbers == sorted(self._slots), "the slots are out of order"
        assert all(self._slots.values()), "a slot is empty"
        assert all(self._due_s(request) is None for request in self._without), "a request has a deadline after all"
        waiting = {request.arrival_index: request for request in self._with_deadline}
        in_slots = {index: request for slot in self._slots.values() for index, request in slot.items()}
        assert in_slots.items() <= waiting.items(), "a request is in a slot that does not wait"
        for index, request in waiting.items():
            assert index in in_slots or self._begin_by_s(request) < self._now_s, "a request was given up too early"
