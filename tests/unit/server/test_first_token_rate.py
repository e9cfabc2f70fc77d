"""The estimate of a line's pace."""

from __future__ import annotations

import math

import pytest

from headway.server.admission.queue_limits import MEMORY_S, FirstTokenRate
from tests.unit.clock import Clock


def measured(clock: Clock, *, gap_s: float, number: int, num_waiting: int = 5) -> FirstTokenRate:
    """A line in which somebody always waits, and a first token comes every `gap_s`."""
    rate = FirstTokenRate(clock)
    rate.note_waiting(num_waiting)
    for _ in range(number):
        clock.now_s += gap_s
        rate.note_first_tokens(1)
    return rate


def test_nothing_has_been_seen() -> None:
    assert FirstTokenRate(Clock()).per_second() == math.inf


def test_a_steady_line() -> None:
    assert measured(Clock(), gap_s=0.25, number=400).per_second() == pytest.approx(4.0, rel=0.02)


def test_idle_time_is_no_time() -> None:
    """One request a minute, each served within 50 ms: the line is not slow, there is just nobody in it."""
    clock = Clock()
    rate = FirstTokenRate(clock)
    for _ in range(20):
        rate.note_waiting(1)
        clock.now_s += 0.05
        rate.note_first_tokens(1)
        rate.note_waiting(0)
        clock.now_s += 60.0
    rate.note_waiting(1)
    clock.now_s += 0.05
    assert rate.per_second() == pytest.approx(20.0, rel=0.1)


def test_a_line_that_stands_still_gets_slower_and_slower() -> None:
    clock = Clock()
    rate = measured(clock, gap_s=0.1, number=300)
    before = rate.per_second()
    clock.now_s += MEMORY_S
    assert rate.per_second() < before / 2
    clock.now_s += 100 * MEMORY_S
    assert rate.per_second() == pytest.approx(1 / MEMORY_S)


def test_what_was_long_ago_is_forgotten() -> None:
    clock = Clock()
    rate = measured(clock, gap_s=2.0, number=20)
    assert rate.per_second() < 1.0
    for _ in range(400):
        clock.now_s += 0.1
        rate.note_first_tokens(1)
    assert rate.per_second() == pytest.approx(10.0, rel=0.05)
