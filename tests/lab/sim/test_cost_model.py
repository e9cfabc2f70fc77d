"""The cost model finds the costs it was made from, never shrinks with more work, and keeps the mean under noise."""

from __future__ import annotations

import dataclasses
import random
import statistics

import numpy as np
import pytest

from headway.core import ScheduledRequest, SchedulerOutput
from headway.core.kv.moves import BlockMoves
from headway.core.step_work import StepWork
from headway.errors import ConfigError
from headway_lab.sim import CostModel
from headway_lab.sim.cost_model import TERMS, non_negative_least_squares


def random_work(rng: random.Random) -> StepWork:
    num_rows = rng.choice([1, 3, 17, 64])
    num_moved = rng.choice([0, 0, 5])
    if rng.random() < 0.5:
        return StepWork(num_rows, num_rows, num_rows, rng.randint(num_rows, 50_000), num_moved_blocks=num_moved)
    return StepWork(
        num_tokens=num_rows + rng.choice([10, 100, 300, 2000]),
        num_rows=num_rows,
        num_sampled=rng.randint(0, num_rows),
        num_context_tokens=rng.randint(0, 50_000),
        num_chunks=rng.randint(1, num_rows),
        num_chunk_pairs=rng.uniform(0, 1e6),
        num_moved_blocks=num_moved,
    )


def true_seconds(work: StepWork) -> float:
    shared = 3e-8 * work.num_context_tokens + 1e-9 * work.num_chunk_pairs + 1e-4 * work.num_moved_blocks
    if not work.num_chunks:
        return 4e-3 + 5e-5 * work.num_rows + shared
    tokens = 5e-6 * work.num_tokens + 2e-5 * max(work.num_tokens - 256, 0)
    return 6e-3 + tokens + 1e-5 * work.num_sampled + shared


def measured(num_steps: int, noise: float = 0.0, seed: int = 0) -> list[tuple[StepWork, float]]:
    rng = random.Random(seed)
    works = [random_work(rng) for _ in range(num_steps)]
    return [(work, true_seconds(work) * rng.uniform(1 - noise, 1 + noise)) for work in works]


def test_it_finds_the_costs_it_was_made_from() -> None:
    model = CostModel.fit(measured(400))
    assert model.mean_error < 0.001
    for work, seconds in measured(50, seed=1):
        assert model.seconds(work) == pytest.approx(seconds, rel=0.01)


def test_the_error_says_how_noisy_the_steps_were_by_kind() -> None:
    model = CostModel.fit(measured(600, noise=0.1))
    assert {error.kind for error in model.errors} == {"decode", "mixed", "prefill"}
    for error in model.errors:
        assert 0.02 < error.mean < 0.1 <= error.p95 * 1.3
        assert abs(error.bias) < 0.03


def test_noise_to_one_side_does_not_move_the_mean() -> None:
    """A third of the steps takes twice as long: the sum of all has to come out right."""
    rng = random.Random(5)
    steps = [(work, s * (2.0 if rng.random() < 1 / 3 else 1.0)) for work, s in measured(900)]
    model = CostModel.fit(steps)
    expected, total = sum(model.seconds(work) for work, _ in steps), sum(s for _, s in steps)
    assert expected == pytest.approx(total, rel=0.05)
    assert max(model.spread) > 1.4 > 1.0 > min(model.spread)
    seldom = [(work, 2 * s if place % 500 == 250 else s) for place, (work, s) in enumerate(measured(2000))]
    spread = CostModel.fit(seldom).spread
    assert spread[int(0.99 * (len(spread) - 1))] < 1.05 < 1.8 < spread[-1], "drawn as seldom as they were"
    middles = [(a + b) / 2 for a, b in zip(model.spread, model.spread[1:])]
    assert statistics.fmean(middles) == pytest.approx(1.0)


def test_steps_that_compile_something_do_not_count() -> None:
    steps = measured(300)
    slow = [(work, 50 * s) if place % 30 == 0 else (work, s) for place, (work, s) in enumerate(steps)]
    model = CostModel.fit(slow)
    for work, seconds in measured(50, seed=1):
        assert model.seconds(work) == pytest.approx(seconds, rel=0.05)


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
        num_tokens=11,
        num_rows=2,
        num_sampled=1,
        num_context_tokens=100,
        num_chunks=1,
        num_chunk_pairs=250.0,
        num_moved_blocks=3,
        num_shared_reads=30,
    )
    assert work.kind == "mixed"
    assert CostModel.of_terms(tokens_over_0=1.0).step_s(output) == 11.0
    costs = CostModel.of_terms(context=1.0, chunk_pairs=10.0, chunks=100.0, moved_blocks=1e6, sampled=0.5)
    assert costs.step_s(output) == 100 + 2500 + 100 + 3e6 + 0.5


def test_a_step_that_only_decodes_has_its_own_terms() -> None:
    scheduled = tuple(ScheduledRequest(str(row), 1, 10 * row, (), True) for row in range(40))
    output = SchedulerOutput(0, (), scheduled, (), (), num_scheduled_tokens=40)
    work = StepWork.of(output)
    assert (work.kind, work.num_context_tokens) == ("decode", sum(10 * row + 1 for row in range(40)))
    model = CostModel.of_terms(decode_constant=1.0, rows_over_0=0.1, rows_over_32=10.0, chunk_constant=999.0)
    assert model.step_s(output) == pytest.approx(1.0 + 4.0 + 80.0)


def is_lone(work: StepWork) -> bool:
    return work.num_tokens == 1


def test_a_single_row_has_a_time_of_its_own() -> None:
    """Which does not bend what is said of others."""
    model = CostModel.fit([(work, s * (0.8 if is_lone(work) else 1.0)) for work, s in measured(600)])
    assert model.lone_factor == pytest.approx(0.8, rel=0.01)
    for work, seconds in measured(100, seed=1):
        assert model.seconds(work) == pytest.approx(seconds * (0.8 if is_lone(work) else 1.0), rel=0.01)
    kept = CostModel.from_json(model.as_json())
    assert kept == model
    older = {key: value for key, value in model.as_json().items() if key != "lone_factor"}
    assert CostModel.from_json(older).lone_factor == 1.0


def test_a_few_single_rows_and_only_single_rows_are_fitted_like_all() -> None:
    steps = measured(600)
    others, lone = ([step for step in steps if is_lone(step[0]) is wanted] for wanted in (False, True))
    chunks = [step for step in others if step[0].num_chunks]
    for chosen in ([*lone[:7], *others], [*lone, *chunks]):
        model = CostModel.fit(chosen)
        assert model.lone_factor == 1.0
        for work, seconds in lone:
            assert model.seconds(work) == pytest.approx(seconds, rel=0.05)


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="too few"):
        CostModel.fit(measured(19))
    with pytest.raises(ConfigError, match=f"{len(TERMS)} coefficients"):
        CostModel((1.0,))


def test_least_squares_without_negative_numbers() -> None:
    """Where the free solution has a negative number, the best one without is found: here by trying a grid."""
    matrix = np.array([[1.0, 2.0], [1.0, 1.0], [1.0, 0.0]])
    target = np.array([0.0, 1.0, 2.0])
    found = non_negative_least_squares(matrix, target)
    grid = [(a / 50, b / 50) for a in range(150) for b in range(150)]
    best = min(grid, key=lambda x: float(np.sum((matrix @ np.array(x) - target) ** 2)))
    assert found == pytest.approx(best, abs=0.02)
    assert found.min() >= 0.0


def test_each_guess_is_like_a_request_of_its_own() -> None:
    drafting = (ScheduledRequest("a", 3, 10, (), True, (5, 6)), ScheduledRequest("b", 1, 4, (), True))
    work = StepWork.of(SchedulerOutput(0, (), drafting, (), (), num_scheduled_tokens=4))
    apart = tuple(ScheduledRequest(str(place), 1, computed, (), True) for place, computed in enumerate((10, 11, 12, 4)))
    alike = StepWork.of(SchedulerOutput(0, (), apart, (), (), num_scheduled_tokens=4))
    assert work == dataclasses.replace(alike, num_shared_reads=13 - (11 + 12 + 13))
    assert work.kind == "decode"
