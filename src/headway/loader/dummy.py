"""A shape with random weights: no files needed, for measuring speed and for tests.

The shape is a built-in name, a folder with a config.json, or a JSON file in that form. Weights are normal with standard
deviation 0.02, norm weights are one. Each tensor's values depend only on the seed and on its name.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headway.errors import ModelNotFoundError
from headway.loader.builtin_shapes import BUILTIN_SHAPES
from headway.loader.folder_files import read_json, require_config
from headway.loader.hf_folder import folder_tokenizer
from headway.models.assembly import expected_tensors
from headway.models.checkpoint import Checkpoint, TensorInfo
from headway.models.hf_config import config_from_hf

if TYPE_CHECKING:
    from headway.tokenizer import Tokenizer

_STD = 0.02


class DummyCheckpoint(Checkpoint):
    """Random weights for the shape that `model` names."""

    def __init__(self, model: str | Path, seed: int = 0) -> None:
        self.name = f"{model} (random weights)"
        self.path, raw = _read_shape(str(model))
        self.config = config_from_hf(raw, str(model))
        self._seed = seed
        self._dtype: torch.dtype = getattr(torch, self.config.torch_dtype)
        self.index = {
            name: TensorInfo(shape, torch.Size(shape).numel() * self._dtype.itemsize)
            for name, shape in expected_tensors(self.config).items()
        }

    def identity(self) -> bytes:
        return repr((self.config, sorted(self.index.items()), self._seed)).encode()

    def read(self, name: str, *, device: torch.device | str = "cpu") -> Tensor:
        shape = self.index[name].shape
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype, device=device)
        # A hash, since the CPU generator takes only 32 bits of its seed.
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        return torch.empty(shape, dtype=self._dtype, device=device).normal_(std=_STD, generator=generator)

    def tokenizer(self) -> Tokenizer | None:
        return folder_tokenizer(self.path) if self.path is not None and self.path.is_dir() else None


def _read_shape(model: str) -> tuple[Path | None, Mapping[str, Any]]:
    if model in BUILTIN_SHAPES:
        return None, BUILTIN_SHAPES[model]
    path = Path(model).expanduser()
    if path.is_dir():
        return path, read_json(require_config(path))
    if path.is_file():
        return path, read_json(path)
    raise ModelNotFoundError(
        f"no shape {model!r}: load_format 'dummy' takes a folder with a config.json, a JSON file in that form, "
        f"or one of {', '.join(BUILTIN_SHAPES)}"
    )
