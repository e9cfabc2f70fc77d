"""When an event loop counts as standing still, and what is said and counted then."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable

import pytest

from headway.server.loop_guard import TICK_S, Clocks, LoopGuard, LoopStalls, StallWatch

IDLE = Clocks(0.0, 0.0)


def looks(watch: StallWatch, number: int, *, seconds: float = TICK_S, clocks: Clocks = IDLE) -> list[float]:
    """What is found by so many looks, which take so long each, with the clocks at their end."""
    found = [watch.look(seconds, clocks) for _ in range(number)]
    return [still_s for still_s in found if still_s is not None]


def test_a_loop_that_ticks_is_well() -> None:
    watch = StallWatch()
    for number in range(20):
        assert not looks(watch, 1, clocks=Clocks(0.1 * number, 0.2 * number))
        assert watch.tick(Clocks(0.1 * number, 0.2 * number)) is None


def test_a_loop_that_waits_is_found_once_and_its_time_told_at_the_end() -> None:
    watch = StallWatch()
    assert looks(watch, 15) == [pytest.approx(1.0)]
    assert watch.tick(IDLE) == pytest.approx(3.0)
    assert watch.tick(IDLE) is None and looks(watch, 4) == []


def test_one_that_computes_is_found_by_its_processor_time() -> None:
    """It may hold the interpreter lock, so that the look itself is late, and says nothing; or compute between two."""
    watch = StallWatch()
    assert looks(watch, 1, seconds=2.5, clocks=Clocks(2.4, 2.5)) == [pytest.approx(2.4)]
    assert watch.tick(Clocks(2.4, 2.5)) == pytest.approx(2.4)
    watch = StallWatch()
    assert watch.tick(Clocks(1.5, 1.6)) == pytest.approx(1.5)
    assert looks(watch, 2, seconds=1.6, clocks=Clocks(1.5, 1.6)) == [pytest.approx(1.5)]


@pytest.mark.parametrize(
    "clocks", [Clocks(0.1, 3600.0), Clocks(5.0, 0.3)], ids=["suspended or stopped", "waited for a processor"]
)
def test_time_in_which_the_loop_could_not_run_does_not_count(clocks: Clocks) -> None:
    """The look is as late as the tick. Other threads of the process may have had the processors meanwhile."""
    watch = StallWatch()
    assert looks(watch, 2, seconds=3600.0, clocks=clocks) == []
    assert watch.tick(clocks) is None


def waits() -> None:
    time.sleep(0.8)


def computes() -> None:
    until_s = time.thread_time() + 0.8
    while time.thread_time() < until_s:
        pass


def is_locked_out() -> None:
    """Another thread holds the interpreter lock, in calls that do not end for long."""

    def hold_the_lock() -> None:
        for _ in range(4):
            re.match("(a+)+$", "a" * 23 + "b")

    thread = threading.Thread(target=hold_the_lock)
    thread.start()
    thread.join()


@pytest.mark.parametrize("hold_up", [waits, computes, is_locked_out])
def test_it_says_where_the_loop_stands(hold_up: Callable[[], None], caplog: pytest.LogCaptureFixture) -> None:
    stalls = LoopStalls()

    async def serve() -> None:
        guard = LoopGuard(asyncio.get_running_loop(), stalls, limit_s=0.3)
        guard.start()
        hold_up()
        while len(caplog.records) < 2:
            await asyncio.sleep(0.01)
        guard.stop()

    with caplog.at_level(logging.ERROR):
        asyncio.run(serve())
    assert stalls.number == 1 and stalls.seconds >= 0.3
    over, begun = sorted((record.message for record in caplog.records), key=len)
    assert re.search(rf"stands still, .*in {hold_up.__name__}\n", begun, re.DOTALL)
    assert ("in hold_the_lock\n" in begun) == (hold_up is is_locked_out)
    assert re.fullmatch(r"the event loop had stood still for \d\.\d s, in which nothing was answered", over)
