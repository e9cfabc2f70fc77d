"""A waiting queue in order of arrival whose first requests are sorted by a value that may change at any time.

The value may be, for example, how much of the prompt is cached. A request may be passed only a limited number of times.

    arrival   a b c d e f │ g h i …
    taken     d a f b c e │              only the first requests are inspected

Looking up the values costs more than everything else. But while requests are being admitted, values only fall. So a
request that had the largest value, and still has the same value, still has the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from headway.core.queue.base import KeyedQueue, WaitingQueue
from headway.core.request import Request

_Order = tuple[bool, float, int]  # whether it may be passed, its negated value, its order index


class WindowQueue(WaitingQueue):
    """Among the first `window` requests, the one with the largest `value` goes first. A request that was passed
    `max_passes` times goes before these.

    A value may rise only before `advance` or `push` is called.
    """

    def __init__(self, value: Callable[[Request], float], *, window: int, max_passes: int) -> None:
        self._value = value
        self._window = window
        self._max_passes = max_passes
        self._in_order = KeyedQueue(lambda request: 0, front_size=window)
        self._num_passes: dict[int, int] = {}  # by arrival index
        self._orders: dict[int, _Order] = {}  # by arrival index; the present orders are not smaller
        self._front: list[Request] = []  # the first requests, sorted, if more than one of them was inspected

    @property
    def num_tokens(self) -> int:  # type: ignore[override]
        return self._in_order.num_tokens

    def __len__(self) -> int:
        return len(self._in_order)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._in_order)

    def push(self, request: Request) -> None:
        self._in_order.push(request)
        self._forget_orders()

    def peek(self, index: int = 0) -> Request | None:
        if index == 0 and not self._front:
            return self._first()
        if not self._front:
            self._front = sorted(self._in_order.first(self._window), key=self._order)
        return self._front[index] if index < len(self._front) else None

    def remove(self, request: Request) -> None:
        self._in_order.remove(request)
        self._num_passes.pop(request.arrival_index, None)
        self._orders.pop(request.arrival_index, None)
        self._front.clear()

    def admit(self, request: Request) -> None:
        for other in self._in_order.first(self._window):
            if other is request:
                break
            num_passes = self._num_passes[other.arrival_index] = self._num_passes.get(other.arrival_index, 0) + 1
            if num_passes >= self._max_passes:
                self._orders.pop(other.arrival_index, None)
        self.remove(request)

    def advance(self, now_s: float) -> None:
        self._forget_orders()

    def _forget_orders(self) -> None:
        """Forget all values, so that they are looked up again: they may have risen."""
        self._orders.clear()
        self._front.clear()

    def _first(self) -> Request | None:
        requests, orders = self._in_order.first(self._window), self._orders
        for request in requests:
            if request.arrival_index not in orders:
                orders[request.arrival_index] = self._order(request)
        last_orders = [orders[request.arrival_index] for request in requests]
        while requests:
            last = min(last_orders)
            index = last_orders.index(last)
            best = requests[index]
            last_orders[index] = orders[best.arrival_index] = order = self._order(best)
            if order == last:
                return best
        return None

    def _order(self, request: Request) -> _Order:
        may_be_passed = self._num_passes.get(request.arrival_index, 0) < self._max_passes
        return may_be_passed, -self._value(request) if may_be_passed else 0.0, request.order_index

    def check_invariants(self) -> None:
        self._in_order.check_invariants()
        waiting = {request.arrival_index for request in self}
        assert self._num_passes.keys() <= waiting, "passes are counted for a request that does not wait"
