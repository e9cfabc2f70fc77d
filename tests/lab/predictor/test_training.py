"""Order and error of predictions, against the definitions written out.

What stands for the length of an answer that was cut.

Turns of one conversation are on one side of every split, whatever system prompt all of them share.
"""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from headway.predict import PromptView
from headway.predict.features import PromptFeatures, prompt_features
from headway_lab.predictor.training import count_pairs, group_draws, log_lengths, quality


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


def test_log_error_and_bias() -> None:
    found = quality([20.0, 40.0], [10, 80])
    assert found.log_error == pytest.approx(math.log(2))
    assert found.bias == pytest.approx(60 / 90)
    for predicted, tau in (([1, 2, 3], 1), ([3, 2, 1], -1), ([5, 5, 5], 0)):
        assert count_pairs(predicted, [10, 20, 30]).kendall_tau == tau
    assert count_pairs([5, 5, 5], [10, 20, 30]).accuracy == count_pairs([], []).accuracy == 0.5


def test_a_cut_answer_counts_as_those_that_went_on() -> None:
    found = log_lengths([10, 100, 1000, 20], [False, False, False, True])
    assert found[:3] == pytest.approx([math.log(10), math.log(100), math.log(1000)])
    assert found[3] == pytest.approx((math.log(100) + math.log(1000)) / 2)
    found = log_lengths([10, 20, 512, 512], [False, False, True, True])
    assert found[2:] == pytest.approx([math.log(512)] * 2), "at least as long as its cut"
    assert log_lengths([7, 9], [True, True]) == pytest.approx([math.log(9), math.log(9)])


def test_cut_answers_do_not_pull_the_mean_down() -> None:
    draw = np.random.default_rng(0)
    true = np.exp(draw.normal(5, 0.7, 4000))
    limit = np.where(draw.random(4000) < 0.4, 60, 10_000)
    found = log_lengths(np.minimum(true, limit), true > limit)
    assert found.mean() == pytest.approx(np.log(true).mean(), abs=0.03)
    assert np.log(np.minimum(true, limit)).mean() < np.log(true).mean() - 0.2


def turns(number: int, count: int, template: int) -> list[PromptFeatures]:
    draw = random.Random(number)
    ids = list(range(template))
    prompts = []
    for _ in range(count):
        ids = [*ids, *(draw.randrange(1000, 9000) for _ in range(40))]
        prompts.append(prompt_features(PromptView(ids)))
    return prompts


@pytest.mark.parametrize("template", [0, 24, 30])
def test_turns_stay_together_and_conversations_do_not(template: int) -> None:
    chats = [turns(number, 4, template) for number in range(100)]
    draws = iter(group_draws([features for chat in chats for features in chat], seed=3))
    by_chat = [{next(draws) for _ in chat} for chat in chats]
    assert all(len(found) == 1 for found in by_chat)
    assert len(set.union(*by_chat)) > 95


def test_behind_a_long_system_prompt_only_equals_are_together() -> None:
    features = [each for number in range(100) for each in turns(number, 1, 200)]
    draws = group_draws(features * 2, seed=3)
    assert draws[:100] == draws[100:]
    assert len(set(draws)) > 95 and all(0 <= draw < 1 for draw in group_draws(features, -1))
    assert draws == group_draws(features * 2, seed=3) != group_draws(features * 2, seed=2)
