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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.cli.main import main
from headway.errors import ConfigError
from headway.predict import PromptView
from headway.predict.traffic_log import TrafficLog
from headway_lab.sim import Calibration, CostModel
from headway_lab.sim.calibration import shipped_machines
from headway_lab.tune.traffic_work import traffic_work
from headway_lab.tune.tune_command import replica_numbers
from tests.lab.sim.machines import calibration


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


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Any]:
    """Runs a command, and reads the result that it writes."""

    def result(command: str, files: list[str], *options: str) -> Any:
        path = tmp_path / "result.json"
        assert main([command, *files, *options, "--output-json", str(path)]) == 0
        return json.loads(path.read_text())

    return result


def test_sim_writes_the_keys_of_a_benchmark(
    run: Callable[..., Any], files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run("sim", files, "--html", str(tmp_path / "r.html"), "--goodput", "ttft:500", "tpot:50")
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


def test_sim_with_roles(run: Callable[..., Any], long_files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    roles = ["--roles", "prefill=1,decode=2", "--link-gb-s", "0.1", "--link-latency-us", "50"]
    result = run("sim", long_files, *roles)
    num_sent = result["prompts_elsewhere"]
    assert 0 < num_sent <= 40 and result["prefill_replicas"] == 1
    assert sum(result["requests_by_replica"][:2]) == 40 and result["requests_by_replica"][2] == num_sent
    assert 0.0 < result["mean_transfer_ms"] <= result["p99_transfer_ms"]
    assert result["transferred_blocks"] > num_sent and 0.0 <= result["transfer_hidden_share"] <= 1.0
    printed = capsys.readouterr().out
    assert "Decode replicas: 2, with " in printed and "prefill replicas: 1, with " in printed
    assert f"with a simulated link of 0.1 GB/s and 50 µs: {num_sent} prompts (" in printed
    assert "prompts_elsewhere" not in run("sim", long_files, "--replicas", "3", "--roles", "together")
    run("sim", long_files, "--roles", "prefill=1,decode=1", "--rate", "2000")
    assert "Beyond capacity" in capsys.readouterr().out


def test_sim_with_ranks(
    run: Callable[..., Any], long_files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What they tell each other takes time, more on a slower link, and is said to be computed."""
    divided = dataclasses.replace(
        Calibration.load(long_files[1]), tensor_parallel_size=4, num_layers=20, hidden_size=4096
    )
    divided.save(tmp_path / "rank.json")
    files = ["--calibration", str(tmp_path / "rank.json"), *long_files[2:]]
    ways = (long_files, [*files, "--tensor-parallel-size", "4"], [*files, "--link-gb-s", "10"])
    tpots = [run("sim", options)["mean_tpot_ms"] for options in ways]
    assert tpots[0] < tpots[1] < tpots[2]
    assert "4 ranks: steps of one were measured alone" in capsys.readouterr().out


def test_sim_says_when_a_load_is_beyond_capacity(
    run: Callable[..., Any], files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not of a rate that nobody offered, and not of a short run whose last answers take as long as all arrivals:
    half of what comes is served, yet seats are free."""
    assert run("sim", files, "--rate", "100")["beyond_capacity"]
    assert re.search(r"Beyond capacity: \S+/s offered, \S+/s served \(about \S+/s can be\)", capsys.readouterr().out)
    for rate in ("1", "inf"):
        run("sim", files, "--rate", rate)
        assert "Beyond capacity" not in capsys.readouterr().out
    flat = CostModel.of_terms(decode_constant=0.01, chunk_constant=0.01)
    calibration(flat, num_blocks=4000).save(tmp_path / "machine.json")
    long_answers = ["--set", "output.low=100", "--set", "output.high=100", "--requests", "6", "--rate", "5"]
    result = run("sim", files, *long_answers)
    assert result["request_throughput"] < 0.7 * result["offered_request_rate"]
    assert not result["beyond_capacity"] and "Beyond capacity" not in capsys.readouterr().out


def test_sim_says_why_policies_tie(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", *files, "--policy", "fcfs,sjf", "--rate", "1,100"]) == 0
    printed = capsys.readouterr().out
    assert "fcfs and sjf did the same to every request: no request waited for a seat" in printed
    assert "(at 1 requests/s)" in printed
    rows = [line.split()[:2] for line in printed.splitlines()[3:7]]
    assert rows == [["fcfs", "1"], ["sjf", "1"], ["fcfs", "100"], ["sjf", "100"]]


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


def test_sim_shows_each_class(
    run: Callable[..., Any], classes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "r.html"
    fcfs, slo = run("sim", classes, "--rate", "100", "--policy", "fcfs,slo", "--html", str(page))["runs"]
    assert sum(fcfs["classes"][name]["completed"] for name in ("app", "batch")) == 60
    assert fcfs["classes"]["batch"]["goodput_share"] == 1.0  # nothing is promised to it
    assert slo["classes"]["app"]["goodput_share"] > fcfs["classes"]["app"]["goodput_share"]
    printed = capsys.readouterr().out
    assert "Targets of the workload's classes: app: TTFT ≤ 200 ms, TPOT ≤ 100 ms; batch: none." in printed
    rows = [line.split() for line in printed[printed.index("By class:") :].splitlines()]
    assert [row[:2] for row in rows[2:6]] == [["app", "fcfs"], ["app", "slo"], ["batch", "fcfs"], ["batch", "slo"]]
    assert "TTFT target app: 200" in page.read_text()


def test_sim_prices_tokens_by_the_time_of_steps(
    run: Callable[..., Any], files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On two replicas: two devices are paid while the run lasts. One or several cases show it, and so does a page."""
    page = tmp_path / "r.html"
    result = run("sim", files, "--replicas", "2", "--price-per-hour", "3.6", "--html", str(page))
    price = 2 * 3.6 / 3600 * result["duration"]
    num_in, num_out = result["total_input_tokens"], result["total_output_tokens"]
    paid = num_in * result["price_per_million_input_tokens"] + num_out * result["price_per_million_output_tokens"]
    assert paid == pytest.approx(1e6 * price)
    assert 0.0 < result["prompt_time_share"] < 1.0 and result["price_devices"] == 2
    assert result["price_per_million_output_tokens_all_in"] == pytest.approx(1e6 * price / num_out)
    printed = capsys.readouterr().out
    assert "Price per 1M input tokens:" in printed and "Prices: 2 devices at 3.6 an hour each; prompts took" in printed
    assert "price per 1M tokens, in / out" in page.read_text()
    run("sim", files, "--rate", "5,50", "--price-per-hour", "3.6")
    header, slow, fast = capsys.readouterr().out.splitlines()[2:5]
    assert header.endswith("price/M in  price/M out")
    assert float(fast.split()[-1]) < float(slow.split()[-1]), "a device that waits costs as much"
    assert not [key for key in run("sim", files) if "price" in key]


def test_sim_with_several_seeds_shows_intervals(
    run: Callable[..., Any], files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    runs = run("sim", files, "--seeds", "3")["runs"]
    assert [one["seed"] for one in runs] == [0, 1, 2]
    values = [one["p50_ttft_ms"] for one in runs]
    assert len(set(values)) == 3
    half = 4.30 * statistics.stdev(values) / 3**0.5
    printed = capsys.readouterr().out
    assert f"{statistics.fmean(values):,.1f} ±{half:,.1f}" in printed
    assert "Means over 3 seeds, ± half of the 95% interval of the mean." in printed


def test_sim_writes_a_line_for_each_request(run: Callable[..., Any], classes: list[str], tmp_path: Path) -> None:
    table = tmp_path / "r.csv"
    runs = run("sim", classes, "--policy", "fcfs,sjf", "--rate", "5,100", "--csv", str(table))["runs"]
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == 4 * 60
    for number, one in enumerate(runs):
        own = rows[60 * number : 60 * number + 60]
        assert {(row["policy"], row["rate"]) for row in own} == {(one["policy"], f"{one['rate']:g}")}
        assert statistics.fmean(float(row["ttft_ms"]) for row in own) == pytest.approx(one["mean_ttft_ms"], abs=1e-3)
        assert statistics.fmean(int(row["met_targets"]) for row in own) == pytest.approx(one["goodput_share"])


@pytest.mark.parametrize("name", shipped_machines())
def test_shipped_machines_can_be_simulated(name: str, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _, _, num_ranks = name.partition("-tp")
    assert Calibration.find(name).tensor_parallel_size == int(num_ranks or 1)
    assert main(["sim", "--calibration", name, *files[2:]]) == 0
    told = capsys.readouterr().out
    assert f"{name.split('-', 1)[1].partition('-tp')[0]} on NVIDIA H200" in told
    assert (f"{num_ranks} ranks: steps of one were measured alone" in told) == bool(num_ranks)


def test_tune_recommends_what_is_better(
    run: Callable[..., Any], files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps cost the same whatever is in them: a larger batch is better when all come at once."""
    flat = CostModel.of_terms(decode_constant=0.01, chunk_constant=0.01)
    calibration(flat, num_blocks=4000).save(tmp_path / "machine.json")
    result = run("tune", files, "--rate", "inf", "--trials", "10", "--html", str(tmp_path / "t.html"))
    assert result["recommended"]["max_num_seqs"] == 16
    assert not result["is_default"]
    assert "Pareto front" in (tmp_path / "t.html").read_text()
    printed = capsys.readouterr().out
    assert "Recommended: --max-num-seqs 16" in printed
    assert "Not searched: " in printed and "steps were measured with blocks of 4 tokens" in printed


def test_tune_counts_by_the_targets_of_the_classes_as_sim_does(
    run: Callable[..., Any], classes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated = run("sim", classes, "--rate", "100")
    tuned = run("tune", classes, "--rate", "100", "--trials", "2", "--html", str(tmp_path / "t.html"))
    assert tuned["default"]["good_share"] == pytest.approx(simulated["goodput_share"])
    assert 0.0 < tuned["default"]["good_share"] < 1.0
    printed = capsys.readouterr().out
    assert printed.count("Targets of the workload's classes: app: TTFT ≤ 200 ms, TPOT ≤ 100 ms; batch: none.") == 2
    assert re.search(r"Beyond capacity: \S+/s offered, \S+/s served \(about \S+/s can be\) by default", printed)
    assert "* P99 of 60 requests" in printed
    page = (tmp_path / "t.html").read_text()
    assert "targets: 1" in page and "Beyond capacity" in page and "0 of the search" in page
    run("tune", classes, "--rate", "10", "--replicas", "6-8", "--trials", "1")
    printed = capsys.readouterr().out
    assert "Recommended: --replicas 6 --router prefix-aware · the fewest that keep the targets" in printed
    assert "That is the smallest number that was given." in printed


def test_tune_says_how_many_replicas_are_enough(
    run: Callable[..., Any], files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The number that it names keeps the target in `headway sim`, too; the next smaller one does not."""
    load, target = ["--rate", "60"], ["--slo", "p99_ttft_ms=300"]
    given = ["--scheduling-policy", "fcfs", "--router", "least-loaded", "--replicas", "1-12", "--trials", "2"]
    result = run("tune", files, *load, *target, *given, "--html", str(tmp_path / "t.html"))
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
    simulated = run("sim", files, *load, "--replicas", str(enough), *options)
    assert simulated["p99_ttft_ms"] == pytest.approx(by_number[enough]["predicted"]["p99_ttft_ms"])
    assert simulated["p99_ttft_ms"] <= 300


def test_tune_says_whether_replicas_should_have_roles(
    run: Callable[..., Any], long_files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Gaps of 15 ms cannot be kept beside prompts of 300 tokens; with nearly all of them elsewhere they can. What it
    names does so in `headway sim`, too."""
    given = ["--max-num-seqs", "32", "--max-num-batched-tokens", "1024", "--target-itl-ms", "0", "--prefill-mode"]
    given += ["chunked", "--max-chunk-tokens", "1024", "--scheduling-policy", "fcfs", "--trials", "1"]
    load = ["--rate", "15", "--slo", "p99_itl_ms=15", "--replicas", "2-3"]
    none = run("tune", long_files, *load, *given)
    assert none["replicas"] is None and none["recommended"] == {} and none["tried"][-1]["replicas"] == 3
    printed = capsys.readouterr().out
    assert "No number of replicas that was given keeps the targets" in printed
    assert "Not enough, at their best: --replicas 3 --router" in printed
    result = run("tune", long_files, *load, *given, "--roles", "all")
    printed = capsys.readouterr().out
    assert result["replicas"] == 2 and result["roles"] == "prefill=1,decode=1"
    assert "Recommended: --replicas 2 --router prefix-aware --roles prefill=1,decode=1 · " in printed
    assert "The link between devices is simulated, with 450 GB/s and 8 µs." in printed
    named = ["--replicas", "2", "--router", "prefix-aware", "--roles", "prefill=1,decode=1", "--rate", "15"]
    assert run("sim", long_files, *named, *given[:-2])["p99_itl_ms"] <= 15


def test_tune_says_among_how_many_devices_a_model_should_be_divided(
    run: Callable[..., Any], long_files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks compute twice as fast: a first token within 30 ms takes two devices as one replica, and no number of
    single ones does it."""
    whole = Calibration.load(long_files[1])
    half = dataclasses.replace(whole.scaled(0.4), tensor_parallel_size=2, num_layers=4, hidden_size=256)
    half.save(tmp_path / "half.json")
    files = [*long_files, "--calibration", str(tmp_path / "half.json")]
    load = ["--rate", "2", "--slo", "p95_ttft_ms=40", "--replicas", "1-2", "--trials", "1"]
    result = run("tune", files, *load, "--html", str(tmp_path / "t.html"))
    assert (result["recommended"]["replicas"], result["recommended"]["tensor_parallel_size"]) == (1, 2)
    assert [one["tensor_parallel_size"] for one in result["by_ranks"]] == [1, 2]
    printed = capsys.readouterr().out
    assert "With the fewest devices: Recommended: --replicas 1 --tensor-parallel-size 2" in printed
    assert "Otherwise: No number of replicas that was given keeps the targets" in printed
    assert "--tensor-parallel-size 2" in (tmp_path / "t.html").read_text()


@pytest.mark.parametrize(
    ("text", "numbers"), [("3", [3]), ("1-4", [1, 2, 3, 4]), ("8,1-2,2", [1, 2, 8]), ("256", [256])]
)
def test_numbers_of_replicas(text: str, numbers: list[int]) -> None:
    assert replica_numbers(text) == numbers


SLO = ["--slo", "p99_ttft_ms=50"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sim", "--calibration", "h200-llama31-8"], "Did you mean 'h200-llama31-8b'?"),
        (["sim", "--calibration", "tpu"], f"They are: {', '.join(shipped_machines())}."),
        (["sim", "--calibration", "tpu.json"], "Cannot read the calibration 'tpu.json'"),
        (["sim", "--policy", "fcfs,"], "--policy: there is no scheduling policy ''"),
        (["sim", "--replicas", "100000"], "at most 256 replicas, not 100,000"),
        (["sim", "--roles", "prefill=100000,decode=1"], "at most 256 replicas, not 100,001"),
        (["sim", "--roles", "prefill=1"], "roles are given as prefill=P,decode=D"),
        (["sim", "--roles", "prefill=1,decode=1", "--replicas", "3"], "are 2 replicas, not 3"),
        (["sim", "--roles", "prefill=1,decode=1", "--no-enable-prefix-caching"], "prefix cache"),
        (["sim", "--roles", "prefill=1,decode=1", "--link-gb-s", "inf"], "'inf' is not a number of at least 0.001"),
        (["sim", "--replicas", "2", "--link-latency-us", "25"], "here nothing travels"),
        (["sim", "--tensor-parallel-size", "2"], "headway calibrate --tensor-parallel-size 2"),
        (["sim", "--rate", "1e-12"], "(31 years)"),
        (["sim", "--csv", "/nowhere/at/all.csv"], "no folder"),
        (["sim", "--policy", "fcfs,sfj"], "Did you mean 'sjf'?"),
        (["sim", "--policy", "fcfs", "--scheduling-policy", "sjf"], "give one of the two"),
        (["sim", "--kv-cache-dtype", "int8"], "calibrate an engine with it"),
        (["sim", "--set", "input.low=1100", "--set", "input.high=1200"], "takes at most 1,024"),
        (
            ["sim", "--set", "input={ kind = 'lognormal', median = 50, sigma = 1e4 }"],
            "sigma must be a number of at most",
        ),
        (["tune", "--slo", "p99_itl=5"], "p99_itl_ms"),
        (["tune", "--slo", "p99_itl_ms=nan"], "'nan'"),
        (["tune", "--slo", "request_throughput=5"], "is a latency"),
        (["tune", "--rate", "nan"], "nan"),
        (["tune", "--replicas", "1-4"], "Give --slo, e.g. p99_ttft_ms=1000, or a workload whose classes have targets"),
        (["tune", "--router", "all"], "give --replicas, e.g. 1-16"),
        (["tune", "--replicas", "1-100000000"], "100000000"),
        (["tune", "--replicas", "0-3", *SLO], "'0' is not a whole number of at least 1"),
        (["tune", "--replicas", "5-3", *SLO], "'5-3' is an empty range: write 3-5"),
        (["tune", "--replicas", "1,,2", *SLO], "'' is not a whole number"),
        (["tune", "--replicas", "1-2-3", *SLO], "'2-3' is not a whole number"),
        (["tune", "--replicas", "2", *SLO, "--verify", "1"], "does not go with --replicas"),
        (["tune", "--replicas", "1-2", *SLO, "--link-gb-s", "25"], "here nothing travels"),
        (["tune", "--replicas", "1-2", *SLO, "--roles", "all", "--no-enable-prefix-caching"], "which is off"),
        (["tune", "--roles", "all"], "give --replicas"),
        (["tune", "--tensor-parallel-size", "2"], "headway calibrate --tensor-parallel-size 2"),
        (["tune", "--calibration", "h200-llama31-8b"], "with --replicas or --objective cost; without, give one"),
        (["tune", "--calibration", "h200-llama31-8b", "--replicas", "1-2"], "of one model"),
        (["tune", "--traffic-log", "log.jsonl"], "give --workload WORKLOAD, or --traffic-log FILE"),
    ],
)
def test_errors_are_one_line(
    long_files: list[str], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *options = arguments
    with contextlib.suppress(SystemExit):
        assert main([command, *long_files, *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("headway: error: ")
    assert error.split("\nTry ")[0].count("\n") <= 1


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


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(1012.0, 7, 3, "stop"), (None, 5, 9, "stop")], "1 of 2 requests .* no time of arrival"),
        ([(1.0, 7, 3, "abort")], "no request"),
    ],
)
def test_a_log_without_work_is_refused(tmp_path: Path, rows: list[Any], message: str) -> None:
    write(tmp_path / "log", *rows)
    with pytest.raises(ConfigError, match=message):
        traffic_work([tmp_path / "log"], vocab_size=100)
