"""`headway bench serve`, `sweep`, `capacity` and `compare` from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.cli.main import main
from tests.unit.bench.sse_server import METRICS, Answer, SSEServer, steady
from tests.unit.cli.test_bench import SHAPE
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
    assert "Successful requests:                     5\n" in printed
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


def test_a_workload_with_conversations(server: SSEServer, tmp_path: Path) -> None:
    path = tmp_path / "chat.toml"
    path.write_text(
        'requests = 6\ninput = 8\noutput = 2\narrivals = { kind = "poisson", rate = 100.0 }\n'
        '[content]\nkind = "conversations"\nturns = 3\nthink_s = 0.01\n'
    )
    assert main(["bench", "serve", "--base-url", server.url, "--workload", str(path), "--num-warmups", "0"]) == 0
    prompts = sorted((body["prompt"] for body in server.bodies), key=len)
    assert len(prompts) == 6
    assert len(prompts[-1]) > len(prompts[0])


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


def test_a_sweep_over_a_knob_of_the_engine(tmp_path: Path, shape: list[str]) -> None:
    out = tmp_path / "s.json"
    flags = ["--knob", "max_num_seqs=1,4", "--rates", "inf", "--num-prompts", "4", "--output-json", str(out)]
    assert main(["bench", "sweep", *SMALL, *shape, *flags]) == 0
    points = json.loads(out.read_text())["points"]
    assert [point["setting"] for point in points] == [{"max_num_seqs": 1}, {"max_num_seqs": 4}]
    assert all(point["completed"] == 4 and point["failed"] == 0 for point in points)


def test_rates_are_found(tmp_path: Path, shape: list[str]) -> None:
    out = tmp_path / "s.json"
    assert main(["bench", "sweep", *SMALL, *shape, "--num-prompts", "3", "--output-json", str(out)]) == 0
    rates = [point["request_rate"] for point in json.loads(out.read_text())["points"]]
    assert len(rates) == 7 and rates == sorted(rates)


def test_the_capacity_of_an_engine(tmp_path: Path, shape: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "c.json"
    flags = ["--slo", "p99_itl_ms=60000", "--start-rate", "50", "--max-rate", "100", "--num-prompts", "3"]
    assert main(["bench", "capacity", *SMALL, *shape, *flags, "--output-json", str(out)]) == 0
    assert "Capacity: at least 100 requests/s" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert result["capacity"] == 100.0 and [probe["rate"] for probe in result["probes"]] == [50.0, 100.0]


def test_no_capacity_is_a_failure(server: SSEServer, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--slo", "p99_ttft_ms=0.000001", "--num-prompts", "2", "--start-rate", "100", "--max-probes", "3"]
    assert main(["bench", "capacity", "--base-url", server.url, *SMALL, *flags]) == 1
    assert "No rate down to 25 requests/s" in capsys.readouterr().out


def test_results_beside_each_other(server: SSEServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        serve(server.url, "--num-prompts", "2", "--result-dir", str(tmp_path), "--result-filename", f"{name}.json")
    page = tmp_path / "c.html"
    assert main(["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--html", str(page)]) == 0
    assert "b / a" in capsys.readouterr().out and "p99_ttft_ms" in page.read_text()


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
        (["serve", "--html", "/no/such/folder/x.html"], "there is no folder"),
        (["serve", "--base-url", "http://127.0.0.1:9"], "No server answers"),
        (["sweep", "--rates", "x"], "--rates must be"),
        (["sweep", "--knob", "max_num_seqs=x"], "'x' is not a whole number"),
        (["sweep", "--base-url", "http://127.0.0.1:9", "--knob", "max_num_seqs=1"], "--base-url chooses a server"),
        (["capacity", "--base-url", "http://127.0.0.1:9", "--max-num-seqs", "3"], "--max-num-seqs is an option of"),
        (["capacity", "--port", "9", "--max-num-seqs", "3"], "--port chooses a server, which has its own"),
        (["capacity", "--max-concurrency", "3"], "--max-concurrency is for a server and has no effect on the engine"),
        (["capacity", "--slo", "p99=3"], "there is no key 'p99'"),
        (["compare", "x.json"], "Cannot read the result 'x.json'"),
    ],
)
def test_mistakes(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 1
    assert reason in capsys.readouterr().err


LIGHT = """
import sys
from headway.cli.main import main
assert main(["bench", "serve", "--base-url", sys.argv[1], "--num-prompts", "1"]) == 0
print(*sorted({"torch", "triton", "numpy", "httpx"} & set(sys.modules)), file=sys.stderr)
"""


def test_a_load_needs_no_torch(server: SSEServer) -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT, server.url, *SMALL], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (0, "")
