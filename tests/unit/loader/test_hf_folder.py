"""Hugging Face folders: what is found, and what every kind of broken folder is told."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from headway.errors import CorruptModelError, ModelNotFoundError, UnsupportedModelError
from headway.loader import open_checkpoint
from headway.loader.hf_folder import safetensors_entries
from tests.unit.models.tiny import hf_model, save_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_folder(hf_model("llama"), tmp_path)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save_folder(hf_model("llama"), tmp_path, max_shard_size="60KB")


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "60KB"}], ids=["one file", "shards"])
def test_index_and_tensors(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = save_folder(hf_model("llama"), tmp_path, **options)
    assert (len(list(folder.glob("*.safetensors"))) > 2) == bool(options)
    checkpoint = open_checkpoint(folder)
    expected = hf_model("llama").state_dict()
    streamed = dict(checkpoint.tensors())
    assert set(streamed) == set(checkpoint.index) == set(expected)
    assert all(torch.equal(streamed[name], tensor) for name, tensor in expected.items())
    assert checkpoint.num_bytes == sum(tensor.nbytes for tensor in expected.values())
    assert checkpoint.path == folder
    assert checkpoint.tokenizer() is None


def only(folder: Path, **contents: str) -> None:
    """What a folder has besides is removed."""
    for path in folder.iterdir():
        path.unlink()
    for name, text in contents.items():
        (folder / f"{name}.txt").write_text(text)


def of_shards(folder: Path, index: object = None) -> None:
    """The same in shards; with another index, or without the second shard."""
    (folder / "model.safetensors").unlink()
    save_folder(hf_model("llama"), folder, max_shard_size="60KB")
    if index is None:
        sorted(folder.glob("*.safetensors"))[1].unlink()
    else:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


NOT_FOUND, CORRUPT = ModelNotFoundError, CorruptModelError
INDEX = r"model\.safetensors\.index\.json"


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda folder: only(folder, notes="hello"), NOT_FOUND, r"it has no config\.json \(it contains notes\.txt\)"),
        (lambda folder: only(folder), NOT_FOUND, "contains nothing"),
        (lambda folder: (folder / "model.safetensors").unlink(), NOT_FOUND, "no weights"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            UnsupportedModelError,
            r"pytorch_model\.bin.*convert them to safetensors",
        ),
        (lambda folder: (folder / "config.json").write_text("{"), CORRUPT, r"config\.json"),
        (lambda folder: (folder / "config.json").write_text("[1, 2]"), CORRUPT, r"config\.json"),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff"), CORRUPT, r"config\.json"),
        (lambda folder: of_shards(folder), CORRUPT, r"incomplete.*model-00002-of-\d+\.safetensors"),
        (lambda folder: of_shards(folder, {}), CORRUPT, INDEX),
        (lambda folder: of_shards(folder, {"weight_map": {}}), CORRUPT, INDEX),
        (lambda folder: of_shards(folder, {"weight_map": {"a": "../outside.safetensors"}}), CORRUPT, INDEX),
    ],
)
def test_damaged_folder(folder: Path, damage: Callable[[Path], object], error: type[Exception], message: str) -> None:
    damage(folder)
    with pytest.raises(error, match=message):
        open_checkpoint(folder)


def test_shards_without_an_index_are_all_read(sharded: Path) -> None:
    names = set(open_checkpoint(sharded).index)
    (sharded / "model.safetensors.index.json").unlink()
    (sharded / "consolidated.safetensors").write_bytes(b"not looked at")
    assert set(open_checkpoint(sharded).index) == names


def test_a_single_file_beside_an_index_is_the_one_that_is_read(sharded: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in transformers."""
    newer = hf_model("llama", seed=1).state_dict()
    save_file(newer, sharded / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(sharded)
    assert "model.safetensors and model.safetensors.index.json; only the former is read" in caplog.text
    reference = transformers.AutoModelForCausalLM.from_pretrained(sharded).state_dict()
    for name, tensor in checkpoint.tensors():
        assert torch.equal(tensor, newer[name]), name
        assert torch.equal(tensor, reference[name]), name


def _header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _tensor(dtype: str, shape: list[int], *offsets: int) -> bytes:
    return json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "not a safetensors file, or is truncated"),
        (lambda data: data[:4], "not a safetensors file, or is truncated"),
        (lambda data: data[:200], "not a safetensors file, or is truncated"),
        (lambda data: data[:-1], "not a safetensors file, or is truncated or damaged"),
        (lambda data: data[: len(data) // 2], "not a safetensors file, or is truncated or damaged"),
        (lambda data: b"\xff" * 8 + data[8:], "not a safetensors file"),
        (lambda data: data[:8] + b"x" + data[9:], "or is truncated or damaged"),
        (lambda data: _header(b"[]"), "or is truncated or damaged"),
        (lambda data: _header(b'{"a": {}}'), "or is truncated or damaged"),
        (lambda data: _header(b'{"a": 3}'), "or is truncated or damaged"),
        (lambda data: _header(_tensor("F32", [2], 0, 4)) + bytes(8), "or is truncated or damaged"),
        (lambda data: _header(_tensor("F32", [-1], 4, 0)) + bytes(8), "or is truncated or damaged"),
        (lambda data: _header(_tensor("X9", [1], 0, 4)) + bytes(8), "or is truncated or damaged"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ],
)
def test_damaged_weights(folder: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CorruptModelError, match=message) as caught:
        open_checkpoint(folder)
    assert str(path) in str(caught.value)


def test_file_that_shrinks_after_opening(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:10_000])
    with pytest.raises(CorruptModelError, match="truncated or damaged"):
        list(checkpoint.tensors())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32])
def test_weights_that_are_not_floats(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"w": torch.zeros(4, dtype=dtype)}, tmp_path / "w.safetensors")
    with pytest.raises(UnsupportedModelError, match="tensor w is of type"):
        safetensors_entries(tmp_path / "w.safetensors")[0].read()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5), (7,), (), (0, 4)])
def test_reads_what_the_safetensors_package_writes(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensors = {"first": torch.randn(3).to(dtype), "second": torch.randn(shape).to(dtype)}
    save_file(tensors, tmp_path / "w.safetensors", metadata={"format": "pt"})
    entries = {entry.name: entry for entry in safetensors_entries(tmp_path / "w.safetensors")}
    assert set(entries) == set(tensors)
    for name, tensor in tensors.items():
        assert (entries[name].shape, entries[name].num_bytes) == (tensor.shape, tensor.nbytes)
        assert entries[name].read().dtype == dtype
        assert torch.equal(entries[name].read(), tensor)
