"""Bad input to the lab's commands: one clear sentence, exit code 2, no file written, and no model loaded before."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from headway.cli.main import main
from headway.console import loading
from tests.lab.sim.machines import calibration

WORKLOAD = """
requests = 20
arrivals = { kind = "poisson", rate = 20.0 }
input = { kind = "uniform", low = 4, high = 40 }
output = { kind = "uniform", low = 2, high = 20 }
"""
TRACED = '[trace]\nfile = "{}"\n'
TRACES = {
    "empty.csv": "",
    "no_rows.csv": "arrival_s,input_tokens,output_tokens\n",
    "columns.csv": "when,prompt,answer\n0.0,40,2\n",
    "column.jsonl": '{"timestamp": 0, "input_length": 5, "output_length": 3}\n',
    "words.csv": "arrival_s,input_tokens,output_tokens\n0.0,many,2\n",
}

COMMANDS = {
    "tune": "tune --calibration {machine} --slo p99_ttft_ms=1000 --trials 1 --workload {work} --output-json {json} "
    "--html {html}",
    "cost": "tune --objective cost --price-per-hour 2 --calibration {machine} --slo p99_ttft_ms=1000 --trials 1 "
    "--workload {work} --output-json {json} --html {html}",
    "sim": "sim --calibration {machine} --workload {work} --output-json {json} --html {html}",
    "sim-check": "sim-check --workload {work} --output-json {json}",
    "workload": "workload {work} --html {html}",
    "sweep": "bench sweep --workload {work} --output-json {json} --html {html}",
    "capacity": "bench capacity --workload {work} --output-json {json} --html {html}",
    "serve": "bench serve --port 9 --workload {work} --result-filename {json} --html {html}",
    "online": "bench throughput --scenario online --trace {trace} --output-json {json}",
    "throughput": "bench throughput --output-json {json}",
    "latency": "bench latency --output-json {json}",
    "claims": "claims --quick --on simulator",
}

RATES = {
    "tune": ["--rate"],
    "sim": ["--rate"],
    "sim-check": ["--rate"],
    "workload": ["--rate"],
    "sweep": ["--rates"],
    "capacity": ["--start-rate", "--max-rate"],
    "serve": ["--request-rate"],
}
WITH_WORK = ("tune", "cost", "sim", "sim-check", "workload", "sweep", "capacity", "serve")
PRICED = ("tune", "sim", "sweep", "capacity", "serve", "throughput", "latency", "claims")


def cases() -> list[tuple[str, str, str]]:
    """(command, what is added to it, part of the message); `trace=` stands for a workload of that trace."""
    found = [
        (command, f"{flag} {rate}", rate)
        for command, flags in RATES.items()
        for flag in flags
        for rate in ("0", "-1", "nan", "1e9", "often")
    ]
    for command in WITH_WORK:
        found += [
            (command, "--set arrivals.rate=0", "rate must be a number above 0"),
            (command, "--set arrivals.rate=1e9", "rate must be a number of at most 1,000,000"),
            (command, "trace=empty.csv", "'empty.csv' has no rows"),
            (command, "trace=no_rows.csv", "'no_rows.csv' has no rows"),
            (command, "trace=columns.csv", "it has when, prompt, answer"),
            (command, "trace=column.jsonl", "there is no 'hash_ids'"),
            (command, "trace=words.csv", "'input_tokens' must be a number"),
            (command, "trace=absent.csv", "'absent.csv' is needed and is not in"),
        ]
    found += [("online", f"trace={name}", part) for name, part in (("empty.csv", "no rows"), ("columns.csv", "it has"))]
    found += [
        (command, f"--price-per-hour {price}", price) for command in PRICED for price in ("0", "-2", "inf", "nan")
    ]
    for command in ("tune", "sim", "claims"):
        found += [
            (command, "--calibration h300", "nor a machine of that name"),
            (command, "--calibration work.toml", "is no calibration"),
        ]
    found += [
        *(("tune", f"--slo p99_ttft_ms={bound}", "'p99_ttft_ms' must be") for bound in ("0", "-5", "nan", "inf")),
        *((command, "--slo p99_itl_ms=0.001", "cannot be kept: the shortest") for command in ("tune", "cost")),
        ("tune", "--slo p99_itl_ms=0.001 --replicas 1-2", "cannot be kept: the shortest request of this work, alone"),
        ("cost", "--slo p99_ttft_ms=12.2 --max-num-seqs 1", "No options keep the promises at any load"),
        *((command, "--goodput ttft:0", "not 'ttft:0'") for command in ("sim", "sweep", "capacity", "serve")),
        *(("capacity", f"--slo p99_itl_ms={bound}", "'p99_itl_ms' must be") for bound in ("0", "-5", "nan")),
        ("capacity", "--slo goodput_share=2", "is a share of at most 1"),
        ("cost", "--rate 5", "Leave --rate out, or give --replicas"),
        ("cost", "--kv-formats fp7", "'fp7' is none of fp8, int8, int4"),
        ("cost", "--price-per-hour 3 --price-per-hour 4", "once for each --calibration"),
        ("tune", "--objective cost", "follows from what a device costs: --price-per-hour"),
        ("serve", "--devices 2", "add --price-per-hour"),
        ("sweep", "--devices 2", "is for a server"),
    ]
    return found


def _load(*_: object, **__: object) -> NoReturn:
    raise AssertionError("a model is loaded before the input is checked")


@pytest.mark.parametrize(("command", "added", "message"), cases())
def test_bad_input_is_one_sentence_and_exit_code_2(
    command: str,
    added: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(loading, "load_engine", _load)
    monkeypatch.chdir(tmp_path)
    calibration().save(tmp_path / "machine.json")
    for name, text in TRACES.items():
        (tmp_path / name).write_text(text)
    trace = added.removeprefix("trace=") if added.startswith("trace=") else "no_rows.csv"
    work = TRACED.format(trace) if added.startswith("trace=") else WORKLOAD
    (tmp_path / "work.toml").write_text(work)
    out = tmp_path / "out"
    out.mkdir()
    files = {"machine": "machine.json", "work": "work.toml", "json": "out/r.json", "html": "out/r.html"}
    words = COMMANDS[command].format(**files, trace=trace).split()
    if "--calibration" in added and "--calibration" in words:
        place = words.index("--calibration")
        del words[place : place + 2]
    try:
        code: object = main([*words, *([] if added.startswith("trace=") else added.split())])
    except SystemExit as ended:  # a flag's own type refuses the value
        code = ended.code
    error = capsys.readouterr().err
    assert error.startswith("headway: error: ") and message in error, error
    assert error.split("\nTry ")[0].count("\n") <= 1
    assert code == 2
    assert not list(out.iterdir())
