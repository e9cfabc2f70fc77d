"""Axes: positions, round ticks, labels that do not overlap."""

from __future__ import annotations

import itertools
import math

import pytest

from headway_lab.charts.scale import Domain, Scale, domain_of, number_text


def test_positions() -> None:
    linear = Scale(Domain(10.0, 20.0), 100.0, 300.0)
    assert [linear.position(value) for value in (10, 15, 20)] == [100.0, 200.0, 300.0]
    log = Scale(Domain(1.0, 1000.0, is_log=True), 300.0, 0.0)
    assert [log.position(value) for value in (1, 10, 100, 1000)] == pytest.approx([300.0, 200.0, 100.0, 0.0])
    for scale, value in ((linear, math.nan), (linear, math.inf), (log, 0.0), (log, -1.0)):
        assert scale.position(value) is None


@pytest.mark.parametrize(
    ("domain", "labels"),
    [
        (Domain(0.0, 100.0), ["0", "20", "40", "60", "80", "100"]),
        (Domain(0.0, 1.0), ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (Domain(-10.0, 10.0), ["−10", "−5", "0", "5", "10"]),
        (Domain(0.0, 5e6), ["0", "1M", "2M", "3M", "4M", "5M"]),
        (Domain(0.0, 13_000.0), ["0", "2,500", "5,000", "7,500", "10,000", "12,500"]),
        (Domain(1.0, 1e5, is_log=True), ["1", "10", "100", "1,000", "10,000", "100,000"]),
        (Domain(1.0, 30.0, is_log=True), ["1", "2", "5", "10", "20"]),
        (Domain(0.001, 1e9, is_log=True), ["0.001", "1", "1,000", "1M", "1,000M"]),
        (Domain(11.0, 17.0, is_log=True), ["11", "12", "13", "14", "15", "16", "17"]),
    ],
)
def test_ticks_are_round_numbers_inside(domain: Domain, labels: list[str]) -> None:
    assert [tick.label for tick in Scale(domain, 0.0, 1.0).ticks(6)] == labels


@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize("high", [1.5, 7.0, 123.0, 98_765.0, 3.2e8])
def test_fitting_ticks_leave_room_for_their_labels(is_log: bool, high: float) -> None:
    scale = Scale(Domain(1.0, high, is_log), 0.0, 300.0)
    ticks = scale.fitting_ticks(lambda label: 7.0 * len(label) + 10)
    spans = [((scale.position(tick.value) or 0.0), (7.0 * len(tick.label) + 10) / 2) for tick in ticks]
    assert len(ticks) >= 2
    assert all(left + a <= right - b for (left, a), (right, b) in itertools.pairwise(spans))
    assert all(1.0 - 1e-9 <= tick.value <= high * (1 + 1e-9) for tick in ticks)


def test_domains() -> None:
    assert domain_of([]) is None
    assert domain_of([math.nan, math.inf]) is None
    assert domain_of([-1.0, 0.0], is_log=True) is None
    assert domain_of([3.0, 97.0], wants_zero=True, is_rounded=True) == Domain(0.0, 100.0)
    assert domain_of([950.0, 1000.0], wants_zero=True) == Domain(950.0, 1000.0)
    assert domain_of([5.0]) == Domain(0.0, 10.0)
    assert domain_of([0.0]) == Domain(0.0, 1.0)
    assert domain_of([-5.0]) == Domain(-10.0, 0.0)
    assert domain_of([3.0, 700.0], is_log=True, is_rounded=True) == Domain(2.0, 1000.0, is_log=True)


def test_numbers_as_text() -> None:
    values = [0, 3, 1234567, 12.3456, 0.00123456, -2.5, 1e-7, math.nan, math.inf]
    assert " ".join(map(number_text, values)) == "0 3 1,234,567 12.35 0.001235 −2.5 1e-07 – ∞"
