"""`headway bench` on tiny shapes with random weights: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.cli.main import main
from headway.config import EngineConfig
from headway.console import loading
from headway.engine.request_preparer import RequestPreparer
from headway.errors import ModelNotFoundError
from tests.unit.cli.test_main import run

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "torch_dtype": "float32",
}


@pytest.fixture
def shape(tmp_path: Path) -> list[str]:
    """Flags that choose a tiny model."""
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(SHAPE))
    return ["--model", str(path), "--load-format", "dummy", "--dtype", "float32", "--kv-cache-memory", "16MiB"]


def bench(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Run a benchmark and read its result."""
    path = tmp_path / "result.json"
    assert main(["bench", *arguments, "--output-json", str(path)]) == 0
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def profiled_steps(trace: Path) -> list[int]:
    """The numbers of the steps in a profile."""
    events = json.loads(trace.read_text())["traceEvents"]
    return [event["args"]["index"] for event in events if event.get("cat") == "headway" and event["name"] == "step"]


def test_latency_has_vllms_keys_and_ours(tmp_path: Path, shape: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--input-len", "5", "--output-len", "4", "--batch-size", "3", "--n", "2", "--num-iters", "2"]
    result = bench(tmp_path, "latency", *arguments, "--num-iters-warmup", "1", *shape)
    assert len(result["latencies"]) == 2
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 2)
    assert result["percentiles"].keys() == {"10", "25", "50", "75", "90", "99"}
    best = min(result["latencies"])
    assert result["output_tok_s"] == pytest.approx(3 * 2 * 4 / best)
    assert result["ms_per_token_with_prompt"] == pytest.approx(1000 * best / 8)
    assert 0 < result["ms_per_token"] < 1000 * best
    assert result["ratio"]["latency_s"] == pytest.approx(best / result["floor"]["latency_s"])
    assert result["setting"]["work"] == "3 requests, 15 tokens in, 24 out"
    printed = capsys.readouterr().out
    for word in ("tiny.json", "max_num_seqs", "start-up", "ceilings", "ms/token", "best", "floor", "ratio"):
        assert word in printed
    assert "prompt ids are drawn from 0 to 95" in printed


def test_throughput_has_vllms_keys_and_ours(tmp_path: Path, shape: list[str]) -> None:
    arguments = ["--num-prompts", "4", "--input-len", "16", "--output-len", "8", "--random-range-ratio", "0.5"]
    result = bench(tmp_path, "throughput", *arguments, "--rounds", "2", *shape)
    assert result["num_requests"] == 4
    assert result["requests_per_second"] == pytest.approx(4 / result["elapsed_time"])
    assert result["tokens_per_second"] == pytest.approx(result["total_num_tokens"] / result["elapsed_time"])
    assert result["output_tok_s"] + result["input_tok_s"] == pytest.approx(result["tokens_per_second"])
    assert result["elapsed_time"] == min(one["elapsed_s"] for one in result["rounds"])
    assert len(result["rounds"]) == 2


def test_a_scenario_sets_everything(tmp_path: Path, shape: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "profile.json"
    once = ["--rounds", "1", "--warmup-rounds", "0"]
    result = bench(tmp_path, "latency", "--scenario", "b1", *once, "--profile", str(trace), *shape)
    assert result["setting"]["work"] == "1 request, 128 tokens in, 256 out"
    assert result["setting"]["engine"]["max_model_len"] == 4096
    assert result["num_steps"] == 256
    assert profiled_steps(trace) == list(range(85, 115))
    assert "profile of 30 steps" in capsys.readouterr().out


def test_online_replays_a_trace(tmp_path: Path, shape: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0.0,40,1\n0.1,20,9\n2.0,700,4\n")
    arguments = ["--scenario", "online", "--trace", str(trace), "--speedup", "10", "--warmup-rounds", "0"]
    result = bench(tmp_path, "throughput", *arguments, *shape)
    assert (result["completed"], result["failed"], result["num_preemptions"]) == (3, 0, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (760, 15)
    assert result["duration"] >= 0.2
    assert 0 < result["floor"]["median_ttft_ms"] < result["median_ttft_ms"] <= result["p99_ttft_ms"]
    assert result["setting"]["engine"]["max_model_len"] == 8192
    printed = capsys.readouterr().out
    for word in ("TTFT ms", "TPOT ms", "ITL ms", "E2E ms", "P99/P50 ITL", "lost", "preemptions"):
        assert word in printed
    start_up = bench(tmp_path, "latency", "--start-up", *shape)
    assert 0 < start_up["ready_s"] <= start_up["first_token_s"]
    assert capsys.readouterr().out.count("\n") == 1


def test_a_builtin_shape_is_random_weights_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[EngineConfig] = []
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0.0,40,2\n")

    def load(config: EngineConfig, console: object, *, quiet: bool = False) -> object:
        configs.append(config)
        raise ModelNotFoundError("not today")

    monkeypatch.setattr(loading, "load_engine", load)
    assert main(["bench", "throughput", "--scenario", "nano", "--model", "qwen3-0.6b"]) == 1
    assert main(["bench", "throughput", "--scenario", "online", "--trace", str(trace), "--model", "other"]) == 1
    assert main(["bench", "latency", "--scenario", "b64", "--model", "llama31-8b", "--dtype", "float16"]) == 1
    nano, online, b64 = (config.model for config in configs)
    assert (nano.load_format, nano.dtype, nano.max_model_len) == ("dummy", "bfloat16", 4096)
    assert (online.load_format, online.dtype, online.max_model_len) == ("auto", "auto", 8192)
    assert (b64.load_format, b64.dtype, b64.max_model_len) == ("dummy", "float16", 4096)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("latency", "--scenario", "b1", "--input-len", "3"), "--input-len is fixed by the scenario 'b1'"),
        (("throughput", "--scenario", "nano", "--num-prompts", "3"), "--num-prompts is fixed by the scenario 'nano'"),
        (("throughput", "--scenario", "online"), "name the file with --trace"),
        (("throughput", "--trace", "x.csv"), "--trace belongs to the scenario 'online'"),
        (("throughput", "--random-range-ratio", "1"), "--random-range-ratio must be at least 0 and below 1"),
        (("throughput", "--scenario", "online", "--trace", "x", "--speedup", "0"), "--speedup must be above 0"),
    ],
)
def test_bad_values_are_one_line_and_exit_code_1(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("bench", *arguments) == 1
    error = capsys.readouterr().err
    assert message in error and error.startswith("headway: error: ") and error.count("\n") == 1


def test_generate_writes_a_profile(
    tmp_path: Path, shape: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(RequestPreparer, "chat_token_ids", lambda self, messages: [1, 2, 3])  # it has no tokenizer
    trace = tmp_path / "profile.json"
    flags = ["--profile", str(trace), "--profile-steps", "3", "--no-detokenize", "--ignore-eos", "--max-tokens", "12"]
    assert main(["generate", "--chat", "hi", *flags, *shape]) == 0
    assert profiled_steps(trace) == [4, 5, 6]
    captured = capsys.readouterr()
    assert len(captured.out.split()) == 12
    assert "profile of 3 steps" in captured.err
