"""Calibrating and checking an engine whose steps take what we say, as far as a busy machine lets them."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import pytest

from headway.config import EngineConfig
from headway.core.request_options import RequestOptions
from headway.core.scheduler_output import SchedulerOutput
from headway.engine.llm_engine import LLMEngine
from headway.executor.fake import FakeExecutor, FakeStep
from headway_lab.sim.calibration_run import WaveLimits, calibrate, waves
from headway_lab.sim.cost_model import STEP_KINDS
from headway_lab.sim.sim_accuracy import apart, at_once, check, rate_at_once
from headway_lab.sim.sim_report import calibration_facts, checks_markdown, error_table, fit_rows, trust_notes
from headway_lab.sim.step_timing import metered
from headway_lab.workload.bench_requests import BenchRequest
from tests.lab.noted_meter import NotedMeter
from tests.unit.no_model import nominal_config, nominal_plan

STEP_S, TOKEN_S = 0.001, 0.00001


class SlowExecutor(FakeExecutor):
    """A millisecond for a step and 10 µs for each token."""

    def submit(self, output: SchedulerOutput) -> FakeStep:
        until_s = time.perf_counter() + STEP_S + TOKEN_S * output.num_scheduled_tokens
        step = super().submit(output)
        while time.perf_counter() < until_s:
            pass
        return step


def make_engine(**options: Any) -> LLMEngine:
    return LLMEngine(
        EngineConfig.from_options(max_num_seqs=16, max_num_batched_tokens=128, **options).resolve("cpu"),
        executor=SlowExecutor(),
        tokenizer=None,
        model_config=nominal_config(vocab_size=100, max_model_len=256),
        plan=nominal_plan(num_blocks=256, block_size=8, max_model_len=256),
    )


def test_it_finds_what_steps_cost_and_leaves_the_engine_as_it_was() -> None:
    engine = make_engine()
    plain = engine.core.executor
    parts: list[float] = []
    found = calibrate(engine, model="none at all", seconds=1.5, progress=NotedMeter(parts))
    assert engine.core.executor is plain
    assert not engine.has_unfinished_requests()
    engine.check_invariants()
    assert parts == sorted(parts) and parts[-1] <= 1.0
    assert {error.kind for error in found.cost.errors} <= set(STEP_KINDS)
    assert found.cost.num_steps > 100
    assert (found.num_blocks, found.block_size, found.max_model_len, found.overlap) == (256, 8, 256, False)
    assert found.scheduler["max_num_seqs"] == 16
    # Other processes only make steps longer.
    from headway.core.step_work import StepWork

    assert found.cost.seconds(StepWork(100, 1, 1, 0, 1, 5000.0)) >= 0.8 * (STEP_S + 100 * TOKEN_S)
    assert found.cost.seconds(StepWork(8, 8, 8, 80)) >= 0.8 * (STEP_S + 8 * TOKEN_S)
    assert found.host.before_s >= 0.0 and found.host.after_s >= 0.0
    assert "none at all" in calibration_facts(found)["model"]
    assert len(fit_rows(found)[1]) == len(found.cost.errors)


def test_the_meter_parts_the_host_from_the_device() -> None:
    engine = make_engine()
    from headway.sampling_params import SamplingParams

    with metered(engine) as meter:
        engine.add_request("a", [1] * 20, SamplingParams(max_tokens=5, ignore_eos=True, detokenize=False))
        started_s = time.perf_counter()
        while engine.has_unfinished_requests():
            meter.step()
        elapsed_s = time.perf_counter() - started_s
    first, *others = meter.samples
    assert (first.work.num_tokens, first.before_s) == (20, None), "nothing ran before it"
    assert len(others) == 4
    total_s = 0.0
    for sample in others:
        assert sample.before_s is not None and sample.after_s is not None
        assert sample.duration_s >= STEP_S
        total_s += sample.before_s + sample.duration_s + sample.after_s
    assert total_s <= 1.01 * elapsed_s


def test_a_check_runs_both_and_says_how_far_they_are_apart() -> None:
    engine = make_engine()
    found = calibrate(engine, seconds=1.0)
    rng = random.Random(0)
    work = [BenchRequest([1] * rng.randint(2, 60), rng.randint(2, 12), arrival_s=0.004 * i) for i in range(40)]
    done = check(engine, found, work, name="some work", rate=250.0, load=0.5, temperature=1.0)
    assert done.measured.num_completed == done.simulated.num_completed == 40
    assert done.measured.num_output_tokens == done.simulated.num_output_tokens
    assert done.speed > 0.0
    assert {"mean_ttft_ms", "p99_itl_ms", "output_throughput"} <= {row.key for row in done.rows}
    assert rate_at_once(engine, found, work) > 0.0
    titles, rows = error_table(done)
    assert all(len(row) == len(titles) for row in rows)
    page = checks_markdown(found, [done])
    assert "some work: 40 requests, 250 requests/s, 50% of capacity" in page
    assert done.as_json()["errors"]["mean_ttft_ms"]["tolerance"] == 0.10
    assert any("sim-check" in note for note in trust_notes(found))
    salted = BenchRequest([1], 1, options=RequestOptions(cache_salt="x"), arrival_s=2.0, think_s=1.0)
    assert [r.options.cache_salt for r in apart([work[0], salted], "run")] == ["run/", "run/x"], "no cache between runs"
    assert [(r.arrival_s, r.think_s) for r in at_once([salted])] == [(0.0, 0.0)]


@pytest.mark.parametrize("num_prompt_tokens", [32, 5_000])
def test_waves_fit_the_engine(num_prompt_tokens: int) -> None:
    limits = WaveLimits(max_num_seqs=16, max_model_len=256, num_cache_tokens=2_000, num_prompt_tokens=num_prompt_tokens)
    for wave in itertools.islice(waves(limits, random.Random(0)), 60):
        assert 1 <= len(wave) <= 16
        assert all(r.num_prompt_tokens >= 1 and r.num_prompt_tokens + r.num_output_tokens <= 256 for r in wave)
        assert len(wave) == 1 or sum(r.num_prompt_tokens + r.num_output_tokens for r in wave) <= 2_000
    drawn = [list(itertools.islice(waves(limits, random.Random(1)), 9)) for _ in range(2)]
    assert drawn[0] == drawn[1]
