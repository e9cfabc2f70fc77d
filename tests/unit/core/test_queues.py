"""What waiting lines do that schedules do not show. The order of each line is compared with a brute-force model in
`tests/property`, but for deadlines while steps take now more, now less time."""

from __future__ import annotations

import random

import pytest

from headway.core import Request, RequestStatus
from headway.core.queue import DeadlineQueue, GroupedQueue, GuardedQueue, KeyedQueue
from tests.unit.core.driver import request

NUM_PLACES = 5


def test_no_further_look_and_no_stranger() -> None:
    queue = KeyedQueue(lambda r: r.options.priority, front_size=NUM_PLACES)
    with pytest.raises(IndexError):
        queue.peek(NUM_PLACES)
    with pytest.raises(KeyError):
        queue.remove(request("stranger", 1))


@pytest.mark.parametrize("seed", range(4))
def test_by_deadlines_while_steps_take_now_more_now_less_time(seed: int) -> None:
    """By when each must begin; late ones behind the others, by arrival; then those without a target."""
    rng = random.Random(seed)
    waiting: list[Request] = []
    now_s, step_s, num_arrivals = 0.0, 0.1, 0

    def due_s(one: Request) -> float | None:
        target_s = one.options.ttft_target_s
        return None if target_s is None else one.arrival_s + target_s

    def lead_s(num_tokens: int) -> float:
        return (1 + num_tokens / 5) * step_s

    def key(one: Request) -> tuple[int, float, int]:
        due = due_s(one)
        if due is None:
            return 2, 0.0, one.arrival_index
        begin_by_s = due - lead_s(one.num_tokens)
        return (1, one.arrival_s, one.arrival_index) if begin_by_s < now_s else (0, begin_by_s, one.arrival_index)

    queue = DeadlineQueue(due_s, lead_s, front_size=NUM_PLACES)
    for number in range(800):
        if rng.random() < 0.5:
            target_s = rng.choice([None, rng.uniform(0.1, 5.0)])
            new = request(f"r{num_arrivals}", rng.randint(1, 9), ttft_target_s=target_s)
            new.arrive(num_arrivals, now_s=now_s)
            num_arrivals += 1
            queue.push(new)
            waiting.append(new)
        elif waiting and rng.random() < 0.8:
            gone = rng.choice([rng.choice(waiting), min(waiting, key=key)])
            queue.remove(gone)
            waiting.remove(gone)
        if number % 8 == 0:
            step_s = rng.uniform(0.01, 0.5)
        if number % 8 == 0 or rng.random() < 0.2:
            now_s += rng.choice([0.1, 1.0])
            queue.advance(now_s)
        queue.check_invariants()
        num_seen = rng.randint(0, NUM_PLACES)
        expected = [*sorted(waiting, key=key), *[None] * NUM_PLACES]
        assert [queue.peek(place) for place in range(num_seen)] == expected[:num_seen]
        assert set(queue) == set(waiting) and queue.num_tokens == sum(one.num_tokens for one in waiting)


def test_how_many_are_alike() -> None:
    queue = GroupedQueue(lambda r: r.options.priority, lambda r: r.arrival_index)
    waiting = [request(f"r{index}", 1, priority=index % 3) for index in range(7)]
    for index, one in enumerate(waiting):
        one.arrival_index = index
        queue.push(one)
    assert [queue.num_alike(one) for one in waiting] == [3, 2, 2, 3, 2, 2, 3]


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
    assert [queue.peek(), queue.admit(other), queue.peek()] == [other, None, low]
