"""Measuring trials: each on an engine of its own with the trial's options, which is shut down afterwards."""

from __future__ import annotations

from headway.config import EngineConfig
from headway.engine.llm_engine import LLMEngine
from headway.executor.fake import FakeExecutor
from headway.lab.tune import Goal, Space
from headway.lab.tune.trial import simulate_trial
from headway.lab.tune.verify import verify
from headway.lab.workload.requests import BenchRequest
from tests.unit.lab.sim.machines import calibration
from tests.unit.no_model import nominal_config, nominal_plan


def test_a_trial_is_measured_with_its_options() -> None:
    made: list[LLMEngine] = []

    def load(config: EngineConfig) -> LLMEngine:
        made.append(
            LLMEngine(
                config.resolve("cpu"),
                executor=FakeExecutor(),
                tokenizer=None,
                model_config=nominal_config(vocab_size=100, max_model_len=256),
                plan=nominal_plan(num_blocks=200, block_size=4, max_model_len=256),
            )
        )
        return made[-1]

    work = [BenchRequest([1] * 10, 5, arrival_s=0.001 * place) for place in range(20)]
    work.append(BenchRequest([1] * 20, 2, after=0, think_s=0.001))
    goal = Goal.parse(["p99_ttft_ms=60000"])
    space = Space.of(calibration(), work, {})
    trial = simulate_trial(space, goal, {**space.default, "max_num_seqs": 4, "scheduling_policy": "mlfq"}, work)
    one = verify(trial, work, goal, options={"enable_prefix_caching": False}, load=load, temperature=1.0)
    assert one.trial is trial
    assert (one.metrics.num_completed, one.metrics.num_lost) == (21, 0)
    assert one.score.good_share == 1.0
    config = made[0].config
    assert (config.scheduler.max_num_seqs, config.scheduler.scheduling_policy) == (4, "mlfq")
    assert config.cache.enable_prefix_caching is False
    assert not made[0].has_unfinished_requests()
