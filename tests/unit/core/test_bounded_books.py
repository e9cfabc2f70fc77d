"""Books that a long-running server keeps must not grow with all that ever was, only with what is there."""

from __future__ import annotations

import random

from headway.core import Request, RequestStatus, check_invariants
from headway.core.policy.fair import MAX_AWAY, FairPolicy
from headway.core.queue import GuardedQueue, KeyedQueue, TenantQueue
from headway.core.queue.grouped import ArrivalList
from headway.core.request_options import RequestOptions
from tests.unit.core.driver import make_scheduler, request, step


def arrival(index: int, **options: object) -> Request:
    new = request(f"r{index}", 1, **options)
    new.arrive(index, now_s=0.0)
    return new


def test_tenants_that_are_away_are_forgotten() -> None:
    scheduler = make_scheduler(scheduling_policy="fair", num_blocks=64)
    policy = scheduler.policy
    assert isinstance(policy, FairPolicy)
    for number in range(3 * MAX_AWAY):
        scheduler.add_request(request(f"r{number}", 1, 1, tenant=f"tenant {number}"))
        step(scheduler)
        assert policy.num_remembered <= 2 * MAX_AWAY
    check_invariants(scheduler)


def test_whoever_is_forgotten_gains_nothing_by_it() -> None:
    scheduler = make_scheduler(scheduling_policy="fair", num_blocks=64)
    policy = scheduler.policy
    assert isinstance(policy, FairPolicy)
    scheduler.add_request(request("heavy", 4, 8, tenant="heavy"))
    while scheduler.has_unfinished_requests:
        step(scheduler)
    for number in range(3 * MAX_AWAY):
        scheduler.add_request(request(f"r{number}", 2, 1, tenant=f"tenant {number}"))
        step(scheduler)
    assert policy.served_to("heavy") == 4 + 2 * 7  # those that have had most are remembered
    assert policy.served_to("tenant 0") == policy.served_to("nobody yet") >= 2


def test_tenants_with_requests_are_never_forgotten() -> None:
    scheduler = make_scheduler(scheduling_policy="fair", num_blocks=64, max_num_seqs=1)
    policy = scheduler.policy
    assert isinstance(policy, FairPolicy)
    for number in range(3 * MAX_AWAY):
        scheduler.add_request(request(f"r{number}", 1, 1, tenant=f"tenant {number}"))
    assert policy.num_remembered == 3 * MAX_AWAY


def test_invalid_entries_of_the_guard_do_not_pile_up() -> None:
    queue = GuardedQueue(
        KeyedQueue(lambda one: -one.arrival_index, front_size=2), grace_s=1e6, stretch=3.0, promise_s=lambda one: 0.0
    )
    for index in range(3_000):  # the first is passed by all others, and none is ever lifted
        queue.push(arrival(index))
        if index:
            latest = queue.peek(0)
            assert latest is not None and latest.arrival_index == index
            queue.admit(latest)
            latest.num_preemptions += 1
            latest.status = RequestStatus.PREEMPTED
            queue.push(latest)
            queue.admit(latest)
        if index % 100 == 0:
            queue.check_invariants()
    assert len(queue._heap) < 100


def test_dead_entries_of_tenants_do_not_pile_up() -> None:
    queue = TenantQueue(lambda tenant: float(tenant == "second"))
    queue.push(arrival(0, tenant="first"))
    for index in range(1, 1_000):
        queue.push(arrival(index, tenant="second"))
    for one in sorted(queue, key=lambda one: one.arrival_index)[1:]:
        queue.remove(one)
        queue.check_invariants()
    assert len(queue._heap) < 100


def test_who_comes_back_is_in_the_line_once() -> None:
    served = {"first": 0.0, "second": 5.0}
    queue = TenantQueue(served.__getitem__)
    first, second = arrival(0, tenant="first"), arrival(1, tenant="second")
    queue.push(first)
    queue.push(second)
    assert queue.peek(0) is first
    queue.remove(first)
    served["first"] = 3.0
    queue.push(first)
    queue.check_invariants()
    assert [queue.peek(place) for place in range(3)] == [first, second, None]


def test_an_old_entry_does_not_speak_for_who_came_back() -> None:
    queue = KeyedQueue(lambda one: one.options.priority, front_size=1)
    others = [arrival(index, priority=2) for index in range(3)]
    back = arrival(3, priority=1)
    for one in (*others, back):
        queue.push(one)
    first = arrival(4, priority=0)
    queue.push(first)
    assert queue.peek(0) is first
    queue.remove(back)
    back.options = RequestOptions(priority=3)
    queue.push(back)
    queue.remove(first)
    queue.check_invariants()
    assert queue.peek(0) is others[0]


def test_a_list_by_arrival_stays_in_order() -> None:
    rng = random.Random(0)
    requests, indices = ArrivalList(), list(range(200))
    rng.shuffle(indices)
    for count, index in enumerate(indices, start=1):
        requests.insert(arrival(index))
        assert [one.arrival_index for one in requests] == sorted(indices[:count])
