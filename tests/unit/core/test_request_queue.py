from __future__ import annotations

import random

import pytest

from headway.core.queue import KeyedQueue
from tests.unit.core.driver import request


@pytest.mark.parametrize("seed", range(20))
def test_the_queue_is_a_sorted_list_only_faster(seed: int) -> None:
    rng = random.Random(seed)
    queue, model = KeyedQueue(lambda r: r.options.priority, front_size=4), []
    for index in range(400):
        if rng.random() < 0.55 or not model:
            new = request(f"r{index}", 1, priority=rng.randint(0, 5))
            new.arrive(index, now_s=0.0)
            queue.push(new)
            model.append(new)
            model.sort(key=lambda r: (r.options.priority, r.arrival_index))
        elif rng.random() < 0.5:
            gone = model.pop(rng.randrange(min(4, len(model))))
            queue.remove(gone)
            if rng.random() < 0.5:  # back from preemption, to the same place
                queue.push(gone)
                model.append(gone)
                model.sort(key=lambda r: (r.options.priority, r.arrival_index))
        else:
            queue.remove(model.pop(rng.randrange(len(model))))
        queue.check_invariants()
        assert len(queue) == len(model)
        assert [queue.peek(place) for place in range(4)] == (model + [None] * 4)[:4]
    assert sorted(r.request_id for r in queue) == sorted(r.request_id for r in model)


def test_looking_too_far_raises() -> None:
    queue = KeyedQueue(lambda r: 0, front_size=2)
    with pytest.raises(IndexError):
        queue.peek(2)


def test_removing_a_stranger_raises() -> None:
    queue = KeyedQueue(lambda r: 0, front_size=2)
    with pytest.raises(KeyError):
        queue.remove(request("r", 1))
