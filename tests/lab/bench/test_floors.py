"""Floors against a step-by-step count, and against numbers worked out elsewhere for an H200."""

from __future__ import annotations

import random

import pytest

from headway.loader.builtin_shapes import BUILTIN_SHAPES
from headway.models.costs import ModelCosts, model_costs
from headway.models.hf_config import config_from_hf
from headway.worker.ceilings import Ceilings
from headway_lab.bench.floors import count_decode_steps, timeline_alone, work_floor
from headway_lab.bench.offline_bench import SCENARIOS
from headway_lab.bench.timelines import RoundTimes
from headway_lab.workload.bench_requests import BenchRequest

COPY_BANDWIDTH = 4.3e12
LINEAR_BANDWIDTH_AT_64 = 3.5e12
"""What a linear layer of 64 rows reads there."""
MATMUL_RATE = 780e12


def shape_costs(shape: str) -> ModelCosts:
    model = config_from_hf(BUILTIN_SHAPES[shape], shape)
    return model_costs(model, bytes_per_weight=2, kv_bytes_per_token=model.kv_bytes_per_token(2))


def floor_times(shape: str, scenario: str, bandwidth: float = COPY_BANDWIDTH) -> RoundTimes:
    work = SCENARIOS[scenario].draw(0, 151_936)
    return work_floor(work, shape_costs(shape), Ceilings(bandwidth, MATMUL_RATE), max_num_seqs=256).times


@pytest.mark.parametrize(
    ("shape", "scenario", "measure", "value"),
    [
        ("qwen3-0.6b", "b1", "pace_s", 0.28e-3),
        ("llama31-8b", "b1", "pace_s", 3.7e-3),
        ("qwen3-0.6b", "b64", "output_tok_s", 80_000),
        ("llama31-8b", "b64", "output_tok_s", 14_070),
        ("qwen3-0.6b", "nano", "elapsed_s", 3.6),
        ("llama31-8b", "nano", "elapsed_s", 10.5),
        ("qwen3-0.6b", "prefill", "input_tok_s", 700_000),
        ("llama31-8b", "prefill", "input_tok_s", 50_000),
    ],
)
def test_floors_of_scenarios(shape: str, scenario: str, measure: str, value: float) -> None:
    assert getattr(floor_times(shape, scenario), measure) == pytest.approx(value, rel=0.1)
    if (shape, scenario) == ("llama31-8b", "b64"):
        # The 11,100 known for this shape follow from the bandwidth of a linear layer of 64 rows, not of a copy.
        slower = floor_times(shape, scenario, LINEAR_BANDWIDTH_AT_64)
        assert slower.output_tok_s == pytest.approx(11_100, rel=0.1)


@pytest.mark.parametrize("max_num_seqs", [1, 3, 50])
def test_decode_steps_equal_those_counted_one_by_one(max_num_seqs: int) -> None:
    rng = random.Random(max_num_seqs)
    work = [BenchRequest([0] * rng.randint(1, 9), rng.randint(1, 12), rng.randint(1, 2)) for _ in range(20)]
    waiting = [(r.num_prompt_tokens, r.num_output_tokens - 1) for r in work for _ in range(r.num_choices)]
    waiting = [pair for pair in waiting if pair[1]]
    running: list[tuple[int, int]] = []
    num_steps = num_cached_tokens = 0
    while waiting or running:
        while waiting and len(running) < max_num_seqs:
            running.append(waiting.pop(0))
        running = [(cached + 1, left - 1) for cached, left in running]
        num_steps += 1
        num_cached_tokens += sum(cached for cached, _ in running)
        running = [pair for pair in running if pair[1]]
    steps = count_decode_steps(work, max_num_seqs)
    assert (steps.num_steps, steps.num_cached_tokens) == (num_steps, num_cached_tokens)


def test_alone_on_the_machine_a_request_takes_its_own_floor() -> None:
    costs, ceilings = shape_costs("qwen3-0.6b"), Ceilings(COPY_BANDWIDTH, MATMUL_RATE)
    request = BenchRequest([0] * 2000, 9, arrival_s=4.0)
    timeline = timeline_alone(request, costs, ceilings)
    floor = work_floor([request], costs, ceilings, max_num_seqs=1)
    assert timeline.is_complete
    assert timeline.ttft_s == pytest.approx(floor.prefill_s)
    assert timeline.e2e_s == pytest.approx(floor.times.elapsed_s)
    short = timeline_alone(BenchRequest([0], 1), costs, ceilings)
    assert short.ttft_s == pytest.approx(costs.weight_bytes / COPY_BANDWIDTH)
