"""The cheapest options take the highest load; what each flag gains; which formats can be priced."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headway.cli.main import main
from headway.errors import ConfigError
from headway_lab.sim import Calibration, CostModel
from headway_lab.sim.kv_variant import can_change_kv, with_kv_format
from headway_lab.tune.ablation import COST, GOODPUT, Without, gains_of
from headway_lab.tune.cost_search import CostSearch, Load
from headway_lab.tune.formats import Formats, check_calibrations, parse_kv_formats
from headway_lab.tune.search_space import Space
from headway_lab.tune.tune_goal import Goal, Score
from headway_lab.tune.tune_search import SearchLimits, Trial, simulate_trial
from headway_lab.workload.bench_requests import BenchRequest
from tests.lab.sim.machines import calibration

FLAT = CostModel.of_terms(decode_constant=0.010, chunk_constant=0.010)
"""A step takes 10 ms whatever is in it, so that larger batches are cheaper."""
SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "target_itl_ms": 0.0}
KEPT = {"target_itl_ms": 0.0, "max_chunk_tokens": None, "scheduling_policy": "fcfs", "prefill_mode": "chunked"}
WORK = [BenchRequest([1] * 8, 12, arrival_s=float(place)) for place in range(80)]


def machine(**changes: Any) -> Calibration:
    return calibration(FLAT, scheduler=SMALL, num_blocks=4000, **changes)


def space(formats: Formats | None = None, **fixed: Any) -> Space:
    return Space.of(machine(), WORK, {**KEPT, **fixed}, formats=formats, price_per_hour=3.6)


def search(one: Space, *slo: str, num_trials: int = 30) -> CostSearch:
    return CostSearch(one, Goal.parse(slo), Load(WORK, 1.0), SearchLimits(num_trials))


def test_the_same_requests_come_at_another_rate() -> None:
    load = Load(WORK, 1.0)
    assert [one.arrival_s for one in load.at(4.0)] == [0.25 * place for place in range(80)]
    assert [one.prompt_token_ids for one in load.at(4.0)] == [one.prompt_token_ids for one in WORK]


def test_the_highest_load_is_kept_and_the_next_one_is_not() -> None:
    one, goal = space(), Goal.parse(["p99_ttft_ms=100"])
    trial = search(one, "p99_ttft_ms=100").highest(one.default)
    assert trial is not None and trial.rate is not None and trial.score.is_kept
    above = simulate_trial(one, goal, one.default, Load(WORK, 1.0).at(1.05 * trial.rate))
    assert not above.score.is_kept
    assert trial.metrics.prices is not None
    tokens = trial.metrics.prices.tokens
    assert tokens.all_in == pytest.approx(1e6 * 3.6 / 3600 * trial.metrics.duration_s / (80 * 12))


def test_it_finds_the_cheaper_batch() -> None:
    """Eight requests at once cost half of what four cost. Options that do nothing stay at their defaults."""
    one = space(max_num_batched_tokens=64)
    tuned = search(one, "p99_ttft_ms=200").run()
    assert tuned.default.rate is not None and tuned.best.rate is not None
    assert tuned.best.rate > 1.5 * tuned.default.rate
    assert one.changes(tuned.best.options) == {"max_num_seqs": 8}
    assert not tuned.is_default_best
    again = search(one, "p99_ttft_ms=200").run()
    assert (again.best.options, again.best.rate) == (tuned.best.options, tuned.best.rate)


def test_a_load_beyond_capacity_is_not_kept_however_lax_the_promise() -> None:
    one = space()
    trial = search(one, "p99_ttft_ms=1000000").highest(one.default)
    assert trial is not None and trial.rate is not None
    assert trial.rate < 1.1 * one.capacity(one.default, WORK)


def test_work_that_never_fills_the_machine_has_an_end() -> None:
    """The turns of one conversation follow each other, however early the first one comes."""
    talk = [BenchRequest([1] * 4, 2, after=place - 1 if place else None, think_s=1.0) for place in range(8)]
    work = [dataclasses.replace(one, arrival_s=0.1 * place) for place, one in enumerate(talk)]
    one = Space.of(machine(), work, KEPT, price_per_hour=1.0)
    trial = CostSearch(one, Goal.parse(["p99_ttft_ms=500"]), Load(work, 1.0), SearchLimits(3)).highest(one.default)
    assert trial is not None and (trial.rate or 0.0) <= 1e6
    with pytest.raises(ConfigError, match="a single request"):
        CostSearch(one, Goal(), Load(work[:1], 1.0), SearchLimits(3))


def test_the_default_may_keep_the_promises_at_no_load() -> None:
    """With long prompts a step takes too long, unless chunks are short."""
    cost = CostModel.of_terms(decode_constant=0.010, chunk_constant=0.010, tokens_over_0=0.001)
    work = [BenchRequest([1] * 60, 12, arrival_s=float(place)) for place in range(60)]
    long_steps = calibration(cost, scheduler={**SMALL, "max_num_batched_tokens": 64}, num_blocks=4000)
    fixed = {name: value for name, value in KEPT.items() if name != "max_chunk_tokens"}
    one = Space.of(long_steps, work, fixed, price_per_hour=1.0)
    tuned = CostSearch(one, Goal.parse(["max_itl_ms=50"]), Load(work, 1.0), SearchLimits(40)).run()
    assert tuned.best.options["max_chunk_tokens"] == 32
    low = Goal.parse(["max_itl_ms=50"])
    assert simulate_trial(one, low, tuned.best.options, Load(work, 1.0).at(tuned.best.rate or 0.0)).score.is_kept
    with pytest.raises(ConfigError, match="No options keep the promises at any load"):
        CostSearch(one, Goal.parse(["max_itl_ms=10.2"]), Load(work, 1.0), SearchLimits(12)).run()


def test_at_the_highest_load_only_the_load_counts() -> None:
    base = Score(10.0, 1.0, tail=1.0, is_at_limit=True)
    assert not Score(10.0, 1.0, tail=0.5, is_at_limit=True).is_better_than(base)
    assert Score(10.1, 1.0, tail=1.0, is_at_limit=True).is_better_than(base)


def trial_of(one: Space, options: dict[str, Any]) -> Trial:
    return simulate_trial(one, Goal(), options, [dataclasses.replace(request, arrival_s=0.0) for request in WORK])


def test_each_flag_is_put_back_alone() -> None:
    """The batch is worth something, the policy nothing; the third depends on the first."""
    fixed = {name: value for name, value in KEPT.items() if name != "scheduling_policy"}
    one = Space.of(machine(), WORK, fixed, price_per_hour=3.6)
    options = {**one.default, "max_num_seqs": 128, "max_num_batched_tokens": 128, "scheduling_policy": "mlfq"}
    best = trial_of(one, options)
    gains = gains_of(one, best, lambda changed: trial_of(one, dict(changed)), GOODPUT)
    assert gains is not None
    by_name = {each.name: each for each in gains.each}
    assert list(by_name) == ["max_num_seqs", "max_num_batched_tokens", "scheduling_policy"]
    assert by_name["max_num_batched_tokens"].trial is None, "128 seats do not go with 64 tokens"
    seats = by_name["max_num_seqs"].trial
    assert seats is not None and seats.options == {**options, "max_num_seqs": 4}
    assert seats.score.goodput < 0.5 * best.score.goodput
    titles, rows = gains.table()
    assert titles[:3] == ["without", "default", "goodput/s"]
    assert rows[1][:2] == ["--max-num-seqs 128", "4"] and rows[1][-1].startswith("-")
    assert rows[2][2:] == ["–", "–", "the engine refuses the rest without it"]
    told = gains.as_json()[0]
    assert told["with"]["goodput"] == best.score.goodput and told["without"]["goodput"] == seats.score.goodput
    assert gains_of(one, trial_of(one, dict(one.default)), lambda changed: None, COST) is None
    more = Without("calibration", "--calibration b", "a", None, "misses the targets at any load")
    alone = gains_of(one, trial_of(one, dict(one.default)), lambda changed: None, COST, more=[more])
    assert alone is not None and alone.table()[1][1][-1] == "misses the targets at any load"


GPU = {"device": "cuda", "kv_dtype": "bfloat16"}


def test_a_kv_format_has_room_for_more_tokens_and_is_read_faster() -> None:
    cost = CostModel.of_terms(decode_constant=0.01, context=1e-6)
    plain = calibration(cost, **GPU)
    small = with_kv_format(plain, "fp8")
    assert small.num_blocks > 1.9 * plain.num_blocks and small.kv_dtype == "fp8"
    assert sum(small.cost.coefficients) < sum(plain.cost.coefficients)
    one = Space.of(plain, WORK, {}, formats=Formats(("fp8",)))
    assert one.knobs["kv_cache_dtype"] == ["fp8", "auto"]
    assert one.set_up({**one.default, "kv_cache_dtype": "fp8"}).machine.num_blocks == small.num_blocks
    assert one.set_up(one.default).machine.num_blocks == plain.num_blocks
    assert not can_change_kv(small) and not can_change_kv(calibration())
    with pytest.raises(ConfigError, match="cannot be simulated"):
        with_kv_format(plain, "fp7")


def test_guesses_are_searched_if_their_acceptance_is_given() -> None:
    one = space(Formats(acceptance=3.0))
    assert one.knobs["speculation"] == ["off", "ngram"]
    guesses = {**one.default, "speculation": "ngram"}
    assert one.of_engine(guesses)["spec_synthetic_acceptance"] == 3.0
    assert "spec_synthetic_acceptance" not in one.of_engine(one.default)
    goal = Goal()
    plain, guessed = (simulate_trial(one, goal, options, WORK).metrics for options in (one.default, guesses))
    assert guessed.tpot.mean < 0.6 * plain.tpot.mean


@pytest.mark.parametrize(
    ("formats", "calibrations", "fixed", "said", "unsaid"),
    [
        (
            Formats(),
            [calibration()],
            {},
            ("weight formats", "block_size", "kv_cache_dtype, because other formats change answers", "speculation"),
            (),
        ),
        (Formats(("fp8",), 2.5), [calibration(**GPU)], {}, ("weight formats", "block_size"), ("kv_cache", "specul")),
        (Formats(("fp8",)), [calibration()], {}, ("not from float16 on cpu",), ()),
        (
            Formats(("fp8",), 2.5),
            [calibration(**GPU), calibration(dtype="fp8 weights", block_size=8, **GPU)],
            {},
            (),
            ("Not searched",),
        ),
        (Formats(), [calibration()], {"speculation": "off", "block_size": 4}, (), ("speculation", "block_size")),
    ],
)
def test_what_cannot_be_priced_is_named_with_the_reason(
    formats: Formats, calibrations: Sequence[Calibration], fixed: dict[str, Any], said: Any, unsaid: Any
) -> None:
    text = formats.not_searched(calibrations, fixed)
    for part in said:
        assert part in text
    for part in unsaid:
        assert part not in text


def test_calibrations_differ_in_a_format() -> None:
    check_calibrations([calibration(), calibration(dtype="fp8 weights, float32 activations")])
    with pytest.raises(ConfigError, match="two have the same number of ranks"):
        check_calibrations([calibration(), calibration(num_blocks=7)])
    with pytest.raises(ConfigError, match="of one model"):
        check_calibrations([calibration(), calibration(model="large")])
    assert parse_kv_formats("none", default=("fp8",)) == []
    assert parse_kv_formats(None, default=("fp8",)) == ["fp8"]
    assert parse_kv_formats("int8, int4") == ["int8", "int4"]


def files(folder: Path, *machines: Calibration) -> list[str]:
    flags = []
    for place, each in enumerate(machines):
        each.save(folder / f"m{place}.json")
        flags += ["--calibration", str(folder / f"m{place}.json")]
    (folder / "work.toml").write_text(
        'requests = 60\narrivals = { kind = "poisson", rate = 5.0 }\ninput = 8\noutput = 12\n'
    )
    return [*flags, "--workload", str(folder / "work.toml"), "--price-per-hour", "3.6", "--objective", "cost"]


def test_the_command_finds_the_cheapest_calibration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights in eight bits halve the time of a step. The load that it names keeps the promise in `headway sim`."""
    halved = dataclasses.replace(machine(dtype="fp8 weights").scaled(0.5))
    flags = files(tmp_path, machine(), halved)
    out, page = tmp_path / "r.json", tmp_path / "r.html"
    given = ["--slo", "p99_ttft_ms=100", "--trials", "12", "--output-json", str(out), "--html", str(page)]
    assert main(["tune", *flags, *given]) == 0
    result, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert (result["objective"], result["calibration"]) == ("cost", "m1.json")
    prices = [one["price_per_million_output_tokens_all_in"] for one in result["by_calibration"]]
    assert prices[1] < 0.7 * prices[0]
    assert f"Cheapest: --calibration m1.json {'' if result['recommended'] else 'default'}" in printed
    assert result["gains"][0]["option"] == "calibration"
    assert result["gains"][0]["without"]["rate"] < result["rate"]
    assert "What each flag gains alone" in printed and "What each flag gains alone" in page.read_text()
    assert "Not searched: block_size" in printed and "weight formats" not in printed
    assert "The lowest price that keeps the targets" in page.read_text()
    options = [
        text for name, value in result["recommended"].items() for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    simulated = ["sim", *flags[2:6], "--rate", f"{result['rate']:.12g}", "--price-per-hour", "3.6", *options]
    assert main([*simulated, "--output-json", str(out)]) == 0
    again = json.loads(out.read_text())
    assert again["p99_ttft_ms"] <= 100
    key = "price_per_million_output_tokens_all_in"
    assert again[key] == pytest.approx(result[key], rel=1e-3)


def test_the_cheapest_replicas_for_a_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two slow devices at 1 an hour are cheaper than one fast at 3. Each flag of the answer is put back alone."""
    flags = files(tmp_path, machine(), machine(dtype="fp8 weights").scaled(0.5))
    given = ["--price-per-hour", "0.5", "--rate", "45", "--replicas", "1-4", "--slo", "p99_ttft_ms=100"]
    place = flags.index("--price-per-hour")
    flags[place : place + 2] = ["--price-per-hour", "1", "--price-per-hour", "3"]
    out = tmp_path / "r.json"
    assert main(["tune", *flags, *given[2:], "--trials", "2", "--output-json", str(out)]) == 0
    result, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert "Cheapest: Recommended: --replicas" in printed and "per million output tokens, all in." in printed
    costs = []
    for one in result["by_ranks"]:
        found = next(each for each in one["tried"] if each["replicas"] == one["replicas"])
        costs.append(found["predicted"]["price_per_million_output_tokens_all_in"])
    best = result["recommended"]
    assert min(costs) in [each["predicted"]["price_per_million_output_tokens_all_in"] for each in best["tried"]]
