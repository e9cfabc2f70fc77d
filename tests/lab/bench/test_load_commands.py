"""`headway bench serve`, `sweep`, `capacity` and `compare` from the command line."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from headway.cli.main import main
from headway.console import loading
from headway_lab.bench import load_flags, server_target
from headway_lab.bench.http_client import ServerUnreachableError
from headway_lab.bench.server_target import ServerOptions
from tests.lab.bench.sse_server import DONE, METRICS, Answer, SSEServer, event, steady, text_event
from tests.lab.bench.test_offline_bench import SHAPE
from tests.unit.cli.test_main import HEAVY
from tests.unit.server.fake_engine import FakeServer
from tests.unit.server.http_thread import serving

SMALL = ["--random-input-len", "6", "--random-output-len", "3", "--disable-tqdm"]


@pytest.fixture
def server() -> Iterator[SSEServer]:
    with SSEServer(steady, metrics=METRICS) as running:
        yield running


@pytest.fixture
def shape(tmp_path: Path) -> list[str]:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(SHAPE))
    return ["--model", str(path), "--load-format", "dummy", "--dtype", "float32", "--kv-cache-memory", "16MiB"]


def serve(server_url: str, *arguments: str) -> int:
    return main(["bench", "serve", "--base-url", server_url, *SMALL, *arguments])


def test_a_load_with_a_result_and_a_report(
    server: SSEServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    code = serve(
        server.url,
        *("--num-prompts", "5", "--request-rate", "50", "--goodput", "ttft:5000", "e2el:9000"),
        *("--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json", "--html", str(page)),
    )
    assert code == 0
    printed = capsys.readouterr().out
    assert "Successful requests:                     5\n" in printed and "Cached" not in printed
    assert "Request rate configured (RPS):           50.00" in printed
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["num_prompts"], result["model_id"], result["backend"]) == (5, 5, "m", "openai")
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 15)
    assert result["goodput_share"] == 1.0 and result["request_rate"] == 50.0
    assert result["output_lens"] == [3] * 5 and len(result["ttfts"]) == 5 and len(result["itls"][0]) == 2
    assert "in the queue" in page.read_text()


def test_errors_are_counted_and_the_command_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def script(body: dict[str, Any]) -> Answer:
        fails = sum(body["prompt"]) % 2 == 0
        return Answer([(0, b'{"error": {"message": "queue is full"}}')], status=429) if fails else steady(body)

    with SSEServer(script) as server:
        code = serve(
            server.url, "--num-prompts", "20", "--num-warmups", "0", "--save-result", "--result-dir", str(tmp_path)
        )
    assert code == 1
    (file,) = tmp_path.glob("openai-infqps-m-*.json")
    result = json.loads(file.read_text())
    assert result["completed"] + result["failed"] == 20 and result["failed"] > 0
    assert result["error_counts"] == {"HTTP 429: queue is full": result["failed"]}
    assert f"{result['failed']} × HTTP 429: queue is full" in capsys.readouterr().err


def test_our_own_server(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeServer().app) as url:
        assert serve(url, "--num-prompts", "4", "--vocab-size", "500", "--ignore-eos", "--max-concurrency", "2") == 0
        assert serve(url, "--backend", "openai-chat", "--num-prompts", "2", "--vocab-size", "200") == 0
    printed = capsys.readouterr().out
    assert "Maximum request concurrency:             2\n" in printed
    assert "Total generated tokens:                  12\n" in printed
    assert "Total generated tokens:                  6\n" in printed


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model fails the test."""

    def load(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(loading, "load_engine", load)


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize("command", ["sweep", "capacity"])
@pytest.mark.parametrize(
    ("named", "asked"),
    [
        (["--port", "1"], "http://127.0.0.1:1"),
        (["--host", "localhost", "--api-key", "x", "--port", "1"], "http://localhost:1"),
        (["--api-key", "k"], "http://127.0.0.1:8000"),
        (["--backend", "openai-chat"], "http://127.0.0.1:8000"),
        (["--endpoint", "/x"], "http://127.0.0.1:8000"),
    ],
)
def test_a_server_that_is_not_there_is_said_at_once(
    command: str, named: list[str], asked: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nobody(options: ServerOptions, judging: object) -> NoReturn:
        raise ServerUnreachableError(f"asked {options.base_url}.")

    if asked.endswith(":8000"):  # where another server may be
        monkeypatch.setattr(load_flags, "ServerTarget", nobody)
    assert main(["bench", command, *named]) == 1
    told = capsys.readouterr().err
    assert f"No server answers at {asked} " in told or f"asked {asked}." in told


def test_a_server_that_says_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server_target, "ASK_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert main(["bench", "serve", "--port", str(silent.getsockname()[1])]) == 1
    assert "does not answer within 0.05 s" in capsys.readouterr().err


def cached(body: dict[str, Any]) -> Answer:
    """A server that has three quarters of every prompt in its cache."""
    number = len(body["prompt"])
    usage = {
        "prompt_tokens": number,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": 3 * number // 4},
    }
    return Answer([(0.0, text_event("a", "length") + event({"choices": [], "usage": usage}) + DONE)])


def test_prompts_from_the_cache_are_counted_and_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.json"
    flags = ["--random-input-len", "100", "--random-output-len", "1", "--num-prompts", "4"]
    shared = tmp_path / "prompts.jsonl"
    rows = [{"prompt": [*range(90), number], "output_tokens": 1} for number in range(9)]
    shared.write_text("\n".join(map(json.dumps, rows)))
    with SSEServer(cached) as server:
        assert serve(server.url, *flags, "--result-filename", str(out)) == 0
        printed = capsys.readouterr().out
        others = ["--dataset-name", "custom", "--dataset-path", str(shared), "--disable-tqdm"]
        assert main(["bench", "serve", "--base-url", server.url, *others]) == 0
    told = capsys.readouterr().out
    assert "Cached prompt tokens:" in told and "note:" not in told, "of prompts that share their beginnings"
    assert "Cached prompt tokens:                    300 (75.0%)\n" in printed
    assert "note: 75% of the prompt tokens came from the server's prefix cache" in printed
    result = json.loads(out.read_text())
    assert (result["total_cached_tokens"], result["cached_token_share"]) == (300, 0.75)


def test_no_run_asks_what_another_has_asked(
    server: SSEServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--num-prompts", "3", "--num-warmups", "0"]
    for _ in range(2):
        assert serve(server.url, *flags) == 0
        assert main(["bench", "sweep", "--base-url", server.url, *SMALL, *flags, "--rates", "50"]) == 0
    prompts = {tuple(body["prompt"]) for body in server.bodies}
    assert len(prompts) == len(server.bodies) == 2 * 3 + 2 * 3
    seeds = re.findall(r"(?m)^Seed: (\d+)$", capsys.readouterr().out)
    assert len(set(seeds)) == 2
    server.bodies.clear()
    assert serve(server.url, *flags, "--seed", seeds[0]) == 0
    assert {tuple(body["prompt"]) for body in server.bodies} < prompts  # a seed gives the same again
    path = tmp_path / "chat.toml"
    path.write_text('requests = 6\ninput = 8\noutput = 2\narrivals = { kind = "poisson", rate = 100.0 }\n')
    assert main(["bench", "serve", "--base-url", server.url, "--workload", str(path), "--num-warmups", "0"]) == 0
    assert [len(body["prompt"]) for body in server.bodies[3:]] == [8] * 6


def test_repeats_are_one_result_and_equal_ones_have_no_star(
    server: SSEServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, same = tmp_path / "before.json", tmp_path / "after.json"
    flags = ["--num-prompts", "2", "--repeats", "3", "--seed", "5", "--result-filename", str(file)]
    assert serve(server.url, *flags) == 0
    assert "run 3 of 3, seed 7" in capsys.readouterr().out
    result = json.loads(file.read_text())
    assert [run["seed"] for run in result["runs"]] == [5, 6, 7]
    assert result["mean_ttft_ms"] == pytest.approx(sum(run["mean_ttft_ms"] for run in result["runs"]) / 3)
    same.write_text(file.read_text())
    page = tmp_path / "c.html"
    assert main(["bench", "compare", str(file), str(same), "--html", str(page)]) == 0
    table, note = capsys.readouterr().out.rsplit("\n*", 1)
    assert "±" in table and "*" not in table and "after / before" in table
    assert "standard deviation of 3, 3 runs" in note and "p99_ttft_ms" in page.read_text()
    for path in (file, same):
        path.write_text(json.dumps(result["runs"][0]))
    assert main(["bench", "compare", str(file), str(same)]) == 0
    printed = capsys.readouterr().out
    assert "Single runs" in printed and "*" not in printed


def test_repeats_in_several_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = {}
    for side, values in {"new": (50.0, 51.0, 49.0), "old": (100.0, 101.0, 99.0)}.items():
        paths[side] = [tmp_path / f"{side}-{number}.json" for number in (1, 2, 3)]
        for path, value in zip(paths[side], values, strict=True):
            path.write_text(json.dumps({"p99_itl_ms": value, "completed": 20}))
    flags = [*map(str, paths["new"]), "--against", *map(str, paths["old"])]
    assert main(["bench", "compare", *flags]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["old", "new", "new", "/", "old"]
    assert ["p99_itl_ms", "100", "±", "1", "50", "±", "1", "*", "0.500"] in lines
    assert ["completed", "20", "±", "0", "20", "±", "0", "1.000"] in lines


def test_a_sweep_over_rates_of_a_server(server: SSEServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "s.json", tmp_path / "s.html"
    flags = ["--rates", "20,40", "--num-prompts", "4", "--output-json", str(out), "--html", str(page)]
    assert main(["bench", "sweep", "--base-url", server.url, *SMALL, *flags]) == 0
    points = json.loads(out.read_text())["points"]
    assert [point["request_rate"] for point in points] == [20.0, 40.0]
    assert all(point["completed"] == 4 for point in points)
    assert "out tok/s" in capsys.readouterr().out and "Throughput against P99" in page.read_text()
    prompts = {tuple(body["prompt"]) for body in server.bodies[1:]}
    assert len(prompts) == 8  # no rate finds the prompts of another in the prefix cache


def test_a_sweep_and_a_capacity_of_an_engine(
    tmp_path: Path, shape: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a knob; over rates that are found; up to the rate that keeps a promise. A key in the environment names no
    server."""
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    out = tmp_path / "s.json"
    flags = ["--knob", "max_num_seqs=1,4", "--rates", "inf", "--num-prompts", "4", "--output-json", str(out)]
    assert main(["bench", "sweep", *SMALL, *shape, *flags]) == 0
    points = json.loads(out.read_text())["points"]
    assert [point["setting"] for point in points] == [{"max_num_seqs": 1}, {"max_num_seqs": 4}]
    assert all(point["completed"] == 4 and point["failed"] == 0 for point in points)
    assert main(["bench", "sweep", *SMALL, *shape, "--num-prompts", "3", "--output-json", str(out)]) == 0
    rates = [point["request_rate"] for point in json.loads(out.read_text())["points"]]
    assert len(rates) == 7 and rates == sorted(rates)
    flags = ["--slo", "p99_itl_ms=60000", "--start-rate", "50", "--max-rate", "100", "--num-prompts", "3"]
    assert main(["bench", "capacity", *SMALL, *shape, *flags, "--output-json", str(out)]) == 0
    assert "Capacity: at least 100 requests/s" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert result["capacity"] == 100.0 and [probe["rate"] for probe in result["probes"]] == [50.0, 100.0]


def test_a_search_for_the_capacity_starts_at_what_is_served_and_ends_in_time(
    server: SSEServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "c.json"
    flags = ["--slo", "p99_itl_ms=60000", "--num-prompts", "4", "--max-seconds", "0.000001", "--output-json", str(out)]
    assert main(["bench", "capacity", "--base-url", server.url, *SMALL, *flags]) == 0
    printed = capsys.readouterr().out
    assert "all at once: " in printed and "Time or probes ran out" in printed
    assert len(json.loads(out.read_text())["probes"]) == 1
    never = ["--slo", "p99_ttft_ms=0.000001", "--num-prompts", "2", "--start-rate", "100", "--max-probes", "3"]
    assert main(["bench", "capacity", "--base-url", server.url, *SMALL, *never]) == 1, "no capacity is a failure"
    assert "No rate down to 25 requests/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["serve", "--dataset-name", "custom"], "needs the file"),
        (["serve", "--dataset-path", "x"], "goes with --dataset-name custom"),
        (["serve", "--workload", "x.toml", "--dataset-name", "random"], "a dataset of its own"),
        (["serve", "--random-range-ratio", "1"], "below 1, not 1"),
        (["serve", "--goodput", "itl:5"], "not 'itl:5'"),
        (["serve", "--percentile-metrics", "ttft,x"], "not 'x'"),
        (["serve", "--metric-percentiles", "101"], "from 0 to 100"),
        (["sweep", "--knob", "max_num_seqs=x"], "'x' is not a whole number"),
        (["sweep", "--knob", "enable_prefix_caching=true,maybe"], "'maybe' is neither true nor false"),
        (["sweep", "--knob", "overlap=on,off"], "overlap is now async_scheduling"),
        (["sweep", "--base-url", "http://127.0.0.1:9", "--knob", "max_num_seqs=1"], "--base-url chooses a server"),
        (["capacity", "--base-url", "http://127.0.0.1:9", "--max-num-seqs", "3"], "--max-num-seqs is an option of"),
        (["capacity", "--port", "9", "--max-num-seqs", "3"], "--port chooses a server, which has its own"),
        (["capacity", "--max-concurrency", "3"], "--max-concurrency is for a server and has no effect on the engine"),
        (["compare", "x.json"], "Cannot read the result 'x.json'"),
    ],
)
def test_mistakes(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert reason in capsys.readouterr().err


LIGHT = f"""
import contextlib, sys
from headway.cli.main import main
assert main(["bench", "serve", "--base-url", sys.argv[1], "--num-prompts", "1", *sys.argv[2:]]) == 0
print(*sorted({{"torch", "triton", "numpy", "httpx"}} & set(sys.modules)), file=sys.stderr)
for arguments in (["bench"], ["bench", "latency", "--help"], ["bench", "throughput", "--help"]):
    with contextlib.suppress(SystemExit):
        main(arguments)
print(*sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)
"""


def test_a_load_and_help_need_no_torch(server: SSEServer) -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT, server.url, *SMALL], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (0, "")
