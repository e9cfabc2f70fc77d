from __future__ import annotations

import random

import pytest

from headway.core import Request
from headway.core.queue import DeadlineQueue
from tests.unit.core.driver import request


class NaiveLine:
    """The same order by sorting everything whenever anybody looks."""

    def __init__(self) -> None:
        self.step_s = 0.02
        self.now_s = 0.0
        self.waiting: list[Request] = []

    def due_s(self, one: Request) -> float | None:
        return None if one.options.ttft_target_s is None else one.arrival_s + one.options.ttft_target_s

    def lead_s(self, num_tokens: int) -> float:
        return (1 + num_tokens / 100) * self.step_s

    def order(self, one: Request) -> tuple[int, float, int, int]:
        due_s = self.due_s(one)
        if due_s is None:
            return 2, 0.0, one.order_index, one.arrival_index
        begin_by_s = due_s - self.lead_s(one.num_tokens)
        is_late = begin_by_s < self.now_s
        return is_late, one.arrival_s if is_late else begin_by_s, one.order_index, one.arrival_index


@pytest.mark.parametrize("seed", range(20))
def test_it_is_a_sorted_list_only_faster(seed: int) -> None:
    rng = random.Random(seed)
    model = NaiveLine()
    queue = DeadlineQueue(model.due_s, model.lead_s, front_size=4)
    horizon_s = rng.choice([0.02, 0.5, 5.0])
    for index in range(600):
        if rng.random() < 0.5 or not model.waiting:
            target = rng.choice([None, rng.uniform(0.001, horizon_s)])
            new = request(f"r{index}", rng.choice([1, 5, 300]), ttft_target_s=target)
            new.arrive(index, now_s=model.now_s)
            new.order_index = rng.choice([index, rng.randint(0, index)])
            queue.push(new)
            model.waiting.append(new)
        elif rng.random() < 0.6:
            gone = sorted(model.waiting, key=model.order)[: rng.randint(1, 4)][-1]
            queue.remove(gone)
            if rng.random() < 0.3:  # back from preemption
                queue.push(gone)
            else:
                model.waiting.remove(gone)
        else:
            gone = rng.choice(model.waiting)
            queue.remove(gone)
            model.waiting.remove(gone)
        if rng.random() < 0.5:  # steps take now more, now less time than before
            model.step_s = rng.uniform(0.001, 0.03)
            model.now_s += rng.uniform(0.0, 0.02)
            queue.advance(model.now_s)
        queue.check_invariants()
        expected = sorted(model.waiting, key=model.order)
        assert [queue.peek(place) for place in range(4)] == [*expected, *[None] * 4][:4]
        assert len(queue) == len(expected) == len(list(queue))
