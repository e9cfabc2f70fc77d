"""Where claims run, and the real engine under them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.cli.main import main
from headway.config import EngineConfig
from headway.engine.llm_engine import LLMEngine
from headway.errors import ConfigError
from headway_lab.bench.attention_times import AttentionWork, Effort, HeadShape
from headway_lab.bench.timelines import RequestTimeline
from headway_lab.claims.claim import Outcome, Where
from headway_lab.claims.claim_results import On, Session
from headway_lab.claims.context import Context, Infeasible, Variant, run_alternating
from headway_lab.claims.run import Run
from headway_lab.claims.scenarios import CLAIMS, paging_cost, weight_formats
from headway_lab.claims.scenarios.paging_cost import Layers, PagingSetup
from headway_lab.claims.testbed import EngineTestbed, SimulatedTestbed
from headway_lab.sim import CostModel
from headway_lab.workload.bench_requests import BenchRequest
from tests.lab.claims.small import SmallTestbed, row, tiny_options, tiny_testbed
from tests.lab.sim.machines import calibration


@pytest.fixture
def shape(tmp_path: Path) -> dict[str, Any]:
    return tiny_options(tmp_path)


@pytest.fixture
def place(shape: dict[str, Any]) -> Iterator[EngineTestbed]:
    place = tiny_testbed(**shape)
    yield place
    place.close()


def work(count: int, *, num_in: int = 8, num_out: int = 6) -> list[BenchRequest]:
    return [BenchRequest(list(range(1, num_in + 1)), num_out) for _ in range(count)]


def test_one_engine_serves_with_many_schedulers(place: EngineTestbed) -> None:
    small = place.run(work(6), max_num_seqs=2)
    large = place.run(work(6))
    assert max(small.num_running) <= 2 < max(large.num_running)
    assert all(line.is_complete for run in (small, large) for line in run.timelines)


def test_a_part_of_the_memory_is_given_back(place: EngineTestbed) -> None:
    scarce = place.run(work(8, num_in=20, num_out=12), kv_tokens=5 * 16, max_model_len=48)
    assert max(scarce.num_running) <= 2
    assert max(place.run(work(8, num_in=20, num_out=12)).num_running) > 2
    run = place.run(work(4), kv_tokens=64 * 2, max_model_len=64, kv_allocation="contiguous-max")
    assert max(run.num_running) == 2 and run.mean_waste > 0.7, "the longest request is reserved for"


def no_engine(**options: Any) -> LLMEngine:
    raise AssertionError("no engine is needed")


def session(**options: Any) -> Session:
    return Session(load=no_engine, model_name="none", **{"has_gpu": False, **options})


@pytest.mark.parametrize(
    ("name", "options", "is_engine"),
    [
        ("eras", {}, True),
        ("eras", {"on": "simulator"}, False),
        ("orca", {"has_gpu": True}, False),
        ("orca", {"on": "engine"}, True),
        ("kv-waste", {}, False),
        ("kv-waste", {"has_gpu": True}, True),
        ("kv-waste", {"has_gpu": True, "is_quick": True}, False),
        ("queue-depth", {"on": "engine"}, False),
    ],
)
def test_where_a_claim_runs(name: str, options: dict[str, Any], is_engine: bool) -> None:
    assert session(**options)._is_on_engine(CLAIMS[name]) is is_engine


@pytest.mark.parametrize(
    ("on", "measured"), [("auto", ["simulator"]), ("both", ["simulator"]), ("engine", []), ("simulator", ["simulator"])]
)
def test_what_the_engine_cannot_measure_is_simulated_unless_only_the_engine_was_asked_for(
    on: On, measured: list[str], shape: dict[str, Any]
) -> None:
    def measure(context: Context) -> Outcome:
        if context.where == "engine":
            raise Infeasible("it takes a larger machine")
        return row("eras", where=context.where).outcome

    claim = dataclasses.replace(CLAIMS["eras"], measure=measure)
    said: list[str] = []
    load = lambda **more: LLMEngine.from_config(EngineConfig.from_options(**shape, **more))  # noqa: E731
    at = Session(load=load, model_name="tiny", has_gpu=False, on=on, say=said.append)
    try:
        assert [one.outcome.where for one in at.measure(claim)] == measured
    finally:
        at.close()
    why = "eras: not measured on the engine: it takes a larger machine"
    assert said.count(why) == (on != "simulator")


def test_a_simulation_says_how_good_its_calibration_is() -> None:
    assert SimulatedTestbed(calibration()).trust == "mean error of steps 2.7%"
    unknown = dataclasses.replace(calibration(), cost=CostModel.of_terms(decode_constant=0.01))
    assert "not known" in SimulatedTestbed(unknown).trust


def test_the_command_measures_merges_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "results")
    priced = ["--price-per-hour", "3.6"]
    assert main(["claims", "kv-quantisation", "--quick", *priced, "--output", folder]) == 0
    assert main(["claims", "prefix-sharing", "--quick", "--on", "simulator", "--output", folder, "--note", "n"]) == 0
    printed = capsys.readouterr()
    assert "where it differs and why:" in printed.out and "kv-quantisation: 16 bits" in printed.err
    rows = json.loads((tmp_path / "results" / "claims.json").read_text())["rows"]
    assert [row["claim"]["id"] for row in rows] == ["prefix-sharing", "kv-quantisation"]
    assert all(row["outcome"]["where"] == "simulator" and row["trust"] for row in rows)
    assert "prices" not in rows[0] and set(rows[1]["prices"]) == {"16 bits", "fp8"}
    prices = rows[1]["prices"]
    assert prices["fp8"]["all in"] < prices["16 bits"]["all in"], "more requests fit into the memory"
    assert "price, fp8:" in printed.out and rows[1]["command"].endswith("--price-per-hour 3.6")
    table = (tmp_path / "results" / "claims.md").read_text()
    assert "prefix-sharing" in table and "price/M input tokens | price/M output tokens | all in |" in table
    page = (tmp_path / "results" / "claims.html").read_text()
    assert page.count("<figure>") == 2 and "What a million tokens cost" in page


def test_the_command_runs_on_a_real_engine(shape: dict[str, Any], tmp_path: Path) -> None:
    flags = [part for name, value in shape.items() for part in ("--" + name.replace("_", "-"), str(value))]
    assert main(["claims", "batch-size", "--quick", *flags, "--output", str(tmp_path / "out")]) == 0
    (row,) = json.loads((tmp_path / "out" / "claims.json").read_text())["rows"]
    assert row["outcome"]["where"] == "engine" and row["trust"] == ""
    assert row["flags"].startswith("--model tiny.json")
    assert str(tmp_path) not in json.dumps(row)


def test_without_any_row_nothing_is_written(
    shape: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [part for name, value in shape.items() for part in ("--" + name.replace("_", "-"), str(value))]
    folder = tmp_path / "out"
    assert main(["claims", "sampling-spread", "--quick", "--on", "engine", *flags, "--output", str(folder)]) == 2
    printed = capsys.readouterr().err
    assert "sampling-spread: not measured on the engine: answers have to mean something" in printed
    assert "None of these claims could be measured" in printed and "Wrote" not in printed
    assert not list(folder.iterdir())


def test_the_list_names_all_claims_and_a_wrong_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claims", "--list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in CLAIMS)
    assert main(["claims", "orka"]) == 2
    assert "Did you mean 'orca'?" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="no data directory"):
        session(data_dir=Path("none"))


def test_ways_take_turns_and_the_fastest_round_counts() -> None:
    durations = iter([4.0, 2.0, 1.0, 5.0, 3.0, 9.0])
    served: list[str] = []

    class Noisy(SmallTestbed):
        where: Where = "engine"

        def run(self, work: Any, **options: Any) -> Run:
            served.append(options["scheduling_policy"])
            return Run([RequestTimeline(0.0, 1, 1, [1.0])], next(durations))

    ways = {name: Variant(work(1), {"scheduling_policy": name}) for name in ("fcfs", "sjf")}
    turns = run_alternating(Context(Noisy.open()), ways)
    assert served == ["fcfs", "sjf"] * 3
    assert {name: run.duration_s for name, run in turns.best.items()} == {"fcfs": 1.0, "sjf": 2.0}
    assert "3 rounds" in turns.spread("sjf", "fcfs") and "0.20× to 2.00×" in turns.spread("sjf", "fcfs")


def test_a_model_is_loaded_anew_only_for_other_options(shape: dict[str, Any]) -> None:
    loads: list[dict[str, Any]] = []

    def load(**more: Any) -> LLMEngine:
        loads.append(more)
        return LLMEngine.from_config(EngineConfig.from_options(**shape, **more))

    place = EngineTestbed(load, name="tiny")
    for options in ({"max_model_len": 48}, {"max_model_len": 48}, {}, {}):
        place.use(**options)
        assert place.kv_tokens > 0
    place.use(max_model_len=32)
    assert place.is_cpu and "tiny" in place.description
    place.close()
    assert loads == [{}, {"max_model_len": 48}, {}], "only when the model is needed"


def test_what_was_not_measured_cannot_be_simulated() -> None:
    with pytest.raises(ConfigError, match="'quantization' changes cannot be simulated"):
        SimulatedTestbed(calibration()).use(quantization="int8")


def test_claims_about_kernels_and_formats_measure_the_device(
    shape: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Layers(
        "a tiny model",
        HeadShape(4, 2, 16, "float16", "float32"),
        AttentionWork(2, 1, 32),
        AttentionWork(1, 4, 32),
        Effort(past_cache_bytes=0.0, max_rounds=2, min_rounds=1),
    )
    setup = PagingSetup(block_sizes=(1, 16), kv_tokens=16_384, layers={"cpu": small})
    monkeypatch.setattr(paging_cost, "SETUP", setup)
    batches = dataclasses.replace(weight_formats.SETUP, batches={"cpu": (1, 2)}, num_in=64, num_out=32)
    monkeypatch.setattr(weight_formats, "SETUP", batches)
    flags = [part for name, value in shape.items() for part in ("--" + name.replace("_", "-"), str(value))]
    names = ("paging-cost", "weight-formats")
    assert main(["claims", *names, "--quick", *flags, "--output", str(tmp_path / "out")]) == 0
    kernels, formats = json.loads((tmp_path / "out" / "claims.json").read_text())["rows"]
    assert kernels["outcome"]["where"] == formats["outcome"]["where"] == "engine"
    assert kernels["outcome"]["numbers"]["blocks of 1"]["decode: scattered, µs"] > 0
    assert formats["outcome"]["numbers"]["int8"]["1 at once: ratio"] > 0
