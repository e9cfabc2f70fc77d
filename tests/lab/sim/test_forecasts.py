"""The engine's forecasts in simulations: near capacity, in every order of the queue."""

from __future__ import annotations

import pytest

from headway_lab.bench.forecast_errors import ForecastErrors
from headway_lab.sim.calibration import Calibration
from headway_lab.sim.setup import set_up, with_oracle
from headway_lab.sim.simulate import simulate
from headway_lab.workload.workload_file import load_workload


@pytest.mark.parametrize("policy", ["fcfs", "sjf"])
def test_forecasts_near_capacity(policy: str) -> None:
    """Of a cost model with a spread, which the engine learns from its own steps."""
    setup = set_up(Calibration.find("h200-llama31-8b"), {"scheduling_policy": policy})
    work = load_workload("chat_lognormal").draw(seed=1, vocab_size=1000, num_requests=300, rate=80.0)
    done = simulate(with_oracle(work), setup.machine, setup.scheduler, setup.cache, forecasts=True)
    errors = ForecastErrors.of(done.timelines)
    assert errors.num_missing <= 2
    assert errors.percentile(50) < 0.2 and errors.percentile(90) < 0.5


def test_replicas_forecast_what_they_were_chosen_for() -> None:
    """Two of them halve the wait, and each says how long it is there."""
    setup = set_up(Calibration.find("h200-llama31-8b"), {})
    work = load_workload("chat_lognormal").draw(seed=1, vocab_size=1000, num_requests=200, rate=160.0)
    done = simulate(
        work, setup.machine, setup.scheduler, setup.cache, num_replicas=2, router="least-loaded", forecasts=True
    )
    errors = ForecastErrors.of(done.timelines)
    assert errors.num_missing <= 4
    assert errors.percentile(50) < 0.2 and errors.percentile(90) < 0.5
