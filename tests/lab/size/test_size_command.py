"""`headway size` from the command line: the answer from a config.json alone, and what it refuses."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.cli.main import main
from headway.cli.serve import add_arguments as add_serve_arguments
from headway.console.flags import CommandParser

SMALL: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
WORK = ["--input-len", "64", "--output-len", "6", "--requests", "24", "--trials", "0", "--max-num-seqs", "16"]
SHEET = ["--bandwidth-gb-s", "100", "--tflops", "20", "--memory-gb", "16"]

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder with nothing but a config.json."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL))
    return str(folder)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def result(*arguments: str) -> dict[str, Any]:
        assert main(["size", *arguments, "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return result


def test_an_answer_from_a_config_alone(run: Run, model: str) -> None:
    promised = ["--slo", "p99_ttft_ms=200", "--price-per-hour", "2"]
    answer = run("--model", model, *SHEET, *WORK, "--rate", "5", *promised)
    assert answer["replicas"] == 1 and answer["devices"] == 1 and answer["origin"] == "data sheet"
    assert answer["predicted"]["p99_ttft_ms"] <= 200 and answer["headroom"] > 0
    assert answer["highest_rate"] == pytest.approx(5 * (1 + answer["headroom"]))
    assert answer["price_an_hour"] == 2.0
    tokens_an_hour = 5 * 3600 * (64 + 6)
    assert answer["prices"]["price_per_million_tokens"] == pytest.approx(2e6 / tokens_an_hour, rel=1e-3)
    gains = {one["change"]: one["gain"] for one in answer["improvements"]}
    assert gains["weights in INT4"] > 0.9 and "weights in FP8" not in gains  # the sheet names no float8
    assert list(gains.values()) == sorted(gains.values(), reverse=True)
    assert 0 < answer["accuracy"]["data_sheet"]["largest_row_error"] < 0.25
    parser = CommandParser(prog="headway")
    add_serve_arguments(parser)
    words = shlex.split(answer["command"])
    assert words[:2] == ["headway", "serve"] and words[2] == model
    parser.parse(words[2:])


def test_more_load_takes_more_replicas(run: Run, model: str) -> None:
    promised = ["--slo", "p99_ttft_ms=200"]
    one = run("--model", model, *SHEET, *WORK, "--rate", "5", *promised)
    many = run("--model", model, *SHEET, *WORK, "--rate", str(2.5 * one["highest_rate"]), *promised)
    assert many["replicas"] in (3, 4) and "--replicas" in many["command"] and "--router" in many["command"]
    assert many["predicted"]["p99_ttft_ms"] <= 200
    tighter = run("--model", model, *SHEET, *WORK, "--rate", "5", "--slo", "p99_ttft_ms=100")
    assert tighter["highest_rate"] < one["highest_rate"]


def test_a_model_that_one_device_cannot_hold_is_divided(run: Run, model: str) -> None:
    sheet = ["--bandwidth-gb-s", "100", "--tflops", "20", "--memory-gb", "5.5"]
    answer = run("--model", model, *sheet, *WORK, "--rate", "2")
    assert answer["devices_per_replica"] == 2 and "--tensor-parallel-size 2" in answer["command"]


def test_a_calibrated_device_is_simulated_by_its_calibration(run: Run) -> None:
    answer = run("--model", "llama31-8b", "--machine", "H200", *WORK, "--rate", "20")
    assert answer["origin"] == "calibrated" and answer["accuracy"]["verified"]
    by_sheet = run("--model", "llama31-8b", "--machine", "h200", "--tflops", "989", *WORK, "--rate", "20")
    assert by_sheet["origin"] == "data sheet"
    assert by_sheet["predicted"]["p50_itl_ms"] == pytest.approx(answer["predicted"]["p50_itl_ms"], rel=0.25)
    codes = run("--model", "llama31-8b", "--machine", "h200", "--quantization", "fp8", *WORK, "--rate", "20")
    assert codes["origin"] == "changed" and "--quantization fp8" in codes["command"]
    assert codes["predicted"]["p50_itl_ms"] < answer["predicted"]["p50_itl_ms"]
    named = run("--machine", "h200-llama31-8b", *WORK, "--rate", "20")
    assert named["predicted"] == answer["predicted"]


def test_the_text_and_the_page(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "size.html"
    flags = ["--rate", "5", "--price-per-hour", "2", "--slo", "p99_ttft_ms=200", "--html", str(page)]
    assert main(["size", "--model", model, *SHEET, *WORK, *flags]) == 0
    told = capsys.readouterr().out
    for text in (
        "Equal requests: 5 requests/s, 64 tokens in and 6 out in the mean.",
        "1 replica, on one device (by data sheet).",
        "Start with: headway serve",
        "time to first token",
        "Headroom: ",
        "Price: 2.000 an hour",
        "weights in INT4",
        "By data sheet. Where it could be checked",
    ):
        assert text in told, told
    assert "<svg" in page.read_text() and "What would make tokens cheaper" in page.read_text()


RATE = ["--rate", "5"]
REFUSED: dict[str, tuple[list[str], str]] = {
    "no config.json": (["--model", "EMPTY", *SHEET, *WORK, *RATE], "config.json"),
    "unsupported architecture": (
        ["--model", "OTHER", *SHEET, *WORK, *RATE],
        "architecture GPT2LMHeadModel is not supported",
    ),
    "no such model": (["--model", "nothing/there", *SHEET, *WORK, *RATE], "no shape 'nothing/there'"),
    "fits on no number": (
        ["--model", "llama31-70b", "--bandwidth-gb-s", "100", "--tflops", "20", "--memory-gb", "8", *WORK, *RATE],
        "llama31-70b fits on no number of devices",
    ),
    "impossible": (
        ["--model", "MODEL", *SHEET, *WORK, *RATE, "--slo", "p99_itl_ms=1"],
        "even for one request alone: p99_itl_ms is 4.2",
    ),
    "too high a rate": (["--model", "MODEL", *SHEET, *WORK, "--rate", "1e6"], "at most 256 are planned"),
    "infinite rate": (["--model", "MODEL", *SHEET, *WORK, "--rate", "inf"], "--rate inf"),
    "unknown machine": (["--model", "MODEL", "--machine", "h20", *WORK, *RATE], "Known are b200, h200, h100"),
    "no machine": (["--model", "MODEL", "--tflops", "3", *WORK, *RATE], "--bandwidth-gb-s, --memory-gb are missing"),
    "no model": ([*SHEET, *WORK, *RATE], "Name the model"),
    "no work": (["--model", "MODEL", *SHEET, *RATE], "give --workload WORKLOAD, --trace FILE, or"),
    "no rate": (["--model", "MODEL", *SHEET, *WORK], "give all three"),
    "float8 unknown": (["--model", "MODEL", *SHEET, *WORK, *RATE, "--quantization", "fp8"], "does not know float8"),
    "calibration of another model": (
        ["--model", "qwen3-0.6b", "--machine", "h200-llama31-8b", *WORK, *RATE],
        "is of llama31-8b, not of qwen3-0.6b",
    ),
    "data sheet of a calibration": (
        ["--machine", "h200-llama31-8b", "--tflops", "3", *WORK, *RATE],
        "--tflops is of a data sheet",
    ),
    "longer than the context": (
        ["--model", "MODEL", *SHEET, "--input-len", "20000", "--output-len", "6", "--requests", "5", *RATE],
        "a request of 20,006 tokens",
    ),
    "no such trace": (["--model", "MODEL", *SHEET, "--trace", "none.csv", *RATE], "'none.csv' is needed"),
    "trace columns": (["--model", "MODEL", *SHEET, "--trace", "COLUMNS", *RATE], "none of arrival_s, input_tokens"),
    "empty trace": (["--model", "MODEL", *SHEET, "--trace", "NOTHING", *RATE], "has no rows"),
    "promise": (["--model", "MODEL", *SHEET, *WORK, *RATE, "--slo", "p99_speed=1"], "there is no key 'p99_speed'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_sentence(name: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    (tmp_path / "columns.csv").write_text("a,b\n1,2\n")
    (tmp_path / "nothing.csv").write_text("arrival_s,input_tokens,output_tokens\n")
    places = {
        "MODEL": model,
        "EMPTY": str(tmp_path / "empty"),
        "OTHER": str(tmp_path / "other"),
        "COLUMNS": str(tmp_path / "columns.csv"),
        "NOTHING": str(tmp_path / "nothing.csv"),
    }
    arguments, reason = REFUSED[name]
    page = tmp_path / "page.html"
    assert main(["size", *(places.get(word, word) for word in arguments), "--html", str(page)]) == 2
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("headway: error: ") and reason in lines[0], captured.err
    assert captured.out == "" and not page.exists()


@pytest.mark.parametrize("rate", ["0", "1e9", "-1", "nan"])
def test_rates_that_are_none(rate: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["size", "--model", model, *SHEET, *WORK, "--rate", rate])
    assert ended.value.code == 2 and "requests/s" in capsys.readouterr().err
