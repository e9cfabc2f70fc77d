"""What stands for the length of an answer that was cut."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headway.predict.training import log_lengths


def test_whole_answers_stay_as_they_are() -> None:
    assert log_lengths([1, 10, 0], [False] * 3) == pytest.approx([0.0, math.log(10), 0.0])


def test_a_cut_answer_counts_as_those_that_went_on() -> None:
    found = log_lengths([10, 100, 1000, 20], [False, False, False, True])
    assert found[3] == pytest.approx((math.log(100) + math.log(1000)) / 2)


def test_a_cut_answer_is_at_least_as_long_as_its_cut() -> None:
    found = log_lengths([10, 20, 512, 512], [False, False, True, True])
    assert found[2:] == pytest.approx([math.log(512)] * 2)
    assert log_lengths([7, 9], [True, True]) == pytest.approx([math.log(9), math.log(9)])


def test_cut_answers_do_not_pull_the_mean_down() -> None:
    draw = np.random.default_rng(0)
    true = np.exp(draw.normal(5, 0.7, 4000))
    limit = np.where(draw.random(4000) < 0.4, 60, 10_000)
    found = log_lengths(np.minimum(true, limit), true > limit)
    assert found.mean() == pytest.approx(np.log(true).mean(), abs=0.03)
    assert np.log(np.minimum(true, limit)).mean() < np.log(true).mean() - 0.2
