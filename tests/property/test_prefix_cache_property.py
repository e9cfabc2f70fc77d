"""Random trees of prompts over two tokens, in blocks of one to five: schedule, hits, copies and evictions are those of
the brute-force model, and every cached block holds the tokens it is known by."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from headway.core.kv import prefix_cache
from tests.property.random_play import RandomPlay, World, swapping_world, tree_world


def play(
    seed: int, max_in_flight: int, make_world: Callable[[random.Random], World] = tree_world, num_steps: int = 120
) -> RandomPlay:
    rng = random.Random(seed)
    played = RandomPlay(make_world(rng), rng, max_in_flight)
    played.play(num_steps)
    return played


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_the_prefix_cache_does_what_the_brute_force_model_does(max_in_flight: int) -> None:
    """Each group of worlds must really contain what the test is about."""
    events: Counter[str] = Counter()
    for seed in range(15):
        events.update(play(1000 * max_in_flight + seed, max_in_flight).driven.counts())
    assert events["hit"] >= 600
    assert events["tail copied"] >= 20
    assert events["waited"] >= 50
    assert events["duplicate"] >= 100
    assert events["evicted"] >= 600
    assert events["evicted although pinned"] >= 30
    assert events["preempted"] >= 5
    assert events["failed"] >= 10
    assert max_in_flight == 1 or events["id used again in flight"] >= 8
    assert max_in_flight == 1 or events["late for a preempted one"] >= 2


@pytest.mark.parametrize("max_in_flight", [1, 3])
def test_with_a_host_tier(max_in_flight: int) -> None:
    events: Counter[str] = Counter()
    for seed in range(16):
        events.update(play(1000 * max_in_flight + seed, max_in_flight, swapping_world).driven.counts())
    assert events["restored"] >= 10
    assert events["hit"] >= 500
    assert events["preempted"] >= 2
    assert events["broken"] >= 5


def test_tails_that_are_too_many_give_way_to_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "MAX_TAILS", 1)
    played = [play(seed, max_in_flight=1 + seed % 3) for seed in range(8)]
    assert sum(one.driven.counts()["tail copied"] for one in played) >= 5
