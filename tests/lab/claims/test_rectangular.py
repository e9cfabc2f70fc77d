"""Rectangular batches: how work is padded, and that what is counted is what a step computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.core.step_work import StepWork
from headway.engine.step_report import EngineStep
from headway.worker.ceilings import Ceilings
from headway.worker.step_costs import planned_costs, step_flops, step_read_bytes
from headway_lab.bench.replay import replay
from headway_lab.bench.timelines import RequestTimeline
from headway_lab.claims.machine_shares import machine_shares
from headway_lab.claims.rectangular import Usage, batches_of, rectangular
from headway_lab.claims.run import Run
from headway_lab.claims.scenarios.padding import SEALING
from headway_lab.claims.testbed import EngineTestbed, SimulatedTestbed
from headway_lab.workload.bench_requests import BenchRequest
from tests.lab.claims.small import tiny_options, tiny_testbed

Sizes = list[tuple[int, int]]


def work_of(sizes: Sizes) -> list[BenchRequest]:
    return [BenchRequest([7] * num_in, num_out) for num_in, num_out in sizes]


def sizes_of(work: list[BenchRequest]) -> Sizes:
    return [(one.num_prompt_tokens, one.num_output_tokens) for one in work]


UNEVEN: Sizes = [(3, 9), (8, 2), (5, 5), (2, 1), (6, 12), (1, 4), (4, 4)]


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[EngineTestbed]:
    testbed = tiny_testbed(**tiny_options(tmp_path))
    yield testbed
    testbed.close()


@pytest.mark.parametrize(
    ("size", "padded"),
    [
        (1, UNEVEN),
        (3, [(8, 9)] * 3 + [(6, 12)] * 3 + [(4, 4)]),
        (100, [(8, 12)] * 7),
    ],
)
def test_each_batch_has_the_longest_prompt_and_answer_of_its_own(size: int, padded: Sizes) -> None:
    made = rectangular(work_of(UNEVEN), size)
    assert sizes_of(made) == padded
    for one, (num_in, _) in zip(made, UNEVEN):
        assert list(one.prompt_token_ids) == [0] * (one.num_prompt_tokens - num_in) + [7] * num_in
    assert [len(batch) for batch in batches_of(made, 3)] == [3, 3, 1]
    assert rectangular([], size) == []


def test_what_became_of_rows_and_slots() -> None:
    work = work_of([(2, 3), (4, 1)])
    padded = [RequestTimeline(0.0, 4, 3, [1.0, 2.0, 3.0]), RequestTimeline(0.0, 4, 3, [1.0, 2.0, 3.0])]
    used = Usage.of(Run(padded, 4.0), work, 2)
    assert (used.num_useful_rows, used.num_filler_rows, used.num_late_rows, used.num_rows) == (8, 2, 2, 12)
    assert used.waste == pytest.approx(1 / 3) and used.busy == pytest.approx(4 / 6) and used.num_idle == 2
    assert used.tok_s == 1.0
    with pytest.raises(RuntimeError, match="preempted"):
        Usage.of(Run([dataclasses.replace(padded[0], num_preemptions=1), padded[1]], 4.0), work, 2)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("place", ["engine", "simulator"])
def test_a_rectangular_batch_ends_as_one(size: int, place: str, tiny: EngineTestbed) -> None:
    testbed = tiny if place == "engine" else SimulatedTestbed.open()
    padded = rectangular(work_of(UNEVEN), size)
    run = testbed.run(padded, max_num_seqs=size, **SEALING)
    ends = [[line.end_s for line in batch] for batch in batches_of(list(run.timelines), size)]
    assert all(len(set(batch)) == 1 for batch in ends)
    assert sorted({batch[0] for batch in ends}) == [batch[0] for batch in ends], "one batch after the other"


@pytest.mark.parametrize("mode", ["rectangular", "sealed", "continuous"])
def test_the_counted_rows_are_those_that_the_engine_computes(mode: str, tiny: EngineTestbed) -> None:
    asked, size = work_of(UNEVEN), 3
    served = rectangular(asked, size) if mode == "rectangular" else asked
    sealing: dict[str, Any] = {} if mode == "continuous" else dict(SEALING)
    engine = tiny.engine(enable_prefix_caching=False, max_num_seqs=size, **sealing)
    costs = planned_costs(engine.model_config, engine.plan)
    computed: list[int] = []
    giving: list[bool] = []
    flops_and_bytes = [0.0, 0.0]

    def step() -> EngineStep:
        stepped = engine.step()
        computed.append(stepped.report.num_tokens)
        giving.append(any(update.new_token_ids for update in stepped.report.updates))
        step_work = StepWork.of(stepped.report.snapshot.output)
        flops_and_bytes[0] += step_flops(step_work, costs)
        flops_and_bytes[1] += step_read_bytes(step_work, costs)
        return stepped

    done = replay(engine, served, temperature=0.0, step=step)
    used = Usage.of(Run(done.timelines, done.duration_s), asked, size)
    assert used.num_rows == sum(computed)
    assert used.num_steps == sum(giving)
    assert (used.waste > 0) == (mode == "rectangular")
    run = Run(done.timelines, 2.0, num_running=[1] * len(computed))
    shares = machine_shares(run, asked, engine, Ceilings(bandwidth_bytes_s=1e6, flops_s=1e6))
    assert [2e6 * shares.compute, 2e6 * shares.bandwidth] == pytest.approx(flops_and_bytes)
    assert (shares.useful_compute < shares.compute) == (mode == "rectangular")


def test_both_testbeds_count_the_same_rows_and_slots(tiny: EngineTestbed) -> None:
    asked = work_of(UNEVEN)
    for served in (asked, rectangular(asked, 3)):
        found = [
            Usage.of(testbed.run(served, max_num_seqs=3, **SEALING), asked, 3)
            for testbed in (tiny, SimulatedTestbed.open())
        ]
        same = [dataclasses.replace(used, duration_s=0.0) for used in found]
        assert same[0] == same[1]


def test_the_published_example_leaves_15_slots_idle_for_448_steps() -> None:
    work = work_of([(64, 512)] + [(64, 64)] * 15)
    run = SimulatedTestbed.open().run(work, max_num_seqs=16, **SEALING)
    used = Usage.of(run, work, 16)
    assert (used.num_steps, used.num_idle) == (512, 15 * 448)
