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


def watch_of(*notes: str) -> FrontEndWatch:
    """One that was told these things, one after the other."""
    watch = FrontEndWatch()
    for note in notes:
        if note in ("bound", "bound without limit"):
            watch.note_bound(hang_timeout_s=HANG_S if note == "bound" else 0.0, stop_s=STOP_S)
        elif note == "3 seconds":
            orders(watch, 3)
        else:
            getattr(watch, f"note_{note}")()
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


READY = ("bound", "ready")
DUMPED_AND_KILLED = [(30, Order.DUMP), (31, Order.KILL), (32, Order.KILL)]
END = STOP_S + 1 + KILLED_S


@pytest.mark.parametrize(
    ("notes", "ticks", "seconds", "said"),
    [
        pytest.param(READY, False, HANG_S + 2, DUMPED_AND_KILLED, id="a loop that stands still"),
        pytest.param(READY, True, 10 * HANG_S, [], id="a loop that ticks"),
        pytest.param(("bound",), False, 1000, [], id="a start may take any time"),
        pytest.param(("bound without limit",), False, 1000, [], id="so may one without limit"),
        pytest.param(("bound without limit", "ready"), False, 1000, [], id="a limit of zero is none"),
        pytest.param(
            (*READY, "3 seconds", "stopping"), False, STUCK_STOP_S + 1, [(5, Order.DUMP), (6, Order.KILL)], id="stuck"
        ),
        pytest.param(
            (*READY, "stopping"),
            True,
            END,
            [(29, Order.DUMP), *((second, Order.KILL) for second in (30, 31, 32)), (33, Order.LEAVE)],
            id="one that ticks has the time that it has told",
        ),
        pytest.param((*READY, "over"), False, STOP_S, [(29, Order.DUMP)], id="a loop that is over need not tick"),
        pytest.param(("stopping",), False, DEFAULT_STOP_S, [(30, Order.DUMP)], id="a start that is to stop"),
    ],
)
def test_what_is_ordered(notes: tuple[str, ...], ticks: bool, seconds: float, said: list[tuple[float, Order]]) -> None:
    watch = watch_of(*notes)
    assert orders(watch, seconds, ticks=ticks) == said
    assert "stood still for 32 s" in watch.why or said is not DUMPED_AND_KILLED


def test_a_tick_after_the_dump_saves_it() -> None:
    watch = watch_of(*READY)
    assert orders(watch, HANG_S) == [(30, Order.DUMP)]
    watch.note_tick()
    assert not orders(watch, HANG_S - 1)


def test_asking_again_gives_no_more_time() -> None:
    watch = watch_of(*READY)
    for _ in range(4):
        watch.note_stopping()
        orders(watch, 1)
    assert orders(watch, 1) == [(1, Order.DUMP)]


@pytest.mark.parametrize(("status", "code"), [(0, 0), (1, 1), (2, 2), (-signal.SIGTERM, 143), (-signal.SIGSEGV, 139)])
def test_a_start_that_fails_is_the_parents_end(status: int, code: int) -> None:
    assert RestartRule().next(status, FrontEndWatch()) == Exit(code)


def test_one_that_has_served_is_started_again_ever_later() -> None:
    rule = RestartRule()
    assert rule.next(-signal.SIGKILL, watch_of(*READY)) == Restart(0.5)
    delays = [rule.next(1, FrontEndWatch()) for _ in range(5)]
    assert delays == [Restart(1.0), Restart(2.0), Restart(4.0), Restart(5.0), Restart(5.0)]
    served = watch_of(*READY)
    orders(served, 10, ticks=True)
    assert rule.next(1, served) == Restart(0.5)


@pytest.mark.parametrize(("status", "code"), [(0, 0), (-signal.SIGKILL, 137)])
def test_one_that_was_to_stop_is_not_started_again(status: int, code: int) -> None:
    watch = watch_of(*READY)
    watch.note_stopping()
    assert RestartRule().next(status, watch) == Exit(code)


def test_one_that_ends_well_was_asked_to_by_someone_else() -> None:
    assert RestartRule().next(0, watch_of(*READY)) == Exit(0)
