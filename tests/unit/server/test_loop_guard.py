"""When an event loop counts as standing still, and what is said and counted then."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable

import pytest

from headway.server.loop_guard import TICK_S, LoopGuard, LoopStalls, StallWatch


def looks(watch: StallWatch, number: int, *, seconds: float = TICK_S, cpu_s: float = 0.0) -> list[float]:
    """What is found by so many looks, which take so long each, and at the end of which the loop has used so much."""
    found = [watch.look(seconds, cpu_s) for _ in range(number)]
    return [still_s for still_s in found if still_s is not None]


def test_a_loop_that_ticks_is_well() -> None:
    watch = StallWatch()
    for number in range(20):
        assert not looks(watch, 1)
        assert watch.tick(0.1 * number) is None


def test_a_loop_that_waits_is_found_once_and_its_time_told_at_the_end() -> None:
    watch = StallWatch()
    assert looks(watch, 15) == [pytest.approx(1.0)]
    assert watch.tick(0.0) == pytest.approx(3.0)
    assert watch.tick(0.0) is None and looks(watch, 4) == []


def test_a_loop_that_computes_is_found_by_its_processor_time() -> None:
    """It may hold the interpreter lock, so that the look itself is late, and says nothing."""
    watch = StallWatch()
    assert looks(watch, 1, seconds=2.5, cpu_s=2.4) == [pytest.approx(2.4)]
    assert watch.tick(2.5) == pytest.approx(2.5)


def test_a_loop_that_has_computed_between_two_looks_is_counted() -> None:
    watch = StallWatch()
    assert watch.tick(1.5) == pytest.approx(1.5)
    assert looks(watch, 1, seconds=1.6, cpu_s=1.5) == []


@pytest.mark.parametrize("seconds", [1.5, 3600.0])
def test_time_in_which_nothing_could_run_does_not_count(seconds: float) -> None:
    """The machine was suspended, the process stopped, or others had the processors: the look is as late as the tick."""
    watch = StallWatch()
    assert looks(watch, 2, seconds=seconds, cpu_s=0.1) == []
    assert watch.tick(0.1) is None


def waits() -> None:
    time.sleep(0.8)


def computes() -> None:
    until_s = time.thread_time() + 0.8
    while time.thread_time() < until_s:
        pass


@pytest.mark.parametrize("hold_up", [waits, computes])
def test_it_says_where_the_loop_stands(hold_up: Callable[[], None], caplog: pytest.LogCaptureFixture) -> None:
    stalls = LoopStalls()

    async def serve() -> None:
        guard = LoopGuard(asyncio.get_running_loop(), stalls, limit_s=0.3)
        guard.start()
        hold_up()
        while not stalls.number:
            await asyncio.sleep(0.01)
        guard.stop()

    with caplog.at_level(logging.ERROR):
        asyncio.run(serve())
    assert stalls.number == 1 and stalls.seconds >= 0.3
    begun, over = (record.message for record in caplog.records)
    assert re.search(rf"stands still, .*in {hold_up.__name__}\n", begun, re.DOTALL)
    assert re.fullmatch(r"the event loop had stood still for \d\.\d s, in which nothing was answered", over)
