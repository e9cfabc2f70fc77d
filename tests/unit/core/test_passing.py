"""How long steps with a long prompt may take. Which prompts pass a long one is compared with a brute-force model in
`tests/property`."""

from __future__ import annotations

from headway.config import SchedulerConfig
from headway.core import KVCacheManager, Scheduler
from headway.core.step_time import DecodePace
from tests.unit.core.driver import finish, request


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


def test_what_counts_as_short_does_not_shrink_below_a_usual_prompt() -> None:
    pace = DecodePace(target_s=0.0, long_step_s=0.5, max_tokens=8192)
    assert pace.max_short_tokens(8192) == 8192  # nothing is known yet
    pace.observe(num_chunk_tokens=1000, num_decodes=1, duration_s=10.0)
    assert pace.max_short_tokens(8192) == 2048
    small = DecodePace(target_s=0.0, long_step_s=0.5, max_tokens=1024)
    small.observe(num_chunk_tokens=1000, num_decodes=1, duration_s=10.0)
    assert small.max_short_tokens(1024) == DecodePace.SHORT_TOKENS
    assert pace.max_short_tokens(100) == 100
    assert pace.long_tokens(1) < 100
