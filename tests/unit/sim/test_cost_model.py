"""The cost model finds the costs it was made from, never shrinks with more work, and survives being saved."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from headway.core import ScheduledRequest, SchedulerOutput
from headway.core.scheduler_output import BlockMoves
from headway.errors import ConfigError
from headway.sim import CostModel, StepWork


def random_work(rng: random.Random) -> StepWork:
    num_rows = rng.choice([1, 3, 17, 64])
    num_tokens = num_rows + rng.choice([0, 0, 10, 300, 2000])
    return StepWork(
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_context_tokens=rng.randint(0, 50_000),
        num_chunk_pairs=rng.uniform(0, 1e6) if num_tokens > num_rows else 0.0,
        num_moved_blocks=rng.choice([0, 0, 5]),
    )


def true_seconds(work: StepWork) -> float:
    tokens = 5e-6 * work.num_tokens + 2e-5 * max(work.num_tokens - 256, 0)
    return 4e-3 + tokens + 3e-8 * work.num_context_tokens + 1e-9 * work.num_chunk_pairs + 1e-4 * work.num_moved_blocks


def measured(num_steps: int, noise: float = 0.0) -> list[tuple[StepWork, float]]:
    rng = random.Random(0)
    works = [random_work(rng) for _ in range(num_steps)]
    return [(work, true_seconds(work) * rng.uniform(1 - noise, 1 + noise)) for work in works]


def test_it_finds_the_costs_it_was_made_from() -> None:
    model = CostModel.fit(measured(400))
    assert model.mean_error < 0.001
    for work, seconds in measured(50):
        assert model.seconds(work) == pytest.approx(seconds, rel=0.01)


def test_the_error_says_how_noisy_the_steps_were() -> None:
    assert 0.03 < CostModel.fit(measured(400, noise=0.1)).mean_error < 0.08


def test_more_work_never_takes_less_time() -> None:
    model = CostModel.fit(measured(200, noise=0.3))
    assert all(coefficient >= 0.0 for coefficient in model.coefficients)


def test_the_work_of_a_planned_step() -> None:
    output = SchedulerOutput(
        step_id=0,
        new_requests=(),
        scheduled=(
            ScheduledRequest("decode", 1, 99, (), True),
            ScheduledRequest("chunk", 10, 20, (), False),
        ),
        preempted_request_ids=(),
        finished_request_ids=(),
        num_scheduled_tokens=11,
        moves=BlockMoves(moved_out=((1, 1),), copied=(), moved_in=((2, 2), (3, 3))),
    )
    work = StepWork.of(output)
    assert work == StepWork(
        num_tokens=11, num_rows=2, num_context_tokens=100, num_chunk_pairs=250.0, num_moved_blocks=3
    )
    assert CostModel((0.0, 1.0, *[0.0] * 7, 0.0, 0.0, 0.0, 0.0)).step_s(output) == 11.0
    assert CostModel((0.0, *[0.0] * 8, 1.0, 10.0, 100.0, 1e6)).step_s(output) == 100 + 2500 + 200 + 3e6


def test_a_saved_model_is_the_same(tmp_path: Path) -> None:
    model = CostModel.fit(measured(100, noise=0.1), machine="a machine")
    model.save(tmp_path / "model.json")
    assert CostModel.load(tmp_path / "model.json") == model


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nonsense", "Cannot read"),
        ("[]", "no calibration"),
        (json.dumps({"format": 99}), "no calibration"),
        (json.dumps({"format": 1, "token_knees": [1], "coefficients": [1.0]}), "other terms"),
    ],
)
def test_something_else_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        CostModel.load(path)


def test_a_handful_of_steps_is_not_enough() -> None:
    with pytest.raises(ConfigError, match="too few"):
        CostModel.fit(measured(19))
