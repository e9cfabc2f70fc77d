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
from headway.loader.hf_folder import folder_tokenizer, read_json, require_config
from headway.models.assembly import expected_tensors
from headway.models.checkpoint import Checkpoint, TensorInfo
from headway.models.hf_config import config_from_hf

if TYPE_CHECKING:
    from headway.tokenizer import Tokenizer

_STD = 0.02

_LLAMA31_8B: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

BUILTIN_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    "llama31-8b": _LLAMA31_8B,
    "llama31-70b": {
        **_LLAMA31_8B,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}


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
