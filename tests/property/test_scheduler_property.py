"""Random arrivals, lengths, aborts, preemptions, ids used again, results that come late: the scheduler against a
brute-force model, with invariants after each call."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.property.random_play import RandomPlay, paced_world, small_world


def make_play(seed: int, max_in_flight: int) -> RandomPlay:
    rng = random.Random(seed)
    world = paced_world(rng) if seed % 20 == 0 else small_world(rng)
    return RandomPlay(world, rng, max_in_flight)


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
@pytest.mark.parametrize("group", range(3))
def test_the_scheduler_does_what_the_brute_force_model_does(group: int, max_in_flight: int) -> None:
    """Over 100,000 steps in all; each group of worlds must really contain what the test is about."""
    events: Counter[str] = Counter()
    num_steps = 0
    for seed in range(60 * group, 60 * group + 60):
        play = make_play(seed, max_in_flight)
        play.play(num_steps=220)
        events.update(play.pair.counts())
        num_steps += len(play.pair.trace)
    assert num_steps >= 12_000
    assert events["preempted"] >= 50
    assert events["refused"] >= 10
    assert events["id used again in flight"] >= 5
    assert events["dropped"] >= (5 if max_in_flight == 1 else 50)
    assert events["paced"] >= 100
    assert max_in_flight == 1 or events["late for a preempted one"] >= 5


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("seed", [0, 7, 33])
def test_the_same_seed_replays_the_same_schedule(seed: int, max_in_flight: int) -> None:
    first, second = make_play(seed, max_in_flight), make_play(seed, max_in_flight)
    first.play(num_steps=200)
    second.play(num_steps=200)
    assert first.pair.trace == second.pair.trace
