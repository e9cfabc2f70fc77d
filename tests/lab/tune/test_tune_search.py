"""The search finds an optimum that was planted, does the same again, and keeps the default where nothing is better.

Measuring trials: each on an engine of its own with the trial's options, which is shut down afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from headway.config import EngineConfig
from headway.core.request_options import RequestOptions
from headway.engine.llm_engine import LLMEngine
from headway.executor.fake import FakeExecutor
from headway_lab.sim import CostModel
from headway_lab.tune import Goal, SearchLimits, Space, Trial, Tuned, search
from headway_lab.tune.flags_text import flags_text
from headway_lab.tune.tune_goal import Score
from headway_lab.tune.tune_report import (
    Verified,
    candidates,
    fleet_recommendation,
    recommendation,
    recommended,
    sized_flags,
    trial_table,
    tuned_json,
    tuned_page,
    verified_table,
    verify,
)
from headway_lab.tune.tune_search import Fleet, _Search, _Sizing, fewest, most_trials, simulate_trial
from headway_lab.workload.bench_requests import BenchRequest
from tests.lab.noted_meter import NotedMeter
from tests.lab.sim.machines import calibration
from tests.unit.no_model import nominal_config, nominal_plan

KNEE = CostModel.of_terms(
    decode_constant=0.010, rows_over_0=0.0001, rows_over_32=0.02, chunk_constant=0.010, tokens_over_0=0.0001
)
"""More than 32 rows cost far more than they bring."""
FLAT = CostModel.of_terms(decode_constant=0.010, chunk_constant=0.010)
"""A step takes 10 ms whatever is in it."""


def at_once(num_requests: int) -> list[BenchRequest]:
    rng = random.Random(3)
    return [BenchRequest([1] * rng.randint(4, 12), rng.randint(10, 20)) for _ in range(num_requests)]


def space(cost: CostModel, work: list[BenchRequest], num_seqs: int, **fixed: object) -> Space:
    scheduler = {"max_num_seqs": num_seqs, "max_num_batched_tokens": 512, "target_itl_ms": 0.0}
    return Space.of(calibration(cost, scheduler=scheduler, num_blocks=4000), work, fixed)


@pytest.mark.parametrize("num_seqs", [4, 128])
def test_it_finds_a_planted_optimum(num_seqs: int) -> None:
    """32 rows are best, or as near as can be searched from the default."""
    work = at_once(120)
    tuned = search(space(KNEE, work, num_seqs), Goal(), work, limits=SearchLimits(40))
    best = tuned.best.options["max_num_seqs"]
    assert best == (8 if num_seqs == 4 else 32)
    assert tuned.best.score.goodput > 1.3 * tuned.default.score.goodput
    assert not tuned.is_default_best


def test_the_default_is_kept_where_nothing_is_better() -> None:
    """One request at a time, in steps that all take the same: no option matters."""
    work = [BenchRequest([1] * 4, 5, arrival_s=float(place)) for place in range(60)]
    one = space(FLAT, work, 8)
    tuned = search(one, Goal.parse(["p99_itl_ms=50"]), work, limits=SearchLimits(12))
    assert tuned.is_default_best
    assert tuned.best.options == one.default
    assert tuned.default in tuned.trials
    assert "keep it" in recommendation(one, tuned, tuned.best)
    assert candidates(tuned, 3) == [tuned.default]


def test_the_budget_is_kept_and_what_was_given_is_not_searched() -> None:
    """But for a simulation for each option, at the end. The same again gives the same."""
    work = at_once(60)
    used: list[float] = []
    one = space(KNEE, work, 64, max_num_seqs=64, scheduling_policy="fcfs")
    assert {"max_num_seqs", "scheduling_policy"}.isdisjoint(one.knobs)
    tuned, again = (
        search(one, Goal(), work, limits=SearchLimits(8, seed=7), progress=NotedMeter(used)) for _ in range(2)
    )
    assert {trial.options["max_num_seqs"] for trial in tuned.trials} == {64}
    assert max(used) <= 8.0
    assert len(tuned.trials) <= 10 + len(one.knobs)
    assert tuned.num_simulated > len(tuned.trials), "most are tried with a part of the work"
    assert [trial.options for trial in tuned.trials] == [trial.options for trial in again.trials]


def test_values_stay_near_what_was_measured_and_policies_have_something_to_go_by() -> None:
    one = space(KNEE, at_once(5), 64)
    assert max(one.knobs["max_num_seqs"]) == 128
    assert max(one.knobs["max_num_batched_tokens"]) == 1024
    assert one.knobs["scheduling_policy"] == ["fcfs", "mlfq", "prefix"]
    classes = [
        BenchRequest([1], 1, options=RequestOptions(tenant="a", priority=1, ttft_target_s=1.0)),
        BenchRequest([1], 1, options=RequestOptions(tenant="b", predicted_tokens=5.0)),
    ]
    policies = space(KNEE, classes, 64).knobs["scheduling_policy"]
    assert set(policies) == {"fcfs", "mlfq", "prefix", "sjf", "srpt", "hrrn", "slo", "priority", "fair"}


ONE_BY_ONE = CostModel.of_terms(decode_constant=0.001, rows_over_0=0.010, chunk_constant=0.001, tokens_over_0=0.001)
"""Each row of a step takes 10 ms: a larger batch only makes all of its answers slow."""


UNCHANGED = {
    "max_num_batched_tokens": 64,
    "target_itl_ms": 0.0,
    "max_chunk_tokens": None,
    "scheduling_policy": "fcfs",
    "prefill_mode": "chunked",
}


def fleet(
    work: list[BenchRequest], target: str, numbers: Sequence[int], routers: Sequence[str], **fixed: object
) -> tuple[Fleet, list[float]]:
    machine = calibration(ONE_BY_ONE, num_blocks=4000)
    spaces = [Space.of(machine, work, fixed, num_replicas=number, routers=routers) for number in numbers]
    limits, used = SearchLimits(12), [0.0]
    found = fewest(spaces, Goal.parse([target]), work, limits=limits, progress=NotedMeter(used))
    assert used == sorted(used) and used[-1] <= most_trials(spaces, limits), "progress goes up to what was announced"
    return found, used


@pytest.mark.parametrize("numbers", [range(1, 13), (1, 3, 6, 9, 12)])
def test_the_fewest_replicas_are_those_that_trying_every_number_finds(numbers: Sequence[int]) -> None:
    work = [BenchRequest([1] * 10, 10, arrival_s=0.5 * (place // 20)) for place in range(60)]
    goal, fixed = "p99_ttft_ms=150", {"max_num_seqs": 8, **UNCHANGED}  # nothing is left to search
    found, _ = fleet(work, goal, numbers, ["least-loaded"], **fixed)
    machine = calibration(ONE_BY_ONE, num_blocks=4000)
    spaces = [Space.of(machine, work, fixed, num_replicas=n, routers=["least-loaded"]) for n in numbers]
    sizing = _Sizing(spaces, Goal.parse([goal]), work, SearchLimits(1), None)
    is_enough = [sizing.is_enough_by_default(place) for place in range(len(numbers))]
    first = is_enough.index(True)
    assert 0 < first < len(numbers) - 1 and all(is_enough[first:])
    assert found.enough is not None and found.too_few is not None
    assert (found.too_few.num_replicas, found.enough.num_replicas) == (numbers[first - 1], numbers[first])
    assert len(found.tried) <= len(numbers).bit_length() + 1


def test_better_options_do_with_fewer_replicas() -> None:
    """24 at once: tokens come in time in batches of four, whatever the number of replicas; by default eight go in."""
    work = [BenchRequest([1] * 4, 20, arrival_s=10.0 * (place // 24)) for place in range(24)]
    as_given, _ = fleet(work, "p99_itl_ms=60", range(1, 8), ["least-loaded"], max_num_seqs=8, **UNCHANGED)
    searched, _ = fleet(work, "p99_itl_ms=60", range(1, 8), ["least-loaded"])
    assert as_given.enough is not None and searched.enough is not None
    assert searched.enough.num_replicas < as_given.enough.num_replicas
    assert searched.enough.trial.options["max_num_seqs"] < 8


def test_a_number_that_keeps_its_promises_only_while_the_run_is_short_is_not_enough() -> None:
    """First tokens are in time as long as there are seats; but a replica makes 100 tokens a second, and 400 are due."""
    work = [BenchRequest([1] * 4, 20, arrival_s=0.05 * place) for place in range(60)]
    found, _ = fleet(work, "p99_ttft_ms=2000", range(1, 9), ["least-loaded"], max_num_seqs=8, **UNCHANGED)
    assert found.enough is not None and found.too_few is not None
    assert (found.too_few.num_replicas, found.enough.num_replicas) == (3, 4)
    assert found.too_few.trial.score.is_kept and found.too_few.overload is not None
    told = "\n".join(fleet_recommendation(Goal.parse(["p99_ttft_ms=2000"]), found))
    assert "keeps the targets, but not for long" in told and "Beyond capacity with 3:" in told


def test_the_router_is_searched_too() -> None:
    """Every other request is long: in turn, all of these come to the same replica."""
    work = [BenchRequest([1] * 4, 40 if place % 2 else 2, arrival_s=0.12 * place) for place in range(60)]
    found, _ = fleet(work, "p99_ttft_ms=60", [1, 2], ["round-robin", "least-loaded"], max_num_seqs=2, **UNCHANGED)
    assert found.enough is not None and found.enough.num_replicas == 2
    assert found.enough.trial.options["router"] == "least-loaded"
    assert sized_flags(found.enough) == "--replicas 2 --router least-loaded"
    alone, _ = fleet(work, "p99_ttft_ms=60", [2], ["round-robin"], max_num_seqs=2, **UNCHANGED)
    assert alone.enough is None


def test_every_drawn_candidate_and_every_neighbour_is_valid() -> None:
    one, rng = space(KNEE, at_once(5), 64), random.Random(0)
    for _ in range(50):
        drawn = one.draw(rng)
        assert one.is_valid(drawn)
        for near in one.neighbours(drawn):
            assert one.is_valid(near)
            assert sum(near[name] != drawn[name] for name in drawn) == 1


def verified(trial: Trial, goodput: float) -> Verified:
    score = type(trial.score)(goodput, 1.0, trial.score.tail)
    return Verified(trial, trial.metrics, score)


@pytest.fixture(scope="module")
def found() -> tuple[Space, Tuned]:
    work = at_once(80)
    one = space(KNEE, work, 128)
    return one, search(one, Goal(), work, limits=SearchLimits(10))


def test_what_was_found(found: tuple[Space, Tuned]) -> None:
    """Options that do not matter stay as they are; the front has what nothing beats."""
    one, tuned = found
    assert "scheduling_policy" not in one.changes(tuned.best.options)
    for name in one.changes(tuned.best.options):
        without = {**tuned.best.options, name: one.default[name]}
        same = [trial for trial in tuned.trials if trial.options == without]
        assert not same or tuned.best.score.is_better_than(same[0].score)
    front = [(trial.metrics.output_tok_s, trial.metrics.itl.percentiles[99]) for trial in tuned.front]
    assert front == sorted(front)
    for trial in tuned.trials:
        rate, tail = trial.metrics.output_tok_s, trial.metrics.itl.percentiles[99]
        assert any(other_rate >= rate and other_tail <= tail for other_rate, other_tail in front)


def test_options_that_change_nothing_are_not_measured_again(found: tuple[Space, Tuned]) -> None:
    _, tuned = found
    twin = Trial({**tuned.chosen.options, "max_num_batched_tokens": 1}, tuned.chosen.metrics, tuned.chosen.score, 120)
    both = Tuned(tuned.default, tuned.chosen, [twin, *tuned.trials], tuned.num_simulated)
    assert twin not in both.distinct and both.distinct[0] is tuned.chosen
    assert candidates(both, 2) == candidates(tuned, 2)
    measured = [trial.metrics for trial in both.distinct]
    assert all(metrics not in measured[:place] for place, metrics in enumerate(measured))
    assert {id(trial) for trial in both.trials} > {id(trial) for trial in both.distinct}, "all are in the JSON"


def test_reports(found: tuple[Space, Tuned]) -> None:
    """What is measured has the last word."""
    one, tuned = found
    default, *better = candidates(tuned, 2)
    assert default is tuned.default and len(better) == 2
    for goodputs, best in (((1.0, 0.9, 1.2), better[1]), ((1.0, 0.9, 0.8), default), ((1.0,), default)):
        measured = [verified(trial, goodput) for trial, goodput in zip([default, *better], goodputs)]
        assert recommended(measured) is best
    both = [verified(tuned.default, 1.0), verified(tuned.best, 2.0)]
    assert "measured goodput 2/s against 1/s by default (2.00 times)" in recommendation(one, tuned, tuned.best, both)
    predicted = recommendation(one, tuned, tuned.best)
    assert "predicted goodput" in predicted and "measured" not in predicted
    titles, rows = trial_table(one, tuned)
    assert all(len(row) == len(titles) for row in rows)
    assert "default" in {row[0] for row in rows}
    titles, rows = verified_table(one, both)
    assert all(len(row) == len(titles) for row in rows)
    result = tuned_json(one, Goal(), tuned, both, tuned.best)
    assert result["recommended"] == one.changes(tuned.best.options)
    assert len(result["verified"]) == 2
    page = tuned_page(one, Goal(), tuned, both, tuned.best, title="work", notes=["a note"]).render()
    assert "Pareto front" in page and "P99 of the time between tokens (ms)" in page and "a note" in page
    assert flags_text({"max_num_seqs": 8, "target_itl_ms": 20.0, "max_chunk_tokens": None}) == (
        "--max-num-seqs 8 --target-itl-ms 20 --max-chunk-tokens none"
    )


def test_of_those_with_about_the_highest_goodput_the_shortest_tail_wins() -> None:
    """A trial that loses 0.3% of the goodput and half of the tail is the better one; one that loses 2% is not."""
    work = at_once(20)
    one = space(FLAT, work, 8)
    run = _Search(one, Goal(), work, SearchLimits(1), None)
    default = run.whole(one.default)
    for name, goodput, tail in (("max_num_seqs", 0.997, 0.5), ("target_itl_ms", 0.98, 0.1)):
        options = {**one.default, name: one.knobs[name][-1]}
        score = Score(goodput * default.score.goodput, 1.0, tail * default.score.tail)
        run.trials[tuple(options.values())] = Trial(options, default.metrics, score, len(work))
    ranked = run.ranked()
    assert [list(one.changes(trial.options)) for trial in ranked] == [["max_num_seqs"], [], ["target_itl_ms"]]


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
