"""Each waiting line against a plain list that is sorted whenever somebody looks, under random arrivals, entries, ends,
returns and passing time."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import zip_longest

import pytest

from headway.core import Request, RequestStatus
from headway.core.queue import (
    DeadlineQueue,
    GroupedQueue,
    GuardedQueue,
    KeyedQueue,
    TenantQueue,
    WaitingQueue,
    WindowQueue,
)
from tests.unit.core.driver import request

Order = Callable[[list[Request]], list[Request]]

NUM_PLACES = 5
SEEDS = range(4)


class Line:
    """A queue and a list of the same requests. Requests that have entered may come back."""

    def __init__(self, queue: WaitingQueue, rng: random.Random, order: Order) -> None:
        self.queue, self.rng, self.order = queue, rng, order
        self.waiting: list[Request] = []
        self.entered: list[Request] = []
        self.now_s = 0.0
        self.num_arrivals = 0
        self.on_admit: Callable[[Request], None] = lambda request: None
        """Is told before a request enters."""

    def play(self, num_operations: int) -> None:
        operations = [*[self.arrive] * 3, self.enter, self.enter, self.end, self.come_back, self.advance]
        for _ in range(num_operations):
            self.rng.choice(operations)()
            self.check()

    def arrive(self) -> None:
        rng = self.rng
        new = request(
            f"r{self.num_arrivals}",
            rng.randint(1, 9),
            priority=rng.randint(0, 5),
            tenant=rng.choice("abbccc"),
            predicted_tokens=rng.choice([1.0, 5.0, 30.0]),
            ttft_target_s=rng.choice([None, rng.uniform(0.1, 5.0)]),
        )
        new.arrive(self.num_arrivals, now_s=self.now_s)
        self.num_arrivals += 1
        self.queue.push(new)
        self.waiting.append(new)

    def enter(self) -> None:
        if self.waiting:
            first_ones = self.order(self.waiting)[: self.rng.choice([1, 1, NUM_PLACES])]
            entering = self.rng.choice(first_ones)
            self.on_admit(entering)
            self.queue.admit(entering)
            self.waiting.remove(entering)
            entering.move_to(RequestStatus.RUNNING)
            self.entered.append(entering)

    def end(self) -> None:
        if self.waiting:
            ended = self.waiting.pop(self.rng.randrange(len(self.waiting)))
            ended.move_to(RequestStatus.FINISHED_ABORTED)
            self.queue.remove(ended)

    def come_back(self) -> None:
        if self.entered and self.rng.random() < 0.7:
            back = self.entered.pop(self.rng.randrange(len(self.entered)))
            back.move_to(RequestStatus.PREEMPTED)
            back.num_preemptions += 1
            self.queue.push(back)
            self.waiting.append(back)

    def advance(self) -> None:
        self.now_s += self.rng.choice([0.1, 1.0])
        self.queue.advance(self.now_s)

    def check(self) -> None:
        queue, expected = self.queue, self.order(self.waiting)
        queue.check_invariants()
        num_seen = self.rng.randint(0, NUM_PLACES)
        found = [queue.peek(place) for place in range(num_seen)]
        assert found == (expected + [None] * NUM_PLACES)[:num_seen]
        assert len(queue) == len(self.waiting)
        assert set(queue) == set(self.waiting)
        assert queue.num_tokens == sum(waiting.num_tokens for waiting in self.waiting)


def by(key: Callable[[Request], object]) -> Order:
    return lambda waiting: sorted(waiting, key=lambda r: (key(r), r.arrival_index))


@pytest.mark.parametrize("seed", SEEDS)
def test_by_a_key(seed: int) -> None:
    queue = KeyedQueue(lambda r: r.options.priority, front_size=NUM_PLACES)
    Line(queue, random.Random(seed), by(lambda r: r.options.priority)).play(500)
    with pytest.raises(IndexError):
        queue.peek(NUM_PLACES)
    with pytest.raises(KeyError):
        queue.remove(request("stranger", 1))


@pytest.mark.parametrize("seed", SEEDS)
def test_by_deadlines_while_steps_take_now_more_now_less_time(seed: int) -> None:
    """By when each must begin; late ones behind the others, by arrival; then those without a target."""
    rng = random.Random(seed)
    line: Line
    step_s = 0.1

    def due_s(waiting: Request) -> float | None:
        target_s = waiting.options.ttft_target_s
        return None if target_s is None else waiting.arrival_s + target_s

    def lead_s(num_tokens: int) -> float:
        return (1 + num_tokens / 5) * step_s

    def key(waiting: Request) -> tuple[int, float]:
        due = due_s(waiting)
        if due is None:
            return 2, 0.0
        begin_by_s = due - lead_s(waiting.num_tokens)
        return (1, waiting.arrival_s) if begin_by_s < line.now_s else (0, begin_by_s)

    line = Line(DeadlineQueue(due_s, lead_s, front_size=NUM_PLACES), rng, by(key))
    for _ in range(100):
        line.play(8)
        step_s = rng.uniform(0.01, 0.5)
        line.advance()


@pytest.mark.parametrize("seed", SEEDS)
def test_groups_whose_ranks_change_with_time(seed: int) -> None:
    line: Line

    def rank(waiting: Request) -> float:
        """The longer it waits the smaller, but not for all at the same speed."""
        assert waiting.options.predicted_tokens is not None
        return -(line.now_s - waiting.arrival_s) / waiting.options.predicted_tokens

    line = Line(GroupedQueue(lambda r: r.options.predicted_tokens, rank), random.Random(seed), by(rank))
    line.play(500)


def test_how_many_are_alike() -> None:
    queue = GroupedQueue(lambda r: r.options.priority, lambda r: r.arrival_index)
    waiting = [request(f"r{index}", 1, priority=index % 3) for index in range(7)]
    for index, one in enumerate(waiting):
        one.arrival_index = index
        queue.push(one)
    assert [queue.num_alike(one) for one in waiting] == [3, 2, 2, 3, 2, 2, 3]


@pytest.mark.parametrize("seed", SEEDS)
def test_tenants_share_a_line(seed: int) -> None:
    rng = random.Random(seed)
    served: Counter[str] = Counter()

    def order(waiting: list[Request]) -> list[Request]:
        """The first one of each tenant, then the second ones, and so on."""
        lines = [
            sorted((r for r in waiting if r.options.tenant == tenant), key=lambda r: r.arrival_index)
            for tenant in "abc"
        ]
        lines = sorted(
            (own for own in lines if own), key=lambda own: (served[own[0].options.tenant], own[0].arrival_index)
        )
        return [one for row in zip_longest(*lines) for one in row if one is not None]

    queue = TenantQueue(lambda tenant: served[tenant])
    line = Line(queue, rng, order)
    for _ in range(80):
        line.play(6)
        for tenant in "abc":
            served[tenant] += rng.choice([0, 1, 5])
        first = order(line.waiting)[:1]
        assert queue.first_tenant() == (first[0].options.tenant if first else None), "also between two steps"
        line.advance()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_window_in_which_the_most_valuable_goes_first(seed: int) -> None:
    rng = random.Random(seed)
    values: defaultdict[int, int] = defaultdict(lambda: rng.randint(0, 3))
    passes: Counter[int] = Counter()
    passed_often: set[Request] = set()

    def window(waiting: list[Request]) -> list[Request]:
        return sorted(waiting, key=lambda r: r.arrival_index)[:NUM_PLACES]

    def order(waiting: list[Request]) -> list[Request]:
        first = [r for r in window(waiting) if passes[r.arrival_index] >= 3]
        others = [r for r in window(waiting) if passes[r.arrival_index] < 3]
        passed_often.update(first)
        return first + sorted(others, key=lambda r: -values[r.arrival_index])

    def on_admit(entering: Request) -> None:
        passes.update(r.arrival_index for r in window(line.waiting) if r.arrival_index < entering.arrival_index)
        passes[entering.arrival_index] = 0
        for one in line.waiting[:2]:  # what it takes may be missing now
            values[one.arrival_index] = rng.randint(0, values[one.arrival_index])

    queue = WindowQueue(lambda r: values[r.arrival_index], window=NUM_PLACES, max_passes=3)
    line = Line(queue, rng, order)
    line.on_admit = on_admit
    for _ in range(50):
        line.play(10)
        values.clear()
        line.advance()
    assert len(passed_often) >= 5


@pytest.mark.parametrize("seed", SEEDS)
def test_the_guard_lifts_who_has_waited_too_long(seed: int) -> None:
    """A second after three times what it would have waited in order of arrival, or after what it was promised."""
    rng = random.Random(seed)
    in_order: list[Request] = []  # those that would not have entered yet
    clocks: dict[Request, float] = {}
    lifted: list[Request] = []

    def order(waiting: list[Request]) -> list[Request]:
        return lifted + [r for r in by(lambda r: r.options.priority)(waiting) if r not in lifted]

    class GuardedLine(Line):
        def arrive(self) -> None:
            super().arrive()
            in_order.append(self.waiting[-1])

        def enter(self) -> None:
            num_entered = len(self.entered)
            super().enter()
            if len(self.entered) > num_entered:
                entered = self.entered[-1]
                self.forget(entered)
                if not entered.num_preemptions:
                    first = in_order.pop(0)
                    if first.status is RequestStatus.WAITING:
                        allowed_s = max(3.0 * (self.now_s - first.arrival_s), 0.5 * first.options.priority)
                        clocks[first] = first.arrival_s + allowed_s + 1.0

        def end(self) -> None:
            before = list(self.waiting)
            super().end()
            for ended in set(before) - set(self.waiting):
                self.forget(ended)
                if ended in in_order and not ended.num_preemptions:
                    in_order.remove(ended)

        def come_back(self) -> None:
            num_waiting = len(self.waiting)
            super().come_back()
            if len(self.waiting) > num_waiting:
                back = self.waiting[-1]
                clocks[back] = self.now_s + (self.now_s - back.arrival_s) + 1.0

        def advance(self) -> None:
            super().advance()
            due = [r for r in clocks if clocks[r] <= self.now_s and r not in lifted]
            lifted.extend(sorted(due, key=lambda r: (clocks[r], r.arrival_index)))

        def forget(self, gone: Request) -> None:
            clocks.pop(gone, None)
            if gone in lifted:
                lifted.remove(gone)

    inner = KeyedQueue(lambda r: r.options.priority, front_size=NUM_PLACES)
    queue = GuardedQueue(inner, grace_s=1.0, stretch=3.0, promise_s=lambda r: 0.5 * r.options.priority)
    GuardedLine(queue, rng, order).play(1600)
    assert queue.num_lifted >= 10


def test_a_lifted_request_that_comes_back_stands_in_the_line_once() -> None:
    """It was taken out of the middle of the line when it was lifted, and put back when it was preempted."""
    inner = KeyedQueue(lambda r: r.options.priority, front_size=1)
    queue = GuardedQueue(inner, grace_s=1.0, stretch=0.0, promise_s=lambda r: 0.0)
    low, high, other = request("low", 1, priority=9), request("high", 1), request("other", 1)
    for index, one in enumerate((low, high, other)):
        one.arrival_index = index
        queue.push(one)
    assert queue.peek() is high
    queue.admit(high)  # in order of arrival it would have been "low"
    queue.advance(2.0)
    assert queue.peek() is low
    queue.admit(low)
    low.move_to(RequestStatus.RUNNING)
    low.move_to(RequestStatus.PREEMPTED)
    queue.push(low)
    queue.check_invariants()
    assert queue.peek() is other
    queue.admit(other)
    assert queue.peek() is low
    queue.admit(low)
    assert queue.peek() is None
