"""From tensors to a decoder: what is checked, what is tolerated, what is reported."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headway.errors import ConfigError, MissingTensorError, TensorShapeError
from headway.layers.torch_ops import TorchOps
from headway.loader import open_checkpoint
from headway.models import Decoder, load_decoder
from tests.unit.models.harness import Harness
from tests.unit.models.tiny import hf_logits, hf_model, random_prompt, save_folder


def edit_weights(folder: Path, *, drop: tuple[str, ...] = (), add: Mapping[str, Tensor] | None = None) -> None:
    weights = load_file(folder / "model.safetensors")
    for name in drop:
        del weights[name]
    save_file({**weights, **(add or {})}, folder / "model.safetensors")


def load(folder: Path, **options: Any) -> Decoder:
    return load_decoder(open_checkpoint(folder), ops=TorchOps(), **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_folder(hf_model("llama"), tmp_path)


def test_missing_tensor_is_named(folder: Path) -> None:
    edit_weights(folder, drop=("model.layers.1.mlp.up_proj.weight",))
    with pytest.raises(MissingTensorError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight, which llama needs"):
        load(folder)


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    names = [name for name in load_file(folder / "model.safetensors") if ".layers.1." in name]
    edit_weights(folder, drop=tuple(names))
    with pytest.raises(MissingTensorError, match=f"and {len(names) - 5} more"):
        load(folder)


def test_untied_model_needs_its_output_projection(folder: Path) -> None:
    assert '"tie_word_embeddings": false' in (folder / "config.json").read_text()
    edit_weights(folder, drop=("lm_head.weight",))
    with pytest.raises(MissingTensorError, match=r"lm_head\.weight"):
        load(folder)


def test_absent_tie_flag_and_output_projection_mean_tied(tmp_path: Path) -> None:
    model = hf_model("llama_tied")
    save_folder(model, tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": true', '"unrelated": 0'))
    prompt = random_prompt(5)
    logits = Harness(load(tmp_path)).prompt_logits(prompt)
    torch.testing.assert_close(logits, hf_logits(model, prompt), atol=1e-5, rtol=1e-5)


def test_tied_model_ignores_a_saved_output_projection(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = hf_model("llama_tied")
    save_folder(model, tmp_path)
    edit_weights(tmp_path, add={"lm_head.weight": torch.full((96, 64), 7.0)})
    prompt = random_prompt(5)
    with caplog.at_level(logging.WARNING):
        logits = Harness(load(tmp_path)).prompt_logits(prompt)
    torch.testing.assert_close(logits, hf_logits(model, prompt), atol=1e-5, rtol=1e-5)
    assert not caplog.records


def test_wrong_shape_is_named(folder: Path) -> None:
    edit_weights(folder, add={"model.layers.0.self_attn.k_proj.weight": torch.zeros(33, 64)})
    with pytest.raises(TensorShapeError, match=r"layers\.0\.self_attn\.k_proj\.weight is \[33, 64\] .* \[32, 64\]"):
        load(folder)


def test_unknown_tensors_are_reported_and_harmless_ones_are_not(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(folder, add={"model.vision.weight": torch.zeros(2), buffer: torch.zeros(8)})
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert "model.vision.weight" in caplog.text
    assert "inv_freq" not in caplog.text


def test_progress_counts_the_bytes_to_the_end(folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    load(folder, progress=lambda done, total: calls.append((done, total)))
    total = open_checkpoint(folder).num_bytes
    assert calls[-1] == (total, total)
    assert len(calls) == len(open_checkpoint(folder).index)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_rotary_table_follows_max_model_len(folder: Path) -> None:
    assert load(folder).cos_sin.shape == (256, 16)
    assert load(folder, max_model_len=100).cos_sin.shape == (100, 16)


@pytest.mark.parametrize("max_model_len", [0, -1, 257])
def test_max_model_len_out_of_range(folder: Path, max_model_len: int) -> None:
    with pytest.raises(ConfigError, match="context of 256"):
        load(folder, max_model_len=max_model_len)


def test_unknown_quantization_and_ops_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="unknown quantization 'int5'; valid names are none, int8"):
        load(folder, quantization="int5")
    with pytest.raises(ConfigError, match="unknown ops 'cuda'; valid names are auto, native, torch, triton"):
        load_decoder(open_checkpoint(folder), ops="cuda")


def test_int8_needs_float32_on_the_cpu(folder: Path) -> None:
    with pytest.raises(ConfigError, match="int8 weights run on the CPU"):
        load(folder, quantization="int8", dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="native ops run in float32"):
        load_decoder(open_checkpoint(folder), ops="native", dtype=torch.float16)


@pytest.mark.parametrize("family", ["llama_biased", "qwen3"])
def test_num_bytes_is_what_is_held(tmp_path: Path, family: str) -> None:
    decoder = load(save_folder(hf_model(family), tmp_path))
    assert decoder.num_bytes == decoder.config.num_parameters * 4 + decoder.cos_sin.nbytes


def test_weights_do_not_depend_on_the_file_after_loading(folder: Path) -> None:
    decoder = load(folder)
    prompt = random_prompt(5)
    before = Harness(decoder).prompt_logits(prompt)
    (folder / "model.safetensors").write_bytes(b"")
    assert torch.equal(Harness(decoder).prompt_logits(prompt), before)
