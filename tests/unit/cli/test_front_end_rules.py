"""When a front end is dumped, killed and started again, with time as numbers."""

from __future__ import annotations

import signal

import pytest

from headway.cli.front_end_rules import (
    DEFAULT_STOP_S,
    KILLED_S,
    STUCK_STOP_S,
    Exit,
    FrontEndWatch,
    Order,
    Restart,
    RestartRule,
)

HANG_S, STOP_S = 30.0, 29.0


def ready() -> FrontEndWatch:
    watch = FrontEndWatch()
    watch.note_bound(hang_timeout_s=HANG_S, stop_s=STOP_S)
    watch.note_ready()
    return watch


def orders(watch: FrontEndWatch, seconds: float, *, ticks: bool = False) -> list[tuple[float, Order]]:
    """What it says, second by second, but for waiting."""
    said = []
    for second in range(1, int(seconds) + 1):
        if ticks:
            watch.note_tick()
        watch.pass_time(1.0)
        if (order := watch.order()) is not Order.WAIT:
            said.append((float(second), order))
    return said


def test_a_loop_that_stands_still_is_dumped_and_killed() -> None:
    watch = ready()
    assert orders(watch, HANG_S + 2) == [(30, Order.DUMP), (31, Order.KILL), (32, Order.KILL)]
    assert "stood still for 32 s" in watch.why


def test_a_loop_that_ticks_is_left_alone() -> None:
    assert not orders(ready(), 10 * HANG_S, ticks=True)


def test_a_tick_after_the_dump_saves_it() -> None:
    watch = ready()
    assert orders(watch, HANG_S) == [(30, Order.DUMP)]
    watch.note_tick()
    assert not orders(watch, HANG_S - 1)


@pytest.mark.parametrize("timeout_s", [0.0, 5.0])
def test_a_start_may_take_any_time(timeout_s: float) -> None:
    watch = FrontEndWatch()
    watch.note_bound(hang_timeout_s=timeout_s, stop_s=STOP_S)
    assert not orders(watch, 1000)


def test_a_timeout_of_zero_is_none() -> None:
    watch = FrontEndWatch()
    watch.note_bound(hang_timeout_s=0.0, stop_s=STOP_S)
    watch.note_ready()
    assert not orders(watch, 1000)


def test_one_that_stands_still_is_not_waited_for_when_it_is_to_stop() -> None:
    watch = ready()
    orders(watch, 3)
    watch.note_stopping()
    assert orders(watch, STUCK_STOP_S + 1) == [(5, Order.DUMP), (6, Order.KILL)]


def test_asking_again_gives_no_more_time() -> None:
    watch = ready()
    for _ in range(4):
        watch.note_stopping()
        orders(watch, 1)
    assert orders(watch, 1) == [(1, Order.DUMP)]


def test_one_that_ticks_has_the_time_that_it_has_told() -> None:
    watch = ready()
    watch.note_stopping()
    last = STOP_S + 1 + KILLED_S
    assert orders(watch, last, ticks=True) == [
        (29, Order.DUMP),
        (30, Order.KILL),
        (31, Order.KILL),
        (32, Order.KILL),
        (33, Order.LEAVE),
    ]


def test_a_loop_that_is_over_need_not_tick() -> None:
    watch = ready()
    watch.note_over()
    assert orders(watch, STOP_S) == [(29, Order.DUMP)]


def test_a_start_that_is_to_stop_has_a_limit_too() -> None:
    watch = FrontEndWatch()
    watch.note_stopping()
    assert orders(watch, DEFAULT_STOP_S) == [(30, Order.DUMP)]


@pytest.mark.parametrize(("status", "code"), [(0, 0), (1, 1), (2, 2), (-signal.SIGTERM, 143), (-signal.SIGSEGV, 139)])
def test_a_start_that_fails_is_the_parents_end(status: int, code: int) -> None:
    assert RestartRule().next(status, FrontEndWatch()) == Exit(code)


def test_one_that_has_served_is_started_again_ever_later() -> None:
    rule = RestartRule()
    assert rule.next(-signal.SIGKILL, ready()) == Restart(0.5)
    delays = [rule.next(1, FrontEndWatch()) for _ in range(5)]
    assert delays == [Restart(1.0), Restart(2.0), Restart(4.0), Restart(5.0), Restart(5.0)]
    served = ready()
    orders(served, 10, ticks=True)
    assert rule.next(1, served) == Restart(0.5)


@pytest.mark.parametrize(("status", "code"), [(0, 0), (-signal.SIGKILL, 137)])
def test_one_that_was_to_stop_is_not_started_again(status: int, code: int) -> None:
    watch = ready()
    watch.note_stopping()
    assert RestartRule().next(status, watch) == Exit(code)


def test_one_that_ends_well_was_asked_to_by_someone_else() -> None:
    assert RestartRule().next(0, ready()) == Exit(0)
