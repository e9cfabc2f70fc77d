"""Engines exchange blocks only if all that the bytes depend on is equal."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest

from headway.models.checkpoint import Checkpoint, TensorInfo
from headway.transfer.block_format import BlockFormat
from tests.unit.no_model import nominal_config

FORMAT = BlockFormat(
    weights=(b"model", b"draft"),
    numbers="float32",
    kernels="torch",
    attention_backend="torch_padded",
    device="cpu",
    kv_format="float32",
    block_size=16,
    block_bytes=1024,
    part_bytes=(512, 512),
    collectives="ThreadCollectives",
)


def test_equal_formats_have_equal_fingerprints() -> None:
    assert dataclasses.replace(FORMAT).fingerprint == FORMAT.fingerprint
    assert FORMAT.fingerprint.isalnum() and len(FORMAT.fingerprint) == 32


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(BlockFormat)])
def test_every_field_counts(field: str) -> None:
    value = getattr(FORMAT, field)
    other = value[:1] if isinstance(value, tuple) else "other" if isinstance(value, str) else value + 1
    assert dataclasses.replace(FORMAT, **{field: other}).fingerprint != FORMAT.fingerprint


class Weights(Checkpoint):
    """Files that are never read as tensors."""

    def __init__(self, folder: Path) -> None:
        self.name, self.path = "weights", folder
        self.config = nominal_config(vocab_size=10, max_model_len=10)
        self.index = {"a": TensorInfo((10, 10), 400)}

    def read(self, name: str, *, device: object = "cpu") -> NoReturn:
        raise NotImplementedError

    def tokenizer(self) -> None:
        return None


def test_weights_are_told_by_their_contents_not_by_where_and_since_when_they_are_there(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    (here / "model.safetensors").write_bytes(bytes(5_000_000))
    shutil.copytree(here, there)
    os.utime(there / "model.safetensors", (1, 1))
    assert Weights(here).identity() == Weights(there).identity()
    with (there / "model.safetensors").open("r+b") as file:
        file.seek(2_345_678)
        file.write(b"x" * 10_000)
    assert Weights(here).identity() != Weights(there).identity()
