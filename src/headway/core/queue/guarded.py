"""A guard against starvation for any waiting queue: a request that has waited too long is lifted to the front.

The time limit must grow with the load, or under load every order would become that of arrival. It is derived from first
come, first served: for every admitted request, one more of the earliest arrivals would have been admitted in that
order. If that one still waits, its time since arrival is what it would have waited in order. It may wait `stretch`
times as long, and `grace_s` more. The policy may promise a later time.

    arrivals   a b c d e f g        admitted so far: a c e g, four of them
    in order   a b c d│             so b and d would have been admitted by now: the times to lift them are set

A preempted request is lifted after it has waited as long as it had been in the system, and `grace_s` more. That is
early enough to prevent starvation, and late enough not to displace at once the request that displaced it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator

from headway.core.queue.base import WaitingQueue
from headway.core.request import Request, RequestStatus


class GuardedQueue(WaitingQueue):
    """Wraps another queue. `promise_s`: the time after its arrival within which the policy wants to admit a request."""

    def __init__(
        self, inner: WaitingQueue, *, grace_s: float, stretch: float, promise_s: Callable[[Request], float]
    ) -> None:
        self._inner = inner
        self._grace_s = grace_s
        self._stretch = stretch
        self._promise_s = promise_s
        self._now_s = 0.0
        # All of these are by arrival index. A waiting request is in exactly one of the first three.
        self._lifted: OrderedDict[int, Request] = OrderedDict()  # in the order in which they were lifted
        self._timed: dict[int, Request] = {}  # requests with a time at which they will be lifted
        self._untimed: dict[int, Request] = {}  # requests that never ran and have no such time yet
        self._lift_at_s: dict[int, float] = {}  # the times of `_lifted` and `_timed`
        self._heap: list[tuple[float, int]] = []  # (when to lift, arrival index); valid if `_timed` has that time
        self._gone: set[int] = set()  # arrivals from `_next_in_order` on that ended without running
        self._next_in_order = 0  # the arrival that would be admitted next in order of arrival
        self._num_lifted_tokens = 0
        self.num_lifted = 0

    @property
    def num_overdue(self) -> int:
        return len(self._lifted)

    @property
    def inner(self) -> WaitingQueue:
        """The queue that is guarded."""
        return self._inner

    def lift_at_s(self, request: Request) -> float | None:
        """Return the time at which a waiting request is or was lifted; `None` while that is not known."""
        return self._lift_at_s.get(request.arrival_index)

    @property
    def num_tokens(self) -> int:  # type: ignore[override]
        return self._inner.num_tokens + self._num_lifted_tokens

    def __len__(self) -> int:
        return len(self._inner) + len(self._lifted)

    def __iter__(self) -> Iterator[Request]:
        yield from self._lifted.values()
        yield from self._inner

    def push(self, request: Request) -> None:
        self._inner.push(request)
        if request.status is RequestStatus.PREEMPTED:
            self._lift_later(request, self._now_s + (self._now_s - request.arrival_s) + self._grace_s)
        elif request.arrival_index < self._next_in_order:  # it was out of the queue when its turn came
            self._time(request)
        else:
            self._untimed[request.arrival_index] = request

    def peek(self, index: int = 0) -> Request | None:
        if index < len(self._lifted):
            return next(itertools.islice(self._lifted.values(), index, None))
        return self._inner.peek(index - len(self._lifted))

    def first_short(self, max_tokens: int) -> Request | None:
        return self._inner.first_short(max_tokens)

    def remove(self, request: Request) -> None:
        if self._untimed.pop(request.arrival_index, None) is not None and request.status.is_finished:
            self._gone.add(request.arrival_index)
        if not self._forget(request):
            self._inner.remove(request)

    def admit(self, request: Request) -> None:
        never_ran = request.num_preemptions == 0
        self._untimed.pop(request.arrival_index, None)
        if not self._forget(request):
            self._inner.admit(request)
        if never_ran:
            self._count_admission()

    def advance(self, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)
        self._inner.advance(now_s)
        while self._heap and self._heap[0][0] <= self._now_s:
            lift_at_s, index = heapq.heappop(self._heap)
            request = self._timed.get(index)
            if request is not None and self._lift_at_s[index] == lift_at_s:
                del self._timed[index]
                self._inner.remove(request)
                self._lifted[index] = request
                self._num_lifted_tokens += request.num_tokens
                self.num_lifted += 1

    def _forget(self, request: Request) -> bool:
        """Take a request out of all tables. Returns whether it had been lifted out of the inner queue."""
        index = request.arrival_index
        self._lift_at_s.pop(index, None)
        if self._lifted.pop(index, None) is not None:
            self._num_lifted_tokens -= request.num_tokens
            return True
        self._timed.pop(index, None)
        if len(self._heap) > 2 * len(self._timed) + 64:  # invalid entries must not outnumber the others
            self._heap = [(self._lift_at_s[index], index) for index in self._timed]
            heapq.heapify(self._heap)
        return False

    def _count_admission(self) -> None:
        """Note that one more request would have been admitted in order of arrival: the next one that has not ended."""
        while self._next_in_order in self._gone:
            self._gone.remove(self._next_in_order)
            self._next_in_order += 1
        request = self._untimed.pop(self._next_in_order, None)
        self._next_in_order += 1
        if request is not None:
            self._time(request)

    def _time(self, request: Request) -> None:
        """Set the time at which to lift a request that would have been admitted now in order of arrival."""
        waited_s = max(self._now_s - request.arrival_s, 0.0)
        allowed_s = max(self._stretch * waited_s, self._promise_s(request))
        self._lift_later(request, request.arrival_s + allowed_s + self._grace_s)

    def _lift_later(self, request: Request, lift_at_s: float) -> None:
        self._timed[request.arrival_index] = request
        self._lift_at_s[request.arrival_index] = lift_at_s
        heapq.heappush(self._heap, (lift_at_s, request.arrival_index))

    def check_invariants(self) -> None:
        self._inner.check_invariants()
        inner = {request.arrival_index for request in self._inner}
        assert not inner & self._lifted.keys(), "a lifted request is still in its queue"
        num_tokens = sum(request.num_tokens for request in self._lifted.values())
        assert num_tokens == self._num_lifted_tokens, "the sum of lifted tokens is wrong"
        assert not self._untimed.keys() & self._timed.keys(), "a request is to be lifted, and is not"
        assert self._untimed.keys() | self._timed.keys() == inner, "a request would never be lifted"
        assert self._lift_at_s.keys() == self._timed.keys() | self._lifted.keys(), "times of other requests are kept"
        entries = {(self._lift_at_s[index], index) for index in self._timed}
        assert entries <= set(self._heap), "a request would not be lifted at its time"
        assert len(self._heap) <= 2 * len(self._timed) + 64, "invalid entries pile up"
