"""The time of steps that only decode, learned from a few."""

from __future__ import annotations

import random

import pytest

from headway.core.step_time import DecodeTime


@pytest.mark.parametrize(("base_s", "row_s"), [(4e-3, 4e-5), (1e-3, 1e-4), (2e-2, 1e-5), (1e-3, 0.0)])
def test_both_parts_are_found_where_batches_differ(base_s: float, row_s: float) -> None:
    rng, time = random.Random(0), DecodeTime()
    for _ in range(200):
        num_rows = rng.randint(1, 60)
        time.observe(num_rows, (base_s + num_rows * row_s) * rng.uniform(0.97, 1.03))
    for num_rows in (1, 30, 200):
        assert time.seconds(num_rows) == pytest.approx(base_s + num_rows * row_s, rel=0.1)


def test_one_size_tells_about_others_what_is_usual() -> None:
    time = DecodeTime()
    for _ in range(20):
        time.observe(50, 0.006)
    assert time.seconds(50) == pytest.approx(0.006, rel=0.01)
    assert time.seconds(0) == pytest.approx(0.006 / (1 + 50 / DecodeTime.ROWS_PER_BASE), rel=0.01)


def test_nothing_is_known_before_a_step() -> None:
    assert DecodeTime().seconds(10) == 0.0


def test_a_first_step_that_was_slow_is_forgotten_at_once() -> None:
    time = DecodeTime()
    time.observe(1, 3.0)
    time.observe(1, 0.004)
    assert time.seconds(1) == pytest.approx(0.004)


def test_a_slow_step_counts_up_to_a_limit() -> None:
    time = DecodeTime()
    for _ in range(100):
        time.observe(10, 0.004)
    time.observe(10, 5.0)
    assert time.seconds(10) < 0.0042


def test_no_part_is_negative() -> None:
    for steps in ([(1, 0.004), (50, 0.003)] * 50, [(10, 0.001), (50, 0.01)] * 50):
        time = DecodeTime()
        for num_rows, duration_s in steps:
            time.observe(num_rows, duration_s)
        assert 0.0 <= time.seconds(0) <= time.seconds(100)
