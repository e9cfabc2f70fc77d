"""`headway sim` and `headway tune` from the command line, on a made-up machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.cli.main import main
from headway.sim import CostModel
from tests.unit.sim.machines import calibration

WORKLOAD = """
requests = 60
arrivals = { kind = "poisson", rate = 20.0 }
input = { kind = "uniform", low = 4, high = 40 }
output = { kind = "uniform", low = 2, high = 20 }
"""


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    calibration().save(tmp_path / "machine.json")
    (tmp_path / "work.toml").write_text(WORKLOAD)
    return ["--calibration", str(tmp_path / "machine.json"), "--workload", str(tmp_path / "work.toml")]


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
    assert "Serving Benchmark Result" in printed
    assert "Simulated, not measured: small on a machine. Mean error of single steps: decode only 2.0%" in printed


def test_sim_gives_the_same_twice_and_takes_the_rate(files: list[str], tmp_path: Path) -> None:
    results = []
    for options in ([], [], ["--rate", "5"]):
        assert main(["sim", *files, *options, "--output-json", str(tmp_path / "r.json")]) == 0
        results.append(json.loads((tmp_path / "r.json").read_text()))
    assert results[0] == results[1]
    assert results[2]["request_throughput"] < 0.5 * results[0]["request_throughput"]


def test_sim_with_replicas(files: list[str], tmp_path: Path) -> None:
    output = ["--output-json", str(tmp_path / "r.json")]
    assert main(["sim", *files, "--replicas", "3", "--router", "least-loaded", *output]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert sum(result["requests_by_replica"]) == 60
    assert min(result["requests_by_replica"]) > 10


def test_sim_compares_policies(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = ["--output-json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
    assert main(["sim", *files, "--policy", "fcfs,sjf", "--rate", "100", *written]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert list(result["policies"]) == ["fcfs", "sjf"]
    assert result["policies"]["sjf"]["mean_ttft_ms"] < result["policies"]["fcfs"]["mean_ttft_ms"]
    assert capsys.readouterr().out.startswith("policy")


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sim", "--policy", "fcfs,sfj"], "Did you mean 'sjf'?"),
        (["sim", "--policy", "fcfs", "--scheduling-policy", "sjf"], "give one of the two"),
        (["sim", "--kv-cache-dtype", "int8"], "calibrate an engine with it"),
        (["sim", "--set", "input.low=300", "--set", "input.high=400"], "takes at most 256"),
        (["sim", "--html", "/nowhere/at/all.html"], "no folder"),
        (["tune", "--slo", "p99_itl=5"], "p99_itl_ms"),
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
