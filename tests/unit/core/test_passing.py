"""Prompts that fit into one step do not wait for the end of a long one, which is slowed for them by a bounded share."""

from __future__ import annotations

import random

import pytest

from headway.config import SchedulerConfig
from headway.core import KVCacheManager, PrefixCache, Request, Scheduler, create_eviction_policy
from headway.core.step_time import SHORT_TOKENS, DecodePace
from tests.unit.core.driver import finish, make_scheduler, request, schedule_text, step


def test_a_short_prompt_is_through_while_a_long_one_is_computed() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, num_blocks=128)
    schedule = schedule_text(scheduler, {0: [request("long", 100, 1)], 2: [request("short", 6, 2)]})
    assert schedule == PASSED


def test_with_a_share_of_nothing_the_order_is_strict() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, num_blocks=128, short_prompt_share=0.0)
    schedule = schedule_text(scheduler, {0: [request("long", 100, 1)], 2: [request("short", 6, 2)]})
    assert [line for line in schedule.splitlines() if "short" in line] == ["  6 long:4* short:6*", "  7 short:1*"]


def test_short_prompts_are_found_behind_any_number_of_long_ones() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64, num_blocks=300, max_num_seqs=4)
    for number in range(60):
        scheduler.add_request(request(f"long{number}", 300, 1))
    scheduler.add_request(request("short", 6, 1))
    planned = [step(scheduler) for _ in range(3)]
    assert planned[0] == {"long0": 64}
    assert planned[1]["short"] == 6
    assert "long1" not in planned[2]


def test_the_last_seat_is_the_first_ones_in_the_line() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, num_blocks=256, max_num_seqs=3, short_prompt_share=1.0)
    for arrival in (request("a", 100, 1), request("b", 100, 1), request("c", 2, 9), request("d", 2, 9)):
        scheduler.add_request(arrival)
    steps = [step(scheduler) for _ in range(6)]
    assert any("c" in planned for planned in steps)
    assert not any("d" in planned for planned in steps)


def test_a_prompt_that_is_mostly_cached_counts_by_what_is_left_of_it() -> None:
    cache = PrefixCache(create_eviction_policy("lru"))
    scheduler = make_scheduler(max_num_batched_tokens=16, num_blocks=256, prefix_cache=cache)
    scheduler.add_request(request("turn 1", 40, 1))
    while scheduler.has_unfinished_requests:
        step(scheduler)
    scheduler.add_request(Request("document", [7] * 200, max_tokens=1))
    step(scheduler)
    scheduler.add_request(request("turn 2", 44, 1))
    steps = [step(scheduler) for _ in range(4)]
    assert any("turn 2" in planned for planned in steps)


def test_a_less_important_prompt_does_not_pass() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, num_blocks=128, scheduling_policy="priority")
    scheduler.add_request(request("long", 100, 1, priority=1))
    step(scheduler)
    scheduler.add_request(request("later", 2, 1, priority=2))
    scheduler.add_request(request("equal", 2, 1, priority=1))
    steps = [step(scheduler) for _ in range(4)]
    assert any("equal" in planned for planned in steps)
    assert not any("later" in planned for planned in steps)


@pytest.mark.parametrize("share", [0.05, 0.15, 0.5])
@pytest.mark.parametrize("seed", range(5))
def test_a_long_prompt_is_slowed_by_no_more_than_its_share(share: float, seed: int) -> None:
    """In every step and whatever comes: what has passed it is at most `share` of what it has computed, but for the last
    token of a prompt, which may be computed as if it were generated."""
    rng = random.Random(seed)
    scheduler = make_scheduler(
        max_num_batched_tokens=64, max_num_seqs=32, num_blocks=600, short_prompt_share=share, block_size=16
    )
    scheduler.add_request(request("long", 6_400, 1))
    own = step(scheduler)["long"]
    passed = num_steps = num_others = 0
    while True:
        for _ in range(rng.choice([0, 0, 1, 4])):
            num_others += 1
            scheduler.add_request(request(f"r{num_others}", rng.randint(2, 60), 1))
        planned = step(scheduler)
        if "long" not in planned or scheduler.requests.get("long") is None:
            break
        own += planned.pop("long")
        passed += sum(planned.values())
        num_steps += 1
        assert passed <= share * own + num_others
    assert num_steps <= 6_400 / 64 * (1 + share) + 1
    assert passed >= 0.8 * share * own  # others did want it


@pytest.mark.parametrize("seed", range(10))
def test_a_short_prompt_never_waits_for_a_long_ones_end(seed: int) -> None:
    """However many long ones are before it: it starts within two steps, and goes on in each."""
    rng = random.Random(seed)
    scheduler = make_scheduler(max_num_batched_tokens=100, max_num_seqs=64, num_blocks=700, block_size=16)
    for number in range(rng.randint(1, 30)):
        scheduler.add_request(request(f"long{number}", rng.randint(2_000, 5_000), 4))
    for _ in range(rng.randint(2, 15)):
        step(scheduler)
    scheduler.add_request(request("short", rng.randint(1, 100), 1))
    num_steps = 0
    while "short" in scheduler.requests:
        step(scheduler)
        num_steps += 1
    assert num_steps <= 2 + 100 // 13


def test_a_long_prompt_makes_no_step_longer_than_its_time() -> None:
    """On a device that takes a millisecond for each token of a prompt, and tokens deep in it cost more and more."""
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=2048, long_prompt_step_ms=600.0).resolve("cpu")
    scheduler = Scheduler(config, KVCacheManager(num_blocks=50, block_size=256))
    scheduler.add_request(request("long", 12_000, 1))
    durations = []
    while scheduler.has_unfinished_requests:
        output = scheduler.schedule()
        (share,) = output.scheduled
        cost = 1e-3 * (1.0 + share.num_computed_tokens / 2_500)
        durations.append(0.01 + cost * share.num_tokens)
        finish(scheduler, output, duration_s=durations[-1])
    assert max(durations[1:]) < 1.0  # nothing was known before the first
    assert sum(durations[1:-1]) / len(durations[1:-1]) > 0.4


def test_a_long_context_does_not_starve_a_device_that_needs_many_tokens() -> None:
    """Behind a long context few tokens take as long as many there: smaller steps would only be more of them."""
    config = SchedulerConfig(max_num_seqs=4, long_prompt_step_ms=35.0).resolve("cuda")
    scheduler = Scheduler(config, KVCacheManager(num_blocks=2100, block_size=64))
    scheduler.add_request(request("long", 128_000, 1))
    sizes = []
    while scheduler.has_unfinished_requests:
        output = scheduler.schedule()
        (share,) = output.scheduled
        sizes.append(share.num_tokens)
        attention_s = 0.2 * share.num_computed_tokens / 128_000 * max(1.0, share.num_tokens / 1024)
        finish(scheduler, output, duration_s=0.004 + 2e-5 * share.num_tokens + attention_s)
    assert min(sizes[:-1]) >= 1024
    assert len(sizes) <= 125


def test_a_batch_of_long_prompts_is_computed_at_full_speed_until_others_come() -> None:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8192, long_prompt_step_ms=100.0).resolve("cpu")
    scheduler = Scheduler(config, KVCacheManager(num_blocks=400, block_size=256))
    for name in ("a", "b", "c"):
        scheduler.add_request(request(name, 30_000, 1))
    sizes = []
    for number in range(8):
        if number == 5:
            scheduler.add_request(request("d", 5, 1), now_s=number)
        output = scheduler.schedule(now_s=number)
        sizes.append(output.num_scheduled_tokens)
        finish(scheduler, output, duration_s=1e-3 * output.num_scheduled_tokens)
    assert sizes[:5] == [8192] * 5
    assert max(sizes[5:]) <= 128


def test_prompts_that_fit_into_a_step_are_not_shortened() -> None:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=4096, long_prompt_step_ms=100.0).resolve("cpu")
    scheduler = Scheduler(config, KVCacheManager(num_blocks=300, block_size=16))
    scheduler.add_request(request("first", 600, 1))
    finish(scheduler, scheduler.schedule(), duration_s=0.06)
    for name in "abcd":
        scheduler.add_request(request(name, 900, 1))
    assert {share.request_id: share.num_tokens for share in scheduler.schedule().scheduled} == dict.fromkeys(
        "abcd", 900
    )


def test_what_counts_as_short_does_not_shrink_below_a_usual_prompt() -> None:
    pace = DecodePace(target_s=0.0, long_step_s=0.5, max_tokens=8192)
    assert pace.max_short_tokens(8192) == 8192  # nothing is known yet
    pace.observe(num_chunk_tokens=1000, num_decodes=1, duration_s=10.0)
    assert pace.max_short_tokens(8192) == 2048
    small = DecodePace(target_s=0.0, long_step_s=0.5, max_tokens=1024)
    small.observe(num_chunk_tokens=1000, num_decodes=1, duration_s=10.0)
    assert small.max_short_tokens(1024) == SHORT_TOKENS
    assert pace.max_short_tokens(100) == 100
    assert pace.long_tokens(1) < 100


PASSED = """\
  0 long:16
  1 long:16
  2 short:4 long:12
  3 short:2* long:14
  4 short:1* long:15
  5 long:16
  6 long:11*
"""
