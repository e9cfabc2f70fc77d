"""The simulator runs the real scheduler: times that can be computed by hand, and the schedule of the engine itself."""

from __future__ import annotations

import dataclasses

import pytest

from headway.config import CacheConfig, SchedulerConfig
from headway.errors import ConfigError
from headway.sim import CostModel, Machine, simulate
from headway.workload.requests import BenchRequest

STEP = CostModel((0.010, *[0.0] * 12))
"""Every step takes 10 ms."""
PER_TOKEN = CostModel((0.0, 0.001, *[0.0] * 11))
"""A millisecond for each token."""
NO_CACHE = CacheConfig(prefix_caching="off")
CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)


def machine(cost: CostModel = STEP, **changes: object) -> Machine:
    return dataclasses.replace(Machine(cost, num_blocks=100, block_size=4, max_model_len=100), **changes)


def work(*requests: tuple[float, int, int]) -> list[BenchRequest]:
    """(arrival, tokens in, tokens out)"""
    return [BenchRequest(range(num_in), num_out, arrival_s=arrival_s) for arrival_s, num_in, num_out in requests]


def test_times_of_one_request() -> None:
    result = simulate(work((1.0, 8, 3)), machine(), CONFIG, NO_CACHE)
    assert result.timelines[0].token_times_s == pytest.approx([1.01, 1.02, 1.03])
    assert (result.num_steps, result.duration_s) == (3, pytest.approx(1.03))
    assert result.busy_s == pytest.approx(0.03)


def test_requests_join_at_the_step_after_their_arrival() -> None:
    result = simulate(work((0.0, 8, 4), (0.015, 8, 2)), machine(), CONFIG, NO_CACHE)
    assert result.timelines[0].token_times_s == pytest.approx([0.01, 0.02, 0.03, 0.04])
    assert result.timelines[1].token_times_s == pytest.approx([0.03, 0.04])


def test_a_step_takes_what_its_tokens_take() -> None:
    result = simulate(work((0.0, 20, 2), (0.0, 10, 2)), machine(PER_TOKEN), CONFIG, NO_CACHE)
    assert result.timelines[0].token_times_s == pytest.approx([0.030, 0.032])
    assert result.timelines[1].token_times_s == pytest.approx([0.030, 0.032])


def test_overlapping_steps_keep_the_device_busy() -> None:
    """With 4 ms of host work before each step: one after the other 14 ms a step, overlapping 10."""
    one = simulate(work((0.0, 4, 20)), machine(host_s=0.004), CONFIG, NO_CACHE)
    two = simulate(work((0.0, 4, 20)), machine(host_s=0.004, overlap=True), CONFIG, NO_CACHE)
    assert one.duration_s == pytest.approx(20 * 0.014)
    assert two.duration_s == pytest.approx(0.004 + 20 * 0.010)


def test_static_batching_waits_for_the_slowest_and_reserves_memory() -> None:
    requests = work((0.0, 4, 2), (0.0, 4, 10), (0.0, 4, 2))
    config = dataclasses.replace(CONFIG, max_num_seqs=2, batching="static")
    reserved = CacheConfig(prefix_caching="off", kv_allocation="contiguous-max")
    result = simulate(requests, machine(num_blocks=50), config, reserved)
    assert result.timelines[0].token_times_s == pytest.approx([0.01, 0.02])
    assert result.timelines[2].token_times_s == pytest.approx([0.11, 0.12])
    assert max(result.num_running) == 2
    assert min(result.waste) > 0.85, "25 blocks for each, of which few are used"
    paged = simulate(requests, machine(num_blocks=50), CONFIG, NO_CACHE)
    assert paged.timelines[2].token_times_s == pytest.approx([0.01, 0.02])
    assert max(paged.waste) < 0.4


def test_a_dynamic_batch_waits_for_its_window() -> None:
    config = dataclasses.replace(CONFIG, batching="dynamic", batch_window_ms=30.0)
    result = simulate(work((0.0, 4, 1), (0.02, 4, 1)), machine(), config, NO_CACHE)
    assert result.timelines[0].token_times_s == result.timelines[1].token_times_s
    assert result.timelines[0].token_times_s[0] == pytest.approx(0.04, abs=0.006)


def test_prefixes_are_shared_as_in_the_engine() -> None:
    requests = [BenchRequest([1] * 40, 1), BenchRequest([1] * 40, 1, arrival_s=1.0)]
    result = simulate(requests, machine(PER_TOKEN), CONFIG)
    first, second = (timeline.ttft_s for timeline in result.timelines)
    assert first == pytest.approx(0.040)
    assert second == pytest.approx(0.004), "all blocks but the last are in the cache"


def test_several_answers_are_refused() -> None:
    with pytest.raises(ConfigError, match="one answer"):
        simulate([BenchRequest([1], 1, num_choices=2)], machine(), CONFIG)
