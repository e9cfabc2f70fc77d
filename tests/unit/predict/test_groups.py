"""Turns of one conversation are on one side of every split, whatever system prompt all of them share."""

from __future__ import annotations

import random

import pytest

from headway.predict import PromptView
from headway.predict.features import PromptFeatures, prompt_features
from headway.predict.training import group_draws


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
    assert len(set(draws)) > 95


def test_the_seed_draws_anew() -> None:
    features = turns(0, 3, 0)
    assert group_draws(features, 1) == group_draws(features, 1) != group_draws(features, 2)
    assert all(0 <= draw < 1 for draw in group_draws(features, -1))
