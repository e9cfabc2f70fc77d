"""What `fair` promises, on a simulated device: beside a tenant that sends ten times as much, another one within its
share fares as if it were alone on a machine of half the speed."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import pytest

from headway.config import CacheConfig, SchedulerConfig
from headway.core.request_options import RequestOptions
from headway.lab.bench.times import RequestTimeline
from headway.lab.sim import CostModel, Machine, simulate
from headway.lab.workload.requests import BenchRequest

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
    )
    return simulate(work, machine, config, CacheConfig(prefix_caching="off")).timelines


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
