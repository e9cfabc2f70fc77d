"""Random arrivals, lengths, aborts, preemptions, ids used again, results that come late, under every policy and mode:
the scheduler against a brute-force model, with invariants after each call."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from headway.config import KV_ALLOCATIONS, PREFILL_MODES, SCHEDULING_POLICIES
from tests.property.random_play import RandomPlay, World, crowded_world, long_prompt_world, paced_world, small_world

MakeWorld = Callable[[random.Random, str], World]


def make_play(policy: str, max_in_flight: int, make_world: MakeWorld = small_world) -> RandomPlay:
    """A world depends on its own policy alone: another policy adds worlds, and changes none."""
    rng = random.Random(f"{policy} {make_world.__name__} {max_in_flight}")
    return RandomPlay(make_world(rng, policy), rng, max_in_flight)


def plays(max_in_flight: int) -> Iterator[RandomPlay]:
    """Each policy in a small world and a crowded one, and two of them with a pace."""
    for policy in SCHEDULING_POLICIES:
        yield make_play(policy, max_in_flight)
        yield make_play(policy, max_in_flight, crowded_world)
    for policy in ("slo", "fair"):
        yield make_play(policy, max_in_flight, paced_world)


def describe(play: RandomPlay) -> set[str]:
    setting, config = play.world.setting, play.world.setting.config
    kv_allocation = "contiguous-max" if setting.reserve_tokens else "paged"
    return {config.scheduling_policy, config.prefill_mode, kv_allocation}


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_the_scheduler_does_what_the_brute_force_model_does(max_in_flight: int) -> None:
    """Over 12,000 steps in all; each group of worlds must really contain what the test is about."""
    events: Counter[str] = Counter()
    seen: set[str] = set()
    num_steps = 0
    for play in plays(max_in_flight):
        play.play(num_steps=150)
        events.update(play.driven.counts())
        seen |= describe(play)
        num_steps += len(play.driven.trace)
    assert seen == {*SCHEDULING_POLICIES, *PREFILL_MODES, *KV_ALLOCATIONS}
    assert num_steps >= 4_000
    assert events["not in order of arrival"] >= 500
    assert events["lifted"] >= 10
    assert events["spared"] >= 1
    assert events["no time"] >= 10
    assert events["preempted"] >= 30
    assert events["refused"] >= 5
    assert events["dropped"] >= (2 if max_in_flight == 1 else 15)
    assert events["paced"] >= 50
    assert events["limited"] >= 10
    assert max_in_flight == 1 or events["id used again in flight"] >= 10
    assert max_in_flight == 1 or events["late for a preempted one"] >= 3


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
def test_short_prompts_pass_long_ones_as_in_the_brute_force_model(policy: str) -> None:
    """Requests that the policy puts behind a long prompt do not pass it: `hrrn` puts nearly all there. `fair` divides
    steps by a rule of its own."""
    rng = random.Random(policy)
    num_passed = 0
    for max_in_flight in (1, 2):
        play = RandomPlay(long_prompt_world(rng, policy), rng, max_in_flight)
        play.play(num_steps=90)
        num_passed += play.driven.counts()["passed a long prompt"]
    assert num_passed >= (0 if policy in ("hrrn", "fair") else 3)


def test_the_same_seed_replays_the_same_schedule() -> None:
    first, second = make_play("srpt", max_in_flight=2), make_play("srpt", max_in_flight=2)
    first.play(num_steps=100)
    second.play(num_steps=100)
    assert first.driven.trace == second.driven.trace
