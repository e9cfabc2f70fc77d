"""`headway sim` and `headway tune` from the command line, on a made-up machine.

Requests from a traffic log: lengths and times as logged; a log without times is refused.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import re
import statistics
import tracemalloc
from pathlib import Path

import pytest

from headway.cli.main import main
from headway.errors import ConfigError
from headway.lab.sim import Calibration, CostModel
from headway.lab.sim.calibration import shipped_machines
from headway.lab.tune.tune_command import replica_numbers, traffic_work
from headway.predict import PromptView
from headway.predict.traffic_log import TrafficLog
from tests.unit.lab.sim.machines import calibration


def workload(requests: int, input: range, output: range) -> str:
    """A file of requests with so many tokens."""
    return f"""
requests = {requests}
arrivals = {{ kind = "poisson", rate = 20.0 }}
input = {{ kind = "uniform", low = {input.start}, high = {input.stop} }}
output = {{ kind = "uniform", low = {output.start}, high = {output.stop} }}
"""


WORKLOAD = workload(60, range(4, 40), range(2, 20))


def flags(folder: Path, machine: Calibration, work: str) -> list[str]:
    """These two, as files."""
    machine.save(folder / "machine.json")
    (folder / "work.toml").write_text(work)
    return ["--calibration", str(folder / "machine.json"), "--workload", str(folder / "work.toml")]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return flags(tmp_path, calibration(), WORKLOAD)


def test_sim_writes_the_keys_of_a_benchmark(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = ["--output-json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
    assert main(["sim", *files, *written, "--goodput", "ttft:500", "tpot:50"]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["simulated"] is True
    assert (result["completed"], result["failed"]) == (60, 0)
    assert {"request_throughput", "request_goodput", "mean_ttft_ms", "p99_itl_ms", "p99_e2el_ms"} <= set(result)
    assert result["calibration"]["fit_errors"][0]["kind"] == "decode"
    assert "<svg" in (tmp_path / "r.html").read_text()
    printed = capsys.readouterr().out
    assert printed.startswith("============ Simulated Serving Result")
    assert "Targets, of every request (--goodput): TTFT ≤ 500 ms, TPOT ≤ 50 ms." in printed
    page = (tmp_path / "r.html").read_text()
    assert "TTFT target: 500" in page and "machine: small on a machine, simulated" in page
    assert "seed: 0 of the work, 0 of the steps" in page and "Made by <code>headway sim --calibration" in page
    assert "Simulated, not measured: small on a machine. Mean error of single steps: decode only 2.0%" in printed


def test_sim_gives_the_same_twice_and_takes_the_rate(files: list[str], tmp_path: Path) -> None:
    results = []
    for options in ([], [], ["--rate", "5"]):
        assert main(["sim", *files, *options, "--output-json", str(tmp_path / "r.json")]) == 0
        results.append(json.loads((tmp_path / "r.json").read_text()))
    assert results[0] == results[1]
    assert results[2]["request_throughput"] < 0.5 * results[0]["request_throughput"]


@pytest.mark.parametrize("router", ["round-robin", "prefix-aware"])
def test_sim_takes_no_memory_for_time_in_which_nothing_happens(files: list[str], tmp_path: Path, router: str) -> None:
    """Sixty requests in 19 years, with a page of all charts."""
    output = ["--html", str(tmp_path / "r.html"), "--csv", str(tmp_path / "r.csv"), "--replicas", "2"]
    tracemalloc.start()
    try:
        assert main(["sim", *files, "--rate", "1e-7", "--router", router, "--goodput", "ttft:500", *output]) == 0
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()
    assert (tmp_path / "r.html").stat().st_size < 500_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", ""], "--policy: there is no scheduling policy ''"),
        (["--policy", "fcfs,"], "--policy: there is no scheduling policy ''"),
        (["--replicas", "100000"], "at most 256 replicas, not 100,000"),
        (["--roles", "prefill=100000,decode=1"], "at most 256 replicas, not 100,001"),
        (["--rate", "1e-12"], "(31 years)"),
        (["--set", "input={ kind = 'lognormal', median = 50, sigma = 1e4 }"], "sigma must be a number of at most 10"),
    ],
)
def test_sim_refuses_what_it_cannot_simulate(
    files: list[str], options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", *files, *options]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--replicas", "1-100000000"], ["--slo", "p99_itl_ms=nan"], ["--rate", "nan"]])
def test_tune_refuses_numbers_that_are_none(
    files: list[str], options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        assert main(["tune", *files, *options]) == 1
    error = capsys.readouterr().err
    assert error.startswith("headway: error: ") and options[-1].split("=")[-1].split("-")[-1] in error


def test_sim_with_replicas(files: list[str], tmp_path: Path) -> None:
    output = ["--output-json", str(tmp_path / "r.json")]
    assert main(["sim", *files, "--replicas", "3", "--router", "least-loaded", *output]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert sum(result["requests_by_replica"]) == 60
    assert min(result["requests_by_replica"]) > 10


@pytest.fixture
def long_files(tmp_path: Path) -> list[str]:
    """Prompts that are worth sending."""
    cost = CostModel.of_terms(decode_constant=0.01, chunk_constant=0.01, tokens_over_0=5e-5)
    gpu = calibration(
        cost,
        max_model_len=1024,
        num_blocks=1000,
        block_size=16,
        cache={},
        scheduler={"max_num_seqs": 32, "max_num_batched_tokens": 1024, "target_itl_ms": 0.0},
    )
    return flags(tmp_path, gpu, workload(40, range(300, 900), range(10, 40)))


def test_sim_with_roles(long_files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = ["--output-json", str(tmp_path / "r.json")]
    roles = ["--roles", "prefill=1,decode=2", "--link-gb-s", "0.1", "--link-latency-us", "50"]
    assert main(["sim", *long_files, *roles, *output]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    num_sent = result["prompts_elsewhere"]
    assert 0 < num_sent <= 40 and result["prefill_replicas"] == 1
    assert sum(result["requests_by_replica"][:2]) == 40 and result["requests_by_replica"][2] == num_sent
    assert 0.0 < result["mean_transfer_ms"] <= result["p99_transfer_ms"]
    assert result["transferred_blocks"] > num_sent and 0.0 <= result["transfer_hidden_share"] <= 1.0
    printed = capsys.readouterr().out
    assert "Decode replicas: 2, with " in printed and "prefill replicas: 1, with " in printed
    assert f"with a simulated link of 0.1 GB/s and 50 µs: {num_sent} prompts (" in printed
    assert main(["sim", *long_files, "--replicas", "3", "--roles", "together", *output]) == 0
    assert "prompts_elsewhere" not in json.loads((tmp_path / "r.json").read_text())
    beyond = ["--roles", "prefill=1,decode=1", "--rate", "2000"]
    assert main(["sim", *long_files, *beyond]) == 0
    assert "Beyond capacity" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--roles", "prefill=1"], "roles are given as prefill=P,decode=D"),
        (["--roles", "prefill=1,decode=1", "--replicas", "3"], "are 2 replicas, not 3"),
        (["--link-gb-s", "25"], "here nothing travels"),
        (["--replicas", "2", "--link-latency-us", "25"], "here nothing travels"),
        (["--roles", "prefill=1,decode=1", "--link-gb-s", "inf"], "'inf' is not a number of at least 0.001"),
        (["--roles", "prefill=1,decode=1", "--no-enable-prefix-caching"], "prefix cache"),
        (["--tensor-parallel-size", "2"], "headway calibrate --tensor-parallel-size 2"),
    ],
)
def test_sim_refuses_roles_and_links_that_mean_nothing(
    long_files: list[str], options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        assert main(["sim", *long_files, *options]) != 0
    assert message in capsys.readouterr().err


def test_sim_with_ranks(long_files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What they tell each other takes time, more on a slower link, and is said to be computed."""
    divided = dataclasses.replace(
        Calibration.load(long_files[1]), tensor_parallel_size=4, num_layers=20, hidden_size=4096
    )
    divided.save(tmp_path / "rank.json")
    files = ["--calibration", str(tmp_path / "rank.json"), *long_files[2:]]
    tpots = []
    for options in (long_files, [*files, "--tensor-parallel-size", "4"], [*files, "--link-gb-s", "10"]):
        assert main(["sim", *options, "--output-json", str(tmp_path / "r.json")]) == 0
        tpots.append(json.loads((tmp_path / "r.json").read_text())["mean_tpot_ms"])
    assert tpots[0] < tpots[1] < tpots[2]
    assert "4 ranks: steps of one were measured alone" in capsys.readouterr().out


def test_sim_compares_policies(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = ["--output-json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
    assert main(["sim", *files, "--policy", "fcfs,sjf", "--rate", "100", *written]) == 0
    fcfs, sjf = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert (fcfs["policy"], sjf["policy"], fcfs["rate"], fcfs["seed"]) == ("fcfs", "sjf", 100.0, 0)
    assert sjf["mean_ttft_ms"] < fcfs["mean_ttft_ms"]
    printed = capsys.readouterr().out
    assert printed.startswith("Simulated: work on a machine, small")
    assert "did the same" not in printed


def test_sim_says_when_a_load_is_beyond_capacity(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", *files, "--rate", "1"]) == 0
    assert "Beyond capacity" not in capsys.readouterr().out
    assert main(["sim", *files, "--rate", "100"]) == 0
    assert re.search(r"Beyond capacity: \S+/s offered, \S+/s served \(about \S+/s can be\)", capsys.readouterr().out)
    assert main(["sim", *files, "--rate", "inf"]) == 0  # nobody offered a rate
    assert "Beyond capacity" not in capsys.readouterr().out


def test_a_short_run_whose_answers_take_long_is_not_beyond_capacity(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of what comes is served, since the last answers take as long as all arrivals; yet seats are free."""
    flat = CostModel.of_terms(decode_constant=0.01, chunk_constant=0.01)
    calibration(flat, num_blocks=4000).save(tmp_path / "machine.json")
    long_answers = ["--set", "output.low=100", "--set", "output.high=100", "--requests", "6", "--rate", "5"]
    assert main(["sim", *files, *long_answers, "--output-json", str(tmp_path / "r.json")]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["request_throughput"] < 0.7 * result["offered_request_rate"]
    assert not result["beyond_capacity"] and "Beyond capacity" not in capsys.readouterr().out


def test_sim_says_why_policies_tie(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", *files, "--policy", "fcfs,sjf", "--rate", "1,100"]) == 0
    printed = capsys.readouterr().out
    assert "fcfs and sjf did the same to every request: no request waited for a seat" in printed
    assert "(at 1 requests/s)" in printed
    assert [line.split()[:2] for line in printed.splitlines()[3:7]] == [
        ["fcfs", "1"],
        ["sjf", "1"],
        ["fcfs", "100"],
        ["sjf", "100"],
    ]


CLASSES = """
[[classes]]
tenant = "app"
ttft_target_s = 0.2
tpot_target_s = 0.1

[[classes]]
tenant = "batch"
"""


@pytest.fixture
def classes(files: list[str], tmp_path: Path) -> list[str]:
    (tmp_path / "work.toml").write_text(WORKLOAD + CLASSES)
    return files


def test_sim_shows_each_class(classes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = ["--output-json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
    assert main(["sim", *classes, "--rate", "100", "--policy", "fcfs,slo", *written]) == 0
    fcfs, slo = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert sum(fcfs["classes"][name]["completed"] for name in ("app", "batch")) == 60
    assert fcfs["classes"]["batch"]["goodput_share"] == 1.0  # nothing is promised to it
    assert slo["classes"]["app"]["goodput_share"] > fcfs["classes"]["app"]["goodput_share"]
    printed = capsys.readouterr().out
    assert "Targets of the workload's classes: app: TTFT ≤ 200 ms, TPOT ≤ 100 ms; batch: none." in printed
    rows = [line.split() for line in printed[printed.index("By class:") :].splitlines()]
    assert [row[:2] for row in rows[2:6]] == [["app", "fcfs"], ["app", "slo"], ["batch", "fcfs"], ["batch", "slo"]]
    assert "TTFT target app: 200" in (tmp_path / "r.html").read_text()


def test_sim_with_several_seeds_shows_intervals(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", *files, "--seeds", "3", "--output-json", str(tmp_path / "r.json")]) == 0
    runs = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert [run["seed"] for run in runs] == [0, 1, 2]
    values = [run["p50_ttft_ms"] for run in runs]
    assert len(set(values)) == 3
    half = 4.30 * statistics.stdev(values) / 3**0.5
    printed = capsys.readouterr().out
    assert f"{statistics.fmean(values):,.1f} ±{half:,.1f}" in printed
    assert "Means over 3 seeds, ± half of the 95% interval of the mean." in printed


def test_sim_writes_a_line_for_each_request(classes: list[str], tmp_path: Path) -> None:
    written = ["--csv", str(tmp_path / "r.csv"), "--output-json", str(tmp_path / "r.json")]
    assert main(["sim", *classes, "--policy", "fcfs,sjf", "--rate", "5,100", *written]) == 0
    with (tmp_path / "r.csv").open() as file:
        rows = list(csv.DictReader(file))
    runs = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert len(rows) == 4 * 60
    for number, run in enumerate(runs):
        own = rows[60 * number : 60 * number + 60]
        assert {(row["policy"], row["rate"]) for row in own} == {(run["policy"], f"{run['rate']:g}")}
        assert statistics.fmean(float(row["ttft_ms"]) for row in own) == pytest.approx(run["mean_ttft_ms"], abs=1e-3)
        assert statistics.fmean(int(row["met_targets"]) for row in own) == pytest.approx(run["goodput_share"])


def test_the_batch_is_seen_empty_while_there_is_nothing_to_do(files: list[str], tmp_path: Path) -> None:
    """However many steps lie before: samples of them are thinned, those of an idle machine are not."""
    from headway.lab.sim.setup import set_up
    from headway.lab.sim.simulate import simulate
    from headway.lab.workload.bench_requests import BenchRequest

    setup = set_up(calibration(), {})
    work = [BenchRequest([1], 200, arrival_s=10.0 * number) for number in range(40)]
    done = simulate(work, setup.machine, setup.scheduler, setup.cache)
    assert done.num_steps > 4_000  # more than samples are kept
    idle = [sample.at_s for sample in done.samples if sample.num_running == 0]
    assert idle == [timeline.token_times_s[-1] for timeline in done.timelines]


def test_a_shipped_machine_is_found_by_its_name(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "h200-llama31-8b"
    assert main(["sim", "--calibration", name, *files[2:]]) == 0
    assert "llama31-8b on NVIDIA H200" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["sim", "--help"])
    told = "".join(capsys.readouterr().out.split())
    assert all(each in told for each in shipped_machines())


@pytest.mark.parametrize("name", shipped_machines())
def test_shipped_machines_can_be_simulated(name: str, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _, _, num_ranks = name.partition("-tp")
    assert Calibration.find(name).tensor_parallel_size == int(num_ranks or 1)
    assert main(["sim", "--calibration", name, *files[2:]]) == 0
    told = capsys.readouterr().out
    assert f"{name.split('-', 1)[1].partition('-tp')[0]} on NVIDIA H200" in told
    assert (f"{num_ranks} ranks: steps of one were measured alone" in told) == bool(num_ranks)


def test_tune_recommends_what_is_better(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps cost the same whatever is in them: a larger batch is better when all come at once."""
    flat = CostModel.of_terms(decode_constant=0.01, chunk_constant=0.01)
    calibration(flat, num_blocks=4000).save(tmp_path / "machine.json")
    written = ["--output-json", str(tmp_path / "t.json"), "--html", str(tmp_path / "t.html")]
    assert main(["tune", *files, "--rate", "inf", "--trials", "10", *written]) == 0
    result = json.loads((tmp_path / "t.json").read_text())
    assert result["recommended"]["max_num_seqs"] == 16
    assert not result["is_default"]
    assert "Pareto front" in (tmp_path / "t.html").read_text()
    printed = capsys.readouterr().out
    assert "Recommended: --max-num-seqs 16" in printed
    assert "The block size stays at 4" in printed


def test_tune_counts_by_the_targets_of_the_classes_as_sim_does(
    classes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, load = ["--output-json", str(tmp_path / "r.json")], ["--rate", "100"]
    assert main(["sim", *classes, *load, *out]) == 0
    simulated = json.loads((tmp_path / "r.json").read_text())
    assert main(["tune", *classes, *load, "--trials", "2", "--html", str(tmp_path / "t.html"), *out]) == 0
    tuned = json.loads((tmp_path / "r.json").read_text())
    assert tuned["default"]["good_share"] == pytest.approx(simulated["goodput_share"])
    assert 0.0 < tuned["default"]["good_share"] < 1.0
    printed = capsys.readouterr().out
    assert printed.count("Targets of the workload's classes: app: TTFT ≤ 200 ms, TPOT ≤ 100 ms; batch: none.") == 2
    assert re.search(r"Beyond capacity: \S+/s offered, \S+/s served \(about \S+/s can be\) by default", printed)
    assert "* P99 of 60 requests" in printed
    page = (tmp_path / "t.html").read_text()
    assert "targets: 1" in page and "Beyond capacity" in page and "0 of the search" in page


def test_tune_says_how_many_replicas_are_enough(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The number that it names keeps the target in `headway sim`, too; the next smaller one does not."""
    written = ["--output-json", str(tmp_path / "t.json"), "--html", str(tmp_path / "t.html")]
    load, target = ["--rate", "60"], ["--slo", "p99_ttft_ms=300"]
    given = ["--scheduling-policy", "fcfs", "--router", "least-loaded", "--replicas", "1-12", "--trials", "2"]
    assert main(["tune", *files, *load, *target, *given, *written]) == 0
    result = json.loads((tmp_path / "t.json").read_text())
    enough = result["replicas"]
    assert 1 < enough < 12 and result["router"] == "least-loaded"
    by_number = {one["replicas"]: one for one in result["tried"]}
    assert by_number[enough]["is_enough"] and not by_number[enough - 1]["is_enough"]
    assert len(by_number) <= 7, "it does not try every number"
    printed = capsys.readouterr().out
    assert f"Recommended: --replicas {enough} --router least-loaded" in printed
    missed = by_number[enough - 1]["predicted"]["p99_ttft_ms"]
    assert missed > 300
    assert f"p99_ttft_ms is {missed:,.4g}, {missed / 300:.3g} times its bound of 300; " in printed
    assert "multiple of its bound" in (tmp_path / "t.html").read_text()
    options = [
        text
        for name, value in by_number[enough]["options"].items()
        if value is not None
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    out = ["--output-json", str(tmp_path / "s.json")]
    assert main(["sim", *files, *load, "--replicas", str(enough), *options, *out]) == 0
    simulated = json.loads((tmp_path / "s.json").read_text())
    assert simulated["p99_ttft_ms"] == pytest.approx(by_number[enough]["predicted"]["p99_ttft_ms"])
    assert simulated["p99_ttft_ms"] <= 300


def test_tune_says_that_no_number_of_replicas_is_enough(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--output-json", str(tmp_path / "t.json")]
    few = ["--rate", "200", "--slo", "p99_ttft_ms=50", "--replicas", "2,1", "--router", "all", "--trials", "1"]
    assert main(["tune", *files, *few, *out]) == 0
    result = json.loads((tmp_path / "t.json").read_text())
    assert result["replicas"] is None and result["recommended"] == {}
    assert [one["replicas"] for one in result["tried"]][-1] == 2
    printed = capsys.readouterr().out
    assert "No number of replicas that was given keeps the targets" in printed
    assert "Not enough, at their best: --replicas 2 --router" in printed
    assert "Beyond capacity with 2:" in printed


def test_tune_finds_replicas_for_the_targets_of_classes(classes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *classes, "--rate", "10", "--replicas", "6-8", "--trials", "1"]) == 0
    printed = capsys.readouterr().out
    assert "Recommended: --replicas 6 --router prefix-aware · the fewest that keep the targets" in printed
    assert "That is the smallest number that was given." in printed


def test_tune_says_whether_replicas_should_have_roles(
    long_files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gaps of 15 ms cannot be kept beside prompts of 300 tokens; with nearly all of them elsewhere they can. What it
    names does so in `headway sim`, too."""
    out = ["--output-json", str(tmp_path / "t.json")]
    given = ["--max-num-seqs", "32", "--max-num-batched-tokens", "1024", "--target-itl-ms", "0", "--prefill-mode"]
    given += ["chunked", "--max-chunk-tokens", "1024", "--scheduling-policy", "fcfs", "--trials", "1"]
    load = ["--rate", "15", "--slo", "p99_itl_ms=15", "--replicas", "2-3"]
    assert main(["tune", *long_files, *load, *given, *out]) == 0
    assert json.loads((tmp_path / "t.json").read_text())["replicas"] is None
    assert main(["tune", *long_files, *load, *given, "--roles", "all", *out]) == 0
    result = json.loads((tmp_path / "t.json").read_text())
    printed = capsys.readouterr().out
    assert result["replicas"] == 2 and result["roles"] == "prefill=1,decode=1"
    assert "Recommended: --replicas 2 --router prefix-aware --roles prefill=1,decode=1 · " in printed
    assert "The link between devices is simulated, with 450 GB/s and 8 µs." in printed
    named = ["--replicas", "2", "--router", "prefix-aware", "--roles", "prefill=1,decode=1", "--rate", "15"]
    assert main(["sim", *long_files, *named, *given[:-2], "--output-json", str(tmp_path / "s.json")]) == 0
    assert json.loads((tmp_path / "s.json").read_text())["p99_itl_ms"] <= 15


def test_tune_says_among_how_many_devices_a_model_should_be_divided(
    long_files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks compute twice as fast: a first token within 30 ms takes two devices as one replica, and no number of
    single ones does it."""
    whole = Calibration.load(long_files[1])
    half = dataclasses.replace(whole.scaled(0.4), tensor_parallel_size=2, num_layers=4, hidden_size=256)
    half.save(tmp_path / "half.json")
    files = [*long_files, "--calibration", str(tmp_path / "half.json")]
    out = ["--output-json", str(tmp_path / "t.json"), "--html", str(tmp_path / "t.html")]
    load = ["--rate", "2", "--slo", "p95_ttft_ms=40", "--replicas", "1-2", "--trials", "1"]
    assert main(["tune", *files, *load, *out]) == 0
    result = json.loads((tmp_path / "t.json").read_text())
    assert (result["recommended"]["replicas"], result["recommended"]["tensor_parallel_size"]) == (1, 2)
    assert [one["tensor_parallel_size"] for one in result["by_ranks"]] == [1, 2]
    printed = capsys.readouterr().out
    assert "With the fewest devices: Recommended: --replicas 1 --tensor-parallel-size 2" in printed
    assert "Otherwise: No number of replicas that was given keeps the targets" in printed
    assert "--tensor-parallel-size 2" in (tmp_path / "t.html").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--roles", "all"], "give --replicas"),
        (["--link-gb-s", "25", "--replicas", "1-2", "--slo", "p99_itl_ms=20"], "here nothing travels"),
        (["--tensor-parallel-size", "2"], "headway calibrate --tensor-parallel-size 2"),
        (["--calibration", "h200-llama31-8b"], "without it, give one"),
        (["--calibration", "h200-llama31-8b", "--replicas", "1-2"], "of one model"),
        (
            ["--roles", "all", "--replicas", "1-2", "--slo", "p99_itl_ms=20", "--no-enable-prefix-caching"],
            "which is off",
        ),
    ],
)
def test_tune_refuses_roles_and_ranks_that_mean_nothing(
    long_files: list[str], options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *long_files, *options]) != 0
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "numbers"), [("3", [3]), ("1-4", [1, 2, 3, 4]), ("8,1-2,2", [1, 2, 8]), ("256", [256])]
)
def test_numbers_of_replicas(text: str, numbers: list[int]) -> None:
    assert replica_numbers(text) == numbers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "'0' is not a whole number of at least 1"),
        ("0-3", "'0' is not a whole number of at least 1"),
        ("5-3", "'5-3' is an empty range: write 3-5"),
        ("", "'' is not a whole number"),
        ("1-", "'' is not a whole number"),
        ("1,,2", "'' is not a whole number"),
        ("two", "'two' is not a whole number"),
        ("1.5", "'1.5' is not a whole number"),
        ("1-2-3", "'2-3' is not a whole number"),
    ],
)
def test_numbers_of_replicas_that_are_none(
    files: list[str], text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["tune", *files, "--replicas", text, "--slo", "p99_ttft_ms=300"])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sim", "--calibration", "h200-llama31-8"], "Did you mean 'h200-llama31-8b'?"),
        (["sim", "--calibration", "tpu"], f"They are: {', '.join(shipped_machines())}."),
        (["sim", "--calibration", "tpu.json"], "Cannot read the calibration 'tpu.json'"),
        (["sim", "--csv", "/nowhere/at/all.csv"], "no folder"),
        (["sim", "--policy", "fcfs,sfj"], "Did you mean 'sjf'?"),
        (["sim", "--policy", "fcfs", "--scheduling-policy", "sjf"], "give one of the two"),
        (["sim", "--kv-cache-dtype", "int8"], "calibrate an engine with it"),
        (["sim", "--set", "input.low=300", "--set", "input.high=400"], "takes at most 256"),
        (["sim", "--html", "/nowhere/at/all.html"], "no folder"),
        (["tune", "--slo", "p99_itl=5"], "p99_itl_ms"),
        (["tune", "--replicas", "1-4"], "Give --slo, e.g. p99_ttft_ms=1000, or a workload whose classes have targets"),
        (["tune", "--router", "all"], "give --replicas, e.g. 1-16"),
        (["tune", "--replicas", "2", "--slo", "p99_ttft_ms=9", "--verify", "1"], "does not go with --replicas"),
        (["tune", "--traffic-log", "log.jsonl"], "give --workload FILE.toml, or --traffic-log FILE"),
    ],
)
def test_errors_are_one_line(
    files: list[str], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *options = arguments
    assert main([command, *files, *options]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def write(path: Path, *rows: tuple[float | None, int, int, str]) -> None:
    """(arrival, tokens in, tokens out, how it ended)"""
    with TrafficLog(path) as log:
        for arrival_s, num_in, num_out, reason in rows:
            log.write(
                PromptView([1] * num_in, max_tokens=100, temperature=1.0, text=None, user=None),
                num_output_tokens=num_out,
                finish_reason=reason,
                arrival_s=arrival_s,
            )


def test_lengths_and_times(tmp_path: Path) -> None:
    write(tmp_path / "log", (1012.0, 7, 3, "stop"), (1010.0, 5, 9, "length"), (1011.0, 5, 1, "abort"))
    work = traffic_work([tmp_path / "log"], vocab_size=100)
    assert [(r.arrival_s, r.num_prompt_tokens, r.num_output_tokens) for r in work] == [(0.0, 5, 9), (2.0, 7, 3)]
    assert work == traffic_work([tmp_path / "log"], vocab_size=100)


def test_a_log_without_times_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "log", (1012.0, 7, 3, "stop"), (None, 5, 9, "stop"))
    with pytest.raises(ConfigError, match="1 of 2 requests .* no time of arrival"):
        traffic_work([tmp_path / "log"], vocab_size=100)


def test_an_empty_log_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "log", (1.0, 7, 3, "abort"))
    with pytest.raises(ConfigError, match="no request"):
        traffic_work([tmp_path / "log"], vocab_size=100)
