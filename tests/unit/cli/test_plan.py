"""`headway plan`: its sizes are those of a loaded model, its table is arithmetic, and nothing is loaded for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.cli.main import main
from headway.config import EngineConfig
from headway.layers import create_ops
from headway.loader import open_checkpoint
from headway.models import load_decoder
from headway.models.checkpoint import Checkpoint
from headway.worker.formats import planned_formats
from headway.worker.memory_plan import estimated_weights
from tests.unit.loader.test_quantized_weights import write_gguf
from tests.unit.models.tiny import hf_model, save_folder


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    return plan


@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "stored"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_as_large_as_planned(quantization: str, tied: bool, tmp_path: Path) -> None:
    if quantization == "stored":
        path, _ = write_gguf("Q4_1", tmp_path)
    else:
        path = save_folder(
            hf_model("qwen3", hidden_size=256, intermediate_size=512, tie_word_embeddings=tied), tmp_path
        )
    checkpoint = open_checkpoint(path)
    formats = planned_formats(EngineConfig.from_options(device="cpu", quantization=quantization), checkpoint.config)
    ops = create_ops(formats.kernels, device="cpu", dtype=formats.dtype)
    decoder = load_decoder(checkpoint, ops=ops, quantization=formats.quantization, keeps_stored=formats.keeps_stored)
    estimate = estimated_weights(checkpoint, formats, checkpoint.config.max_position)
    assert estimate == pytest.approx(decoder.num_bytes, rel=0.1)


def test_the_table_is_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(
        capsys, "llama31-8b", "--load-format", "dummy", "--device", "cuda", "--quantization", "fp8",
        "--kv-cache-dtype", "fp8", "--memory", "8GiB", "80GiB",
    )  # fmt: skip
    assert plan["formats"] == "fp8 weights, bfloat16 activations" and plan["kv_dtype"] == "fp8"
    assert 8.0e9 < plan["weight_bytes"] < 9.5e9  # embeddings and output stay in two bytes
    assert plan["kv_bytes_per_token"] == 32 * 8 * 2 * (128 + 2)
    small, large = plan["memory"]
    assert small["num_tokens"] == 0
    left = int(80 * 2**30 * 0.9) - plan["weight_bytes"] - plan["working_bytes"]
    assert large["num_tokens"] == left // plan["kv_bytes_per_token"]


def test_fewer_bits_are_less_memory(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [
        planned(capsys, "llama31-8b", "--load-format", "dummy", "--device", "cuda", "--quantization", name)[
            "weight_bytes"
        ]
        for name in ("none", "fp8", "int4")
    ]
    assert sizes[0] > 1.6 * sizes[1] > 2.4 * sizes[2]


def test_nothing_is_read_but_headers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_folder(hf_model("llama"), tmp_path)
    monkeypatch.setattr(Checkpoint, "read_weight", lambda *_, **__: pytest.fail("a weight was read"))
    assert main(["plan", str(folder), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "weights" in shown and "for the cache" in shown


def test_two_models_and_none_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "a", "--model", "b"]) != 0
    assert "name two models" in capsys.readouterr().err
    assert main(["plan", "./nowhere", "--device", "cpu"]) != 0


def test_a_draft_model_counts(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("llama31-8b", "--load-format", "dummy", "--device", "cuda")
    alone = planned(capsys, *shape)
    both = planned(capsys, *shape, "--speculation", "draft", "--draft-model", "qwen3-0.6b")
    small = planned(capsys, "qwen3-0.6b", *shape[1:])
    assert both["kv_bytes_per_token"] == alone["kv_bytes_per_token"] + small["kv_bytes_per_token"]
    assert both["weight_bytes"] > alone["weight_bytes"] + 1e9


def test_what_a_plan_does_not_depend_on_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--num-kv-blocks", "7"])
    assert "--num-kv-blocks" in capsys.readouterr().err


def test_a_plan_for_each_of_several_devices(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("llama31-70b", "--load-format", "dummy", "--device", "cuda")
    whole, part = (planned(capsys, *shape, *ranks) for ranks in ((), ("--tensor-parallel-size", "4")))
    assert part["num_ranks"] == 4 and part["num_parameters"] == whole["num_parameters"]
    assert part["weight_bytes"] == pytest.approx(whole["weight_bytes"] / 4, rel=0.01)
    assert part["kv_bytes_per_token"] == whole["kv_bytes_per_token"] / 4
