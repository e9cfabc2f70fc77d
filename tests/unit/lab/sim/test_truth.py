"""The whole way, without a machine's moods: an engine on a virtual clock is calibrated and then checked.

Its steps take what no cost model of ours says exactly: rows cost in eights, tokens in tiles. So what is left are the
errors of the fit and of the simulation, and they have to be as small as promised.
"""

from __future__ import annotations

import dataclasses
import random

import pytest

from headway.config import EngineConfig
from headway.core import SchedulerOutput
from headway.engine.llm_engine import LLMEngine
from headway.executor.simulated import SimulatedExecutor, VirtualClock
from headway.lab.sim.calibrate import calibrate
from headway.lab.sim.check import capacity, check
from headway.lab.sim.step_work import StepWork
from headway.lab.workload.requests import BenchRequest
from tests.unit.no_model import nominal_config, nominal_plan


def step_s(output: SchedulerOutput) -> float:
    work = StepWork.of(output)
    read_s = 2.5e-8 * work.num_context_tokens
    if not work.num_chunks:
        return 0.006 + 0.00006 * 8 * -(-work.num_rows // 8) + read_s
    num_tile_tokens = 128 * -(-work.num_tokens // 128)
    return 0.009 + 2.2e-5 * max(num_tile_tokens - 192, 0) + read_s + 1.2e-9 * work.num_chunk_pairs


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("load", [0.5, 0.9])
def test_a_simulation_is_as_good_as_promised(max_in_flight: int, load: float) -> None:
    clock = VirtualClock()
    executor = SimulatedExecutor(step_s, clock, max_in_flight=max_in_flight, host_s=lambda num_rows: 0.0004)
    plan = nominal_plan(num_blocks=2000, block_size=64, max_model_len=4096)
    engine = LLMEngine(
        EngineConfig.from_options(max_num_seqs=64, max_num_batched_tokens=2048, target_itl_ms=20.0).resolve("cpu"),
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
    rate = load * capacity(engine, found, work)
    arrival_s = 0.0
    for place, request in enumerate(work):
        arrival_s += rng.expovariate(rate)
        work[place] = dataclasses.replace(request, arrival_s=arrival_s)
    done = check(
        engine,
        found,
        work,
        name="lognormal",
        rate=rate,
        load=load,
        temperature=1.0,
        now=clock.now,
        sleep=lambda seconds: clock.sleep(seconds + 1e-6),  # a sum of floats may fall short of the time that is due
    )
    missed = {row.key: round(row.error, 3) for row in done.rows if row.is_within is False}
    assert not missed
