"""Which model a name leads to, and random weights for a shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headway import loader
from headway.config import ModelConfig
from headway.errors import ConfigError, CorruptModelError, ModelNotFoundError, UnsupportedModelError
from headway.layers.ops import TorchOps
from headway.loader import open_checkpoint
from headway.loader.builtin_shapes import BUILTIN_SHAPES
from headway.loader.chosen_model import model_path, open_model
from headway.loader.dummy import DummyCheckpoint
from headway.models import load_decoder
from headway.models.decoder_config import Llama3Scaling
from tests.unit.models.harness import Harness
from tests.unit.models.tiny import hf_model, random_prompt, save_folder


@pytest.mark.parametrize("model", ["/no/such/folder", "./nowhere", "a/b/c", "missing.gguf", "models/missing.gguf", ""])
def test_path_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setattr(loader, "find_model", lambda *_, **__: pytest.fail("went to the hub"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match="no file or folder|is not a model"):
        open_checkpoint(model)


def test_format_of_a_folder(tmp_path: Path) -> None:
    folder = save_folder(hf_model("llama"), tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"no \.gguf file"):
        open_checkpoint(folder, "gguf")
    assert open_checkpoint(folder, "safetensors").config.architecture == "llama"
    (folder / "model.safetensors").unlink()
    assert open_checkpoint(folder, "dummy").config.num_layers == 2


MIXTRAL = json.dumps({**BUILTIN_SHAPES["llama31-8b"], "architectures": ["MixtralForCausalLM"]})


@pytest.mark.parametrize(
    ("model", "content", "load_format", "error", "message"),
    [
        (
            "x",
            None,
            "pickle",
            ConfigError,
            "unknown load_format 'pickle'; valid names are auto, safetensors, gguf, dummy",
        ),
        ("model.safetensors", "12345678", "auto", ModelNotFoundError, "give the folder that holds"),
        ("llama31-8b", None, "auto", ModelNotFoundError, "use it with load_format 'dummy'"),
        ("llama9", None, "dummy", ModelNotFoundError, r"no shape 'llama9'.*qwen3-0\.6b, llama31-8b"),
        ("shape.json", "not json", "dummy", CorruptModelError, "not valid JSON"),
        ("shape.json", MIXTRAL, "dummy", UnsupportedModelError, "MixtralForCausalLM"),
    ],
)
def test_refusals(
    tmp_path: Path, model: str, content: str | None, load_format: str, error: type[Exception], message: str
) -> None:
    """Of a name, or of a file with some content."""
    if content is not None:
        (tmp_path / model).write_text(content)
    with pytest.raises(error, match=message):
        open_checkpoint(model if content is None else tmp_path / model, load_format)


def test_builtin_shapes_are_no_names_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "find_model", lambda *_, **__: pytest.fail("went to the hub"))
    with pytest.raises(ModelNotFoundError, match="a shape without weights"):
        model_path(ModelConfig(model="qwen3-0.6b"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"revision": "main"}, "give model"),
        ({"revision": "main", "model": "llama31-8b", "load_format": "dummy"}, "random weights of llama31-8b"),
        ({"revision": "main", "model": "."}, "the model is ."),
    ],
)
def test_revision_of_what_has_none(options: dict[str, str], message: str) -> None:
    """It would have no effect."""
    with pytest.raises(ConfigError, match=message):
        open_model(ModelConfig(**options))


def test_builtin_shapes() -> None:
    small, large = (open_checkpoint(name, "dummy") for name in ("qwen3-0.6b", "llama31-8b"))
    assert small.config.num_parameters == pytest.approx(0.596e9, rel=0.001)
    assert (small.config.tie_embeddings, small.config.qk_norm, small.config.rope.theta) == (True, True, 1e6)
    assert large.config.num_parameters == pytest.approx(8.03e9, rel=0.001)
    assert large.config.rope.scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)
    assert large.num_bytes == large.config.num_parameters * 2
    assert (large.path, large.tokenizer()) == (None, None)


@pytest.fixture
def shape_file(tmp_path: Path) -> Path:
    path = tmp_path / "shape.json"
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96, "head_dim": 16}
    path.write_text(json.dumps({**BUILTIN_SHAPES["qwen3-0.6b"], **small, "torch_dtype": "float32"}))
    return path


def test_dummy_weights_run(shape_file: Path) -> None:
    decoder = load_decoder(open_checkpoint(shape_file, "dummy"), ops=TorchOps())
    logits = Harness(decoder).prompt_logits(random_prompt(10))
    assert logits.isfinite().all()
    assert logits.std() > 0


def test_dummy_weights_depend_on_seed_and_name_only(shape_file: Path) -> None:
    first, again, other = DummyCheckpoint(shape_file), DummyCheckpoint(shape_file), DummyCheckpoint(shape_file, seed=1)
    name, sibling = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
    assert not torch.equal(first.read(sibling), first.read(name))
    assert torch.equal(again.read(name), first.read(name))
    assert not torch.equal(other.read(name), first.read(name))
    assert first.read(name).std() == pytest.approx(0.02, rel=0.05)
    assert torch.equal(first.read("model.norm.weight"), torch.ones(64))
