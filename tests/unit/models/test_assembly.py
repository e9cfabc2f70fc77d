"""From tensors to a decoder: what is checked, what is tolerated, what is reported."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from headway.errors import ConfigError, CorruptModelError, MissingTensorError, TensorShapeError
from headway.layers.ops import TorchOps
from headway.loader import open_checkpoint
from headway.models import Decoder, load_decoder
from tests.unit.models.harness import Harness
from tests.unit.models.tiny import hf_logits, hf_model, random_prompt, save_folder, save_gguf


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


def test_a_stored_output_projection_that_differs_from_the_tied_embedding_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in transformers. The last row alone differs."""
    model = hf_model("llama_tied")
    save_folder(model, tmp_path)
    head = model.state_dict()["model.embed_tokens.weight"].clone()
    head[-1] += 1
    edit_weights(tmp_path, add={"lm_head.weight": head})
    prompt = random_prompt(5)
    with caplog.at_level(logging.WARNING):
        logits = Harness(load(tmp_path)).prompt_logits(prompt)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(logits, hf_logits(reference, prompt), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logits, hf_logits(model, prompt), atol=1e-2)
    assert "lm_head.weight that is not model.embed_tokens.weight; the stored one is used" in caplog.text


def test_a_stored_output_projection_that_is_the_tied_embedding_takes_no_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = hf_model("llama_tied")
    save_folder(model, tmp_path)
    num_bytes = load(tmp_path).num_bytes
    edit_weights(tmp_path, add={"lm_head.weight": model.state_dict()["model.embed_tokens.weight"].double()})
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path).num_bytes == num_bytes
    assert not caplog.records


def test_a_stored_output_projection_of_another_shape_is_refused(tmp_path: Path) -> None:
    save_folder(hf_model("llama_tied"), tmp_path)
    edit_weights(tmp_path, add={"lm_head.weight": torch.zeros(97, 64)})
    with pytest.raises(TensorShapeError, match=r"lm_head\.weight is \[97, 64\]"):
        load(tmp_path)


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
    assert load(folder).layers[0].heads.cos_sin.shape == (256, 16)
    assert load(folder, max_model_len=100).layers[0].heads.cos_sin.shape == (100, 16)


@pytest.mark.parametrize("max_model_len", [0, -1, 257])
def test_max_model_len_out_of_range(folder: Path, max_model_len: int) -> None:
    with pytest.raises(ConfigError, match="context of 256"):
        load(folder, max_model_len=max_model_len)


def test_unknown_quantization_and_ops_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="unknown quantization 'int5'; valid names are none, fp8, int8, int4"):
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
    assert decoder.num_bytes == decoder.config.num_parameters * 4 + decoder.layers[0].heads.cos_sin.nbytes


def test_weights_do_not_depend_on_the_file_after_loading(folder: Path) -> None:
    decoder = load(folder)
    prompt = random_prompt(5)
    before = Harness(decoder).prompt_logits(prompt)
    (folder / "model.safetensors").write_bytes(b"")
    assert torch.equal(Harness(decoder).prompt_logits(prompt), before)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.1.input_layernorm.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
    ],
)
def test_a_weight_that_is_no_number_is_refused_with_its_tensor(folder: Path, name: str, value: float) -> None:
    tensor = load_file(folder / "model.safetensors")[name].clone()
    tensor.view(-1)[3] = value
    edit_weights(folder, add={name: tensor})
    for quantization in ("none", "int8"):
        with pytest.raises(CorruptModelError, match=rf"tensor {name} has values that are no numbers"):
            load_decoder(open_checkpoint(folder), quantization=quantization)


def test_a_scale_that_is_no_number_is_refused_with_its_tensor(tmp_path: Path) -> None:
    """Quantised files hold float16 scales: one that is damaged spoils 32 weights."""
    path = save_gguf(hf_model("llama"), tmp_path / "m.gguf", quantization=gguf.GGMLQuantizationType.Q8_0)
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_up.weight")
    data = bytearray(path.read_bytes())
    data[tensor.data_offset : tensor.data_offset + 2] = b"\x00\x7c"  # infinity
    path.write_bytes(data)
    with pytest.raises(CorruptModelError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight has values"):
        load_decoder(open_checkpoint(path), quantization="int8")


def test_rope_factors_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    factors = np.ones(8, dtype=np.float32)
    factors[2] = np.nan
    path = save_gguf(hf_model("llama"), tmp_path / "m.gguf", extra_tensors={"rope_freqs.weight": factors})
    with pytest.raises(CorruptModelError, match=r"rope_freqs\.weight"):
        open_checkpoint(path)


def test_weights_too_large_for_the_dtype_are_refused(folder: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    tensor = load_file(folder / "model.safetensors")[name].clone()
    tensor[0, 0] = 1e5
    edit_weights(folder, add={name: tensor})
    with pytest.raises(ConfigError, match=rf"tensor {name} has values that float16 cannot hold; use dtype 'bfloat16'"):
        load(folder, dtype=torch.float16)
    load(folder, dtype=torch.bfloat16)


@pytest.mark.parametrize("keeps_stored", [False, True])
def test_a_tied_table_counts_once(tmp_path: Path, keeps_stored: bool) -> None:
    """Also where the output layer reads its codes beside the floats of the embedding."""
    model = hf_model("llama_tied")
    path = save_gguf(model, tmp_path / "m.gguf", quantization=gguf.GGMLQuantizationType.Q8_0)
    checkpoint, seen = open_checkpoint(path), []
    load_decoder(checkpoint, quantization="int8", keeps_stored=keeps_stored, progress=lambda *at: seen.append(at))
    assert seen[-1] == (checkpoint.num_bytes, checkpoint.num_bytes)
