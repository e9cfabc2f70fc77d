"""The arithmetic of simulated against measured.

The whole way, without a machine's moods: an engine on a virtual clock is calibrated and then checked.

Its steps take what no cost model of ours says exactly: rows cost in eights, tokens in tiles. So what is left are the
errors of the fit and of the simulation, and they have to be as small as promised.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from headway.config import EngineConfig
from headway.core import SchedulerOutput
from headway.core.step_work import StepWork
from headway.engine.llm_engine import LLMEngine
from headway.executor.simulated import SimulatedExecutor, VirtualClock
from headway_lab.bench.online_metrics import OnlineMetrics
from headway_lab.bench.timelines import RequestTimeline
from headway_lab.sim.calibration_run import calibrate
from headway_lab.sim.sim_accuracy import Check, ErrorRow, check, error_rows, percent_text, rate_at_once
from headway_lab.sim.step_timing import WINDOW_S, SpeedProfile, StepSample
from headway_lab.workload.bench_requests import BenchRequest
from tests.lab.sim.machines import small_cost
from tests.unit.no_model import nominal_config, nominal_plan


def metrics(ttft_s: float, gap_s: float, duration_s: float) -> OnlineMetrics:
    times = [ttft_s, ttft_s + gap_s, ttft_s + 2 * gap_s]
    return OnlineMetrics.of([RequestTimeline(0.0, 10, 3, times)], duration_s)


def test_errors_are_relative_to_what_was_measured() -> None:
    rows = {
        row.key: row for row in error_rows(metrics(1.0, 0.1, 2.0), metrics(1.05, 0.08, 2.5), metrics(1.0, 0.1, 2.0))
    }
    assert rows["mean_ttft_ms"].error == pytest.approx(0.05)
    assert rows["mean_tpot_ms"].error == pytest.approx(-0.2)
    assert rows["output_throughput"].error == pytest.approx(2.0 / 2.5 - 1)
    assert rows["mean_tpot_ms"].error_at_measured_speed == pytest.approx(0.0)

    assert ErrorRow("mean_ttft_ms", 100.0, 109.9).is_within is True
    assert ErrorRow("mean_ttft_ms", 100.0, 89.0).is_within is False
    assert ErrorRow("output_throughput", 100.0, 94.0).is_within is False
    assert ErrorRow("p99_itl_ms", 100.0, 119.0).is_within is True
    assert ErrorRow("p50_ttft_ms", 100.0, 500.0).is_within is None
    assert [percent_text(value) for value in (0.0512, -0.3, None, math.nan)] == ["+5.1%", "-30.0%", "", ""]


def test_nothing_measured() -> None:
    assert ErrorRow("mean_ttft_ms", 0.0, 0.0).error == 0.0
    assert math.isnan(ErrorRow("mean_ttft_ms", 0.0, 1.0).error)
    assert ErrorRow("mean_ttft_ms", 0.0, 1.0).as_json()["error"] is None
    lonely = OnlineMetrics.of([RequestTimeline(0.0, 10, 1, [1.0])], 1.0)
    assert "mean_tpot_ms" not in {row.key for row in error_rows(lonely, lonely)}, "a single token has no gaps"


def test_a_machine_that_is_slower_for_a_while() -> None:
    cost = small_cost()
    work = StepWork(1, 1, 1, 1)
    usual_s = cost.seconds(work)
    factors = {0: 1.0, 1: 2.0, 3: 4.0}  # nothing ran in window 2
    samples = [
        StepSample(work, factor * usual_s, None, None, at_s=100.0 + (window + 0.5) * WINDOW_S)
        for window, factor in factors.items()
    ]
    profile = SpeedProfile.of(cost, samples, started_s=100.0)
    assert profile.factors == pytest.approx([1.0, 2.0, 2.0, 4.0])
    assert profile.overall == pytest.approx(7 / 3)
    assert [profile.at(at_s) for at_s in (0.0, 1.5 * WINDOW_S, 99.0)] == pytest.approx([1.0, 2.0, 4.0])
    assert SpeedProfile.of(cost, [], started_s=0.0).at(5.0) == 1.0


def step_s(output: SchedulerOutput, *, has_model: bool) -> float:
    work = StepWork.of(output)
    drafts = [len(share.drafts) for share in output.scheduled]
    drafted_s = 0.0011 * max(drafts, default=0) if has_model else 0.0
    return drafted_s + plain_step_s(work) - 2e-5 * sum(drafts)  # a guess costs less than a row of another request


def plain_step_s(work: StepWork) -> float:
    read_s = 2.5e-8 * work.num_context_tokens
    if not work.num_chunks:
        return 0.006 + 0.00006 * 8 * -(-work.num_rows // 8) + read_s
    num_tile_tokens = 128 * -(-work.num_tokens // 128)
    return 0.009 + 2.2e-5 * max(num_tile_tokens - 192, 0) + read_s + 1.2e-9 * work.num_chunk_pairs


class Run(NamedTuple):
    """An engine on a virtual clock, and the load of the check; with an infinite one all requests come at once."""

    load: float
    max_in_flight: int = 1
    options: Mapping[str, Any] = {}
    acceptance: float = 0.0


RUNS = {
    "one after the other": Run(0.9),
    "overlapping": Run(0.5, max_in_flight=2),
    "a backlog": Run(math.inf),
    "made-up guesses": Run(0.9, options={"speculation": "ngram", "spec_synthetic_acceptance": 2.5}),
    "a draft model": Run(0.7, options={"speculation": "draft", "draft_model": "small"}, acceptance=0.8),
    "a draft model, a backlog": Run(math.inf, options={"speculation": "draft", "draft_model": "small"}, acceptance=0.8),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=list(RUNS))
def test_a_simulation_is_as_good_as_promised(run: Run) -> None:
    missed = {row.key: round(row.error, 3) for row in checked(run).rows if row.is_within is False}
    assert not missed


def checked(run: Run) -> Check:
    """Calibrate an engine on a virtual clock, and check a simulation of 200 requests."""
    clock = VirtualClock()
    config = EngineConfig.from_options(
        max_num_seqs=64, max_num_batched_tokens=2048, target_itl_ms=20.0, **run.options
    ).resolve("cpu")
    executor = SimulatedExecutor(
        functools.partial(step_s, has_model=config.scheduler.speculation == "draft"),
        clock,
        max_in_flight=run.max_in_flight,
        host_s=lambda num_rows: 0.0004,
        acceptance=config.scheduler.synthetic_chance or run.acceptance,
        verifies_ahead=config.scheduler.speculation != "draft",
    )
    plan = nominal_plan(num_blocks=2000, block_size=64, max_model_len=4096)
    engine = LLMEngine(
        config,
        executor=executor,
        tokenizer=None,
        model_config=nominal_config(vocab_size=1000, max_model_len=4096),
        plan=dataclasses.replace(plan, device="virtual"),
        now=clock.now,
    )
    found = calibrate(engine, seconds=20.0, now=clock.now)
    rng = random.Random(1)
    lengths = [
        (min(int(rng.lognormvariate(5.8, 1.0)) + 1, 2000), min(int(rng.lognormvariate(4.0, 0.8)) + 2, 400))
        for _ in range(200)
    ]
    work = [BenchRequest([rng.randint(0, 999) for _ in range(num_in)], num_out) for num_in, num_out in lengths]
    rate = None if math.isinf(run.load) else run.load * rate_at_once(engine, found, work)
    arrival_s = 0.0
    for place, request in enumerate(work):
        arrival_s += rng.expovariate(rate) if rate is not None else 0.0
        work[place] = dataclasses.replace(request, arrival_s=arrival_s)
    return check(
        engine,
        found,
        work,
        name="lognormal",
        rate=rate,
        load=run.load,
        temperature=1.0,
        now=clock.now,
        sleep=lambda seconds: clock.sleep(seconds + 1e-6),  # a sum of floats may fall short of the time that is due
    )
