"""The simulator runs the real scheduler: times that can be computed by hand, and the schedule of the engine itself.

What `fair` promises, on a simulated device: beside a tenant that sends ten times as much, another one within its
share fares as if it were alone on a machine of half the speed.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Sequence

import pytest

from headway.config import CacheConfig, SchedulerConfig
from headway.core.request_options import RequestOptions
from headway.core.utilisation import Utilisation
from headway.errors import ConfigError
from headway.models.costs import ModelCosts
from headway.worker.ceilings import Ceilings
from headway_lab.bench.timelines import RequestTimeline
from headway_lab.sim import CostModel, HostTime, Machine, simulate
from headway_lab.workload.bench_requests import BenchRequest

STEP = CostModel.of_terms(decode_constant=0.010, chunk_constant=0.010)
"""Every step takes 10 ms."""
PER_TOKEN = CostModel.of_terms(rows_over_0=0.001, tokens_over_0=0.001)
"""A millisecond for each token."""
NO_CACHE = CacheConfig(enable_prefix_caching=False).resolve("cpu")
CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64).resolve("cpu")


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
    assert [(sample.at_s, sample.num_running) for sample in result.samples] == [
        *((pytest.approx(1.01), 1), (pytest.approx(1.02), 1), (pytest.approx(1.03), 0))
    ]


def test_requests_join_at_the_step_after_their_arrival() -> None:
    result = simulate(work((0.0, 8, 4), (0.015, 8, 2)), machine(), CONFIG, NO_CACHE)
    assert result.timelines[0].token_times_s == pytest.approx([0.01, 0.02, 0.03, 0.04])
    assert result.timelines[1].token_times_s == pytest.approx([0.03, 0.04])


def test_overlapping_steps_keep_the_device_busy() -> None:
    """With 4 ms of host work before each step: one after the other 14 ms a step, overlapping 10."""
    one = simulate(work((0.0, 4, 20)), machine(host=HostTime(before_s=0.004)), CONFIG, NO_CACHE)
    two = simulate(work((0.0, 4, 20)), machine(host=HostTime(before_s=0.004), overlap=True), CONFIG, NO_CACHE)
    assert one.duration_s == pytest.approx(20 * 0.014)
    assert two.duration_s == pytest.approx(0.004 + 20 * 0.010)


def test_tokens_are_out_when_the_host_has_handed_them_out() -> None:
    """2 ms after each step and 1 ms for each of two requests; overlapping, the device does not wait for that."""
    host = HostTime(after_s=0.002, after_row_s=0.001)
    one = simulate(work((0.0, 4, 3), (0.0, 4, 3)), machine(host=host), CONFIG, NO_CACHE)
    two = simulate(work((0.0, 4, 3), (0.0, 4, 3)), machine(host=host, overlap=True), CONFIG, NO_CACHE)
    assert one.timelines[0].token_times_s == pytest.approx([0.014, 0.028, 0.042])
    assert two.timelines[0].token_times_s == pytest.approx([0.014, 0.024, 0.034])


def test_static_batching_waits_for_the_slowest_and_reserves_memory() -> None:
    requests = work((0.0, 4, 2), (0.0, 4, 10), (0.0, 4, 2))
    config = dataclasses.replace(CONFIG, max_num_seqs=2, batching="static")
    reserved = CacheConfig(enable_prefix_caching=False, kv_allocation="contiguous-max").resolve("cpu")
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
    turns = [BenchRequest(list(range(40)), 1), BenchRequest([*range(40), *range(100, 120)], 1, after=0)]
    result = simulate(turns, machine(PER_TOKEN), CONFIG)
    assert (result.timelines[1].ttft_s, result.num_hit_tokens) == (pytest.approx(0.020), 40)
    with pytest.raises(ConfigError, match="one answer"):
        simulate([BenchRequest([1], 1, num_choices=2)], machine(), CONFIG)


def test_steps_spread_as_they_did_when_measured() -> None:
    """Half of the steps take 0.5 of the mean, half 1.5; the same seed gives the same steps, and none gives the mean."""
    uneven = dataclasses.replace(STEP, spread=(0.5, 0.5, 1.5, 1.5))
    requests = work((0.0, 4, 60))

    def gaps(seed: int | None) -> list[float]:
        return simulate(requests, machine(uneven), CONFIG, NO_CACHE, seed=seed).timelines[0].itls_s

    assert gaps(0) == gaps(0) != gaps(1)
    assert {round(gap, 3) for gap in gaps(None)} == {0.010}
    assert min(gaps(0)) == pytest.approx(0.005) and max(gaps(0)) == pytest.approx(0.015)
    assert sum(gaps(0)) == pytest.approx(0.59, rel=0.2)


def test_the_machine_may_be_slower_at_times() -> None:
    result = simulate(work((0.0, 4, 4)), machine(), CONFIG, NO_CACHE, speed=lambda now_s: 3.0 if now_s >= 0.02 else 1.0)
    assert result.timelines[0].token_times_s == pytest.approx([0.01, 0.02, 0.05, 0.08])


def test_turns_of_a_conversation_follow_each_other() -> None:
    requests = [
        BenchRequest(range(8), 3, arrival_s=1.0),
        BenchRequest(range(16), 2, after=0, think_s=0.5),
        BenchRequest(range(24), 1, arrival_s=9.0, after=1, think_s=0.5),
    ]
    result = simulate(requests, machine(), CONFIG, NO_CACHE)
    first, second, third = result.timelines
    assert first.token_times_s[-1] == pytest.approx(1.03)
    assert second.arrival_s == pytest.approx(1.53)
    assert second.token_times_s == pytest.approx([1.54, 1.55])
    assert (third.arrival_s, third.token_times_s) == (9.0, pytest.approx([9.01])), "not before its own time"


def test_replicas_work_side_by_side() -> None:
    """Four requests that are alone on their replica take as long as one; and no request is lost or served twice."""
    requests = work(*[(0.0, 8, 3)] * 4)
    config = dataclasses.replace(CONFIG, max_num_seqs=1)
    one = simulate(requests, machine(), config, NO_CACHE)
    four = simulate(requests, machine(), config, NO_CACHE, num_replicas=4)
    assert one.duration_s == pytest.approx(0.12)
    assert four.duration_s == pytest.approx(0.03)
    assert four.num_routed == [1, 1, 1, 1]
    assert all(timeline.is_complete for timeline in four.timelines)


def test_the_least_loaded_replica_is_seen_as_it_is_at_the_time_of_arrival() -> None:
    """The long request keeps the first replica busy; both short ones go to the second, also the one that comes while
    the second is in the middle of a step."""
    requests = work((0.0, 8, 50), (0.001, 8, 2), (0.025, 8, 2))
    result = simulate(requests, machine(), CONFIG, NO_CACHE, num_replicas=2, router="least-loaded")
    assert result.num_routed == [1, 2]
    assert result.timelines[2].token_times_s == pytest.approx([0.035, 0.045])


LARGE_GPU = CostModel.of_terms(
    decode_constant=4e-3,
    rows_over_0=2e-6,
    chunk_constant=4e-3,
    sampled=2e-6,
    tokens_over_128=2.3e-5,
    context=3e-8,
    chunk_pairs=1.5e-10,
    moved_blocks=3e-6,
)
TOP_RATE = 35.0
"""About how many of these requests it can serve in a second."""


def replayed(work: Sequence[BenchRequest], *, policy: str, speed: float = 1.0) -> list[RequestTimeline]:
    machine = Machine(LARGE_GPU.scaled(1 / speed), num_blocks=4096, block_size=64, max_model_len=4096, overlap=True)
    config = SchedulerConfig(
        max_num_seqs=256, max_num_batched_tokens=8192, target_itl_ms=20.0, scheduling_policy=policy
    ).resolve("cpu")
    return simulate(work, machine, config, CacheConfig(enable_prefix_caching=False).resolve("cpu")).timelines


def requests(tenant: str, rate: float, count: int, seed: int) -> list[BenchRequest]:
    rng, now_s, work = random.Random(seed), 0.0, []
    for _ in range(count):
        now_s += rng.expovariate(rate)
        prompt, num_out = range(rng.randint(200, 1200)), rng.randint(50, 250)
        work.append(BenchRequest(prompt, num_out, arrival_s=now_s, options=RequestOptions(tenant=tenant)))
    return work


def mean_s(timelines: Sequence[RequestTimeline]) -> float:
    return statistics.fmean(timeline.e2e_s for timeline in timelines)


@pytest.mark.parametrize("load", [0.25, 0.8])
def test_a_tenant_that_sends_ten_times_as_much_does_not_take_anothers_share(load: float) -> None:
    rate = load * TOP_RATE / 2
    own, heavy = requests("own", rate, 80, seed=0), requests("heavy", 10 * rate, 800, seed=1)
    both = sorted([*own, *heavy], key=lambda one: one.arrival_s)
    at_its_share_s = mean_s(replayed(own, policy="fcfs", speed=0.5))
    timelines = replayed(both, policy="fair")
    beside_s = mean_s([timeline for one, timeline in zip(both, timelines) if one.options.tenant == "own"])
    assert beside_s <= 1.3 * at_its_share_s


def test_the_batch_is_seen_empty_while_there_is_nothing_to_do() -> None:
    """However many steps lie before: samples of them are thinned, those of an idle machine are not."""
    result = simulate(work(*[(10.0 * number, 1, 90) for number in range(50)]), machine(), CONFIG, NO_CACHE)
    assert result.num_steps > 4_000  # more than samples are kept
    idle = [sample.at_s for sample in result.samples if sample.num_running == 0]
    assert idle == [timeline.token_times_s[-1] for timeline in result.timelines]


def test_the_device_is_used_as_steps_by_hand_say() -> None:
    """Two requests of 10 tokens get 5 each: a step for both prompts, and four that decode."""
    costs = ModelCosts(1e9, 1e3, 2e9, 1e3, 1e6, 1e8)
    cost = CostModel.of_terms(decode_constant=0.01, chunk_constant=0.02)
    machine = Machine(cost, 100, 16, 1000, costs=costs, ceilings=Ceilings(1e12, 1e13))
    work = [BenchRequest([0] * 10, 5) for _ in range(2)]
    done = simulate(work, machine, SchedulerConfig().resolve("cpu"), seed=None)
    used = done.utilisation
    assert used is not None
    assert used.device_busy_s == pytest.approx(done.busy_s) == pytest.approx(0.06)
    assert used.read_bytes == 5 * 1e9 + 1e3 * (20 + 2 * (11 + 12 + 13 + 14))
    assert used.flops == 28 * 2e9 + 1e3 * 2 * (55 + 11 + 12 + 13 + 14) + 10 * 1e6
    assert Utilisation.of(used).bandwidth == pytest.approx(5.00012e-3 / 0.06)
    unknown = simulate(work, dataclasses.replace(machine, costs=None), SchedulerConfig().resolve("cpu"), seed=None)
    assert unknown.utilisation is None and unknown.duration_s == done.duration_s
