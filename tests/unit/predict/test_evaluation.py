"""Order and error of predictions, against the definitions written out."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from headway.predict.training import count_pairs, quality


def tau_b_by_definition(a: list[int], b: list[int]) -> float:
    pairs = list(itertools.combinations(range(len(a)), 2))
    signs = [((a[i] > a[j]) - (a[i] < a[j]), (b[i] > b[j]) - (b[i] < b[j])) for i, j in pairs]
    numerator = sum(x * y for x, y in signs)
    return numerator / math.sqrt(sum(x != 0 for x, _ in signs) * sum(y != 0 for _, y in signs))


@pytest.mark.parametrize("seed", range(20))
def test_tau_b_and_accuracy_by_definition(seed: int) -> None:
    draw = random.Random(seed)
    predicted = [draw.randrange(12) for _ in range(40)]
    actual = [draw.randrange(12) for _ in range(40)]
    counts = count_pairs(predicted, actual)
    assert counts.kendall_tau == pytest.approx(tau_b_by_definition(predicted, actual))
    different = [(i, j) for i, j in itertools.permutations(range(40), 2) if actual[i] < actual[j]]
    right = sum((predicted[i] < predicted[j]) + (predicted[i] == predicted[j]) / 2 for i, j in different)
    assert counts.accuracy == pytest.approx(right / len(different))


def test_extremes() -> None:
    assert count_pairs([1, 2, 3], [10, 20, 30]).kendall_tau == 1
    assert count_pairs([3, 2, 1], [10, 20, 30]).kendall_tau == -1
    assert count_pairs([5, 5, 5], [10, 20, 30]).kendall_tau == 0
    assert count_pairs([5, 5, 5], [10, 20, 30]).accuracy == 0.5
    assert count_pairs([], []).accuracy == 0.5


def test_log_error_and_bias() -> None:
    found = quality([20.0, 40.0], [10, 80])
    assert found.log_error == pytest.approx(math.log(2))
    assert found.bias == pytest.approx(60 / 90)
