from __future__ import annotations

import random

import pytest

from headway.core import Request
from headway.core.queue import WindowQueue
from tests.unit.core.driver import request

WINDOW, MAX_PASSES = 6, 3


@pytest.mark.parametrize("seed", range(20))
def test_whoever_has_most_is_first_also_when_values_fall_while_others_enter(seed: int) -> None:
    rng = random.Random(seed)
    values: dict[int, int] = {}
    num_passes: dict[int, int] = {}
    waiting: list[Request] = []  # in order of arrival
    queue = WindowQueue(lambda one: values[one.arrival_index], window=WINDOW, max_passes=MAX_PASSES)

    def order(one: Request) -> tuple[bool, int, int]:
        may_be_passed = num_passes[one.arrival_index] < MAX_PASSES
        return may_be_passed, -values[one.arrival_index] if may_be_passed else 0, one.arrival_index

    for index in range(500):
        if rng.random() < 0.3 or not waiting:
            new = request(f"r{index}", 1)
            new.arrive(index, now_s=0.0)
            values[index], num_passes[index] = rng.randint(0, 5), 0
            queue.push(new)
            waiting.append(new)
        if rng.random() < 0.3:
            values.update({index: rng.randint(0, 5) for index in values})
            queue.advance(0.0)
        expected = sorted(waiting[:WINDOW], key=order)
        if rng.random() < 0.3:
            assert [queue.peek(place) for place in range(len(expected) + 1)] == [*expected, None]
        assert queue.peek(0) is expected[0]
        chosen = rng.choice(expected[:2])
        if rng.random() < 0.6 and all(num_passes[one.arrival_index] < MAX_PASSES for one in waiting[:WINDOW]):
            for passed in waiting[: waiting.index(chosen)]:
                num_passes[passed.arrival_index] += 1
            queue.admit(chosen)
            waiting.remove(chosen)
            for index in rng.sample(list(values), k=2 if len(values) > 2 else 0):  # what it takes may be missing now
                values[index] = rng.randint(0, values[index])
        elif rng.random() < 0.3:
            gone = rng.choice(waiting)
            queue.remove(gone)
            waiting.remove(gone)
        else:
            queue.admit(expected[0])
            for passed in waiting[: waiting.index(expected[0])]:
                num_passes[passed.arrival_index] += 1
            waiting.remove(expected[0])
        queue.check_invariants()
