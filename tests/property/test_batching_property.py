"""Random play under every policy, in every era of batching, with requests that displace others: the scheduler against
the brute-force model."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from headway.config import BATCHING_MODES, SCHEDULING_POLICIES, SchedulerConfig
from headway.core import POLICIES
from tests.property.driven_scheduler import Setting
from tests.property.random_play import RandomPlay, World, displacing_world, era_world
from tests.property.side_by_side import SideBySide
from tests.unit.core.driver import make_request

MOST_DISPLACED = 4
"""In a step, for others."""
DISPLACING = [name for name, policy in POLICIES.items() if "choose_displaced" in vars(policy)]
EXPECTED = {
    "continuous": {"preempted": 25, "displaced": 3, "forked": 30},
    "static": {"held": 500, "batch done": 30, "still forming": 60, "forked": 30, "preempted": 10},
    "dynamic": {"held": 500, "started full": 2, "started late": 30, "batch not full": 5, "forked": 30},
}
"""What each era must have seen, at the least."""


def play(world: World, rng: random.Random, max_in_flight: int) -> Counter[str]:
    played = RandomPlay(world, rng, max_in_flight)
    played.play(num_steps=90)
    return Counter(played.driven.counts())


@pytest.mark.parametrize("batching", BATCHING_MODES)
def test_every_era_keeps_its_rules(batching: str) -> None:
    events: Counter[str] = Counter()
    for seed in range(15):
        rng = random.Random(f"{batching} {seed}")
        policy = SCHEDULING_POLICIES[seed % len(SCHEDULING_POLICIES)]
        events += play(era_world(rng, batching, policy), rng, max_in_flight=1 + seed % 3)
    missing = {name: events[name] for name, least in EXPECTED[batching].items() if events[name] < least}
    assert not missing, "the rules are about something that did not happen"


@pytest.mark.parametrize("policy", DISPLACING)
def test_requests_are_displaced_only_for_more_urgent_ones(policy: str) -> None:
    events: Counter[str] = Counter()
    for seed in range(8):
        rng = random.Random(f"{policy} {seed}")
        events += play(displacing_world(rng, policy), rng, max_in_flight=1 + seed % 2)
    assert events["displaced"] >= 2


@pytest.mark.parametrize("num_needed", [1, 2, MOST_DISPLACED, MOST_DISPLACED + 1, MOST_DISPLACED + 3])
def test_as_many_as_needed_are_displaced_or_none(num_needed: int) -> None:
    """Eight requests with 11 blocks each, and 8 blocks are free, a spare one for each; so with every one that leaves,
    there are 12 more for a request of a higher level."""
    config = SchedulerConfig(max_num_seqs=9, max_num_batched_tokens=512, scheduling_policy="mlfq").resolve("cpu")
    played = SideBySide(Setting(config, num_blocks=96, block_size=4))
    for number in range(8):
        played.add(make_request(f"long {number}", [number], max_tokens=200))
    for _ in range(41):
        played.launch(lambda: 0)
        played.land()
    played.add(make_request("new", range(4 * (12 * num_needed - 2)), max_tokens=1))
    played.launch(lambda: 0)
    is_possible = num_needed <= MOST_DISPLACED
    assert played.events["displaced"] == (num_needed if is_possible else 0)
    assert ("new" in {one.request_id for one in played.scheduler.live.running}) == is_possible
