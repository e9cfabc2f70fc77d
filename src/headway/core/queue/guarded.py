"""A guard against starvation for any waiting line: who has waited too long is lifted to its front.

What is too long has to grow with the load, or under load every order would become that of arrival. The measure is what
first come, first served would have done: with every request that enters the batch, one more of those that came first
would have entered. When that is a request that still waits, the time it has waited until then is what it would have
waited at all. It may wait `stretch` times as long, and `grace_s` more; a promise of the policy itself may be later.

    arrivals   a b c d e f g        entered so far: a c e g, four of them
    in order   a b c d│             so b and d would have entered by now: their clocks are set

A request that comes back from preemption is lifted when it has waited as long again as it has been here, and `grace_s`
more: soon enough not to starve, late enough not to push out at once who pushed it out.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator

from headway.core.queue.base import WaitingQueue
from headway.core.request import Request, RequestStatus


class GuardedQueue(WaitingQueue):
    """Wraps another line. `promise_s`: how long after its arrival the policy means to let a request in, or 0."""

    def __init__(
        self, inner: WaitingQueue, *, grace_s: float, stretch: float, promise_s: Callable[[Request], float]
    ) -> None:
        self._inner = inner
        self._grace_s = grace_s
        self._stretch = stretch
        self._promise_s = promise_s
        self._now_s = 0.0
        self._lifted: OrderedDict[int, Request] = OrderedDict()  # by arrival index, in the order of their clocks
        self._clocks: list[tuple[float, int]] = []  # (lifted at, arrival index) as a heap, dead ones among them
        self._clocked: dict[int, Request] = {}  # who waits with a clock, by arrival index
        self._new: dict[int, Request] = {}  # those that never ran and have no clock, by arrival index
        self._gone: set[int] = set()  # arrivals from `_next_in_order` on that ended without running
        self._next_in_order = 0  # arrival index of whoever would enter next
        self._num_lifted_tokens = 0
        self.num_lifted = 0

    @property
    def num_overdue(self) -> int:
        return len(self._lifted)

    @property
    def inner(self) -> WaitingQueue:
        """The line that is guarded."""
        return self._inner

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
            self._set_clock(request, self._now_s + (self._now_s - request.arrival_s) + self._grace_s)
        else:
            self._new[request.arrival_index] = request

    def peek(self, index: int = 0) -> Request | None:
        if index < len(self._lifted):
            return next(itertools.islice(self._lifted.values(), index, None))
        return self._inner.peek(index - len(self._lifted))

    def first_short(self, max_tokens: int) -> Request | None:
        return self._inner.first_short(max_tokens)

    def remove(self, request: Request) -> None:
        if self._new.pop(request.arrival_index, None) is not None and request.status.is_finished:
            self._gone.add(request.arrival_index)
        if not self._lower(request):
            self._stop_clock(request)
            self._inner.remove(request)

    def admit(self, request: Request) -> None:
        never_ran = request.num_preemptions == 0
        self._new.pop(request.arrival_index, None)
        if not self._lower(request):
            self._stop_clock(request)
            self._inner.admit(request)
        if never_ran:
            self._one_more_in_order()

    def advance(self, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)
        self._inner.advance(now_s)
        while self._clocks and self._clocks[0][0] <= self._now_s:
            lift_at_s, index = heapq.heappop(self._clocks)
            request = self._clocked.get(index)
            if request is not None and request.lift_at_s == lift_at_s:
                del self._clocked[index]
                self._inner.remove(request)
                self._lifted[index] = request
                self._num_lifted_tokens += request.num_tokens
                self.num_lifted += 1

    def _lower(self, request: Request) -> bool:
        """Take a request out of those that were lifted. Returns whether it was one."""
        if self._lifted.pop(request.arrival_index, None) is None:
            return False
        self._num_lifted_tokens -= request.num_tokens
        return True

    def _one_more_in_order(self) -> None:
        """A request has entered: in order of arrival that would have been the next one that has not gone away."""
        while self._next_in_order in self._gone:
            self._gone.remove(self._next_in_order)
            self._next_in_order += 1
        request = self._new.pop(self._next_in_order, None)
        self._next_in_order += 1
        if request is not None:
            waited_s = max(self._now_s - request.arrival_s, 0.0)
            allowed_s = max(self._stretch * waited_s, self._promise_s(request))
            self._set_clock(request, request.arrival_s + allowed_s + self._grace_s)

    def _set_clock(self, request: Request, lift_at_s: float) -> None:
        request.lift_at_s = lift_at_s
        self._clocked[request.arrival_index] = request
        heapq.heappush(self._clocks, (lift_at_s, request.arrival_index))

    def _stop_clock(self, request: Request) -> None:
        """A request that was not lifted is gone. Its clock stays, but dead ones must not outnumber the others."""
        self._clocked.pop(request.arrival_index, None)
        if len(self._clocks) > 2 * len(self._clocked) + 64:
            self._clocks = [(waiting.lift_at_s, index) for index, waiting in self._clocked.items()]
            heapq.heapify(self._clocks)

    def check_invariants(self) -> None:
        self._inner.check_invariants()
        inner = {request.arrival_index for request in self._inner}
        assert not inner & self._lifted.keys(), "a lifted request is still in its line"
        num_tokens = sum(request.num_tokens for request in self._lifted.values())
        assert num_tokens == self._num_lifted_tokens, "the sum of lifted tokens is wrong"
        assert not self._new.keys() & self._clocked.keys(), "a request has a clock and has none"
        assert self._new.keys() | self._clocked.keys() == inner, "a request has no clock and waits for none"
        clocks = {(request.lift_at_s, index) for index, request in self._clocked.items()}
        assert clocks <= set(self._clocks), "a clock would never go off"
        assert len(self._clocks) <= 2 * len(self._clocked) + 64, "dead clocks pile up"
