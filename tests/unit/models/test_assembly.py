"""From tensors to a decoder: what is checked, what is tolerated, what is reported."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
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


def damaged(name: str, value: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensor = load_file(folder / "model.safetensors")[name].clone()
        tensor.view(-1)[3] = value
        edit_weights(folder, add={name: tensor})

    return damage


def replaced(name: str, *shape: int) -> Callable[[Path], None]:
    return lambda folder: edit_weights(folder, add={name: torch.zeros(shape)})


def without(pattern: str) -> Callable[[Path], None]:
    return lambda folder: edit_weights(
        folder, drop=tuple(name for name in load_file(folder / "model.safetensors") if pattern in name)
    )


K_PROJ, DOWN_PROJ = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight"
NUMBERED = [
    "model.embed_tokens.weight",
    "model.norm.weight",
    "lm_head.weight",
    "model.layers.1.input_layernorm.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.1.mlp.up_proj.weight",
]
REFUSED: list[tuple[str, Callable[[Path], None], dict[str, Any], type[Exception], str]] = [
    (
        "llama",
        without("layers.1.mlp.up_proj"),
        {},
        MissingTensorError,
        r"lacks model\.layers\.1\.mlp\.up_proj\.weight, which llama needs",
    ),
    ("llama", without(".layers.1."), {}, MissingTensorError, "and 4 more"),
    ("llama", without("lm_head"), {}, MissingTensorError, r"lm_head\.weight"),
    ("llama_tied", replaced("lm_head.weight", 97, 64), {}, TensorShapeError, r"lm_head\.weight is \[97, 64\]"),
    (
        "llama",
        replaced(K_PROJ, 33, 64),
        {},
        TensorShapeError,
        r"layers\.0\.self_attn\.k_proj\.weight is \[33, 64\] .* \[32, 64\]",
    ),
    (
        "llama",
        damaged(DOWN_PROJ, 1e5),
        {"dtype": torch.float16},
        ConfigError,
        rf"tensor {DOWN_PROJ} has values that float16 cannot hold; use dtype 'bfloat16'",
    ),
]
REFUSED += [
    (
        "llama",
        damaged(name, value),
        {"quantization": to},
        CorruptModelError,
        f"tensor {name} has values that are no num",
    )
    for name, value, to in itertools.product(NUMBERED, (math.nan, math.inf, -math.inf), ("none", "int8"))
]
REFUSED += [
    ("llama", lambda folder: None, {"max_model_len": length}, ConfigError, "context of 256") for length in (0, -1, 257)
]


@pytest.mark.parametrize(("family", "damage", "options", "error", "message"), REFUSED)
def test_refusals(
    tmp_path: Path,
    family: str,
    damage: Callable[[Path], None],
    options: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    damage(save_folder(hf_model(family), tmp_path))
    with pytest.raises(error, match=message):
        load(tmp_path, **options)


def test_values_that_only_float16_cannot_hold_are_taken(folder: Path) -> None:
    damaged(DOWN_PROJ, 1e5)(folder)
    load(folder, dtype=torch.bfloat16)


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


def test_a_scale_that_is_no_number_is_refused_with_its_tensor(tmp_path: Path) -> None:
    """Quantised files hold float16 scales: one that is damaged spoils 32 weights."""
    path = save_gguf(hf_model("llama"), tmp_path / "m.gguf", quantization=gguf.GGMLQuantizationType.Q8_0)
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_up.weight")
    data = bytearray(path.read_bytes())
    data[tensor.data_offset : tensor.data_offset + 2] = b"\x00\x7c"  # infinity
    path.write_bytes(data)
    with pytest.raises(CorruptModelError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight has values"):
        load(path, quantization="int8")


@pytest.mark.parametrize("keeps_stored", [False, True])
def test_a_tied_table_counts_once(tmp_path: Path, keeps_stored: bool) -> None:
    """Also where the output layer reads its codes beside the floats of the embedding."""
    model = hf_model("llama_tied")
    path = save_gguf(model, tmp_path / "m.gguf", quantization=gguf.GGMLQuantizationType.Q8_0)
    num_bytes, seen = open_checkpoint(path).num_bytes, []
    load(path, quantization="int8", keeps_stored=keeps_stored, progress=lambda *at: seen.append(at))
    assert seen[-1] == (num_bytes, num_bytes)
