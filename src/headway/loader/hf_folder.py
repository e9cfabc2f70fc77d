"""A checkpoint in a Hugging Face folder: config.json beside one or several safetensors files.

The safetensors package maps a file. It is mapped for one tensor at a time, and the tensor is copied. So the file's
pages do not add to the process's memory, and a file that has changed is refused and cannot crash the process later.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headway.errors import CorruptModelError, UnsupportedModelError
from headway.layers.quantized_weight import Weight
from headway.loader.folder_files import CONFIG_NAME, has_tokenizer, read_json, require_config, weight_files
from headway.loader.quantized_weights import PART_DTYPES, StoredWeight, find_weights
from headway.models.assembly import EMBEDDING, LM_HEAD, expected_tensors
from headway.models.checkpoint import Checkpoint, TensorInfo
from headway.models.hf_config import config_from_hf

if TYPE_CHECKING:
    from headway.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_DTYPE_BITS = re.compile(r"[A-Z]+(\d+)")  # "BF16", "F8_E4M3"; "BOOL" takes a byte
_READABLE_DTYPES = ("F64", "F32", "F16", "BF16")
_COMPARED_BYTES = 2**24


class HFFolderCheckpoint(Checkpoint):
    """Weights in `folder`; `name` is what the user asked for (the folder itself, or a hub id)."""

    def __init__(self, folder: Path, name: str | None = None) -> None:
        self.path: Path = folder
        self.name = name or str(folder)
        raw = read_json(require_config(folder))
        self.config = config_from_hf(raw, str(folder / CONFIG_NAME))
        entries = {entry.name: entry for path in weight_files(folder) for entry in safetensors_entries(path)}
        self._tensors: dict[str, SafetensorsEntry | StoredWeight] = {**entries}
        spelled = (raw.get(key) for key in ("quantization_config", "compression_config"))
        quantisation = next((value for value in spelled if value is not None), None)
        if quantisation not in (None, {}):
            self._join_quantised(quantisation, entries)
        self.index = {name: TensorInfo(entry.shape, entry.num_bytes) for name, entry in self._tensors.items()}
        if raw.get("tie_word_embeddings") is None and LM_HEAD not in self.index:
            self.config = replace(self.config, tie_embeddings=True)
        if self.config.tie_embeddings and LM_HEAD in self.index and not self._head_is_embedding():
            self._untie()

    def _join_quantised(self, quantisation: object, entries: Mapping[str, SafetensorsEntry]) -> None:
        """Replace the tensors that make up a quantised weight by that weight."""
        source = str(self.path / CONFIG_NAME)
        if not isinstance(quantisation, Mapping):
            raise CorruptModelError(f"{source}: 'quantization_config' is no object")
        scheme, weights = find_weights(quantisation, entries, self._all_shapes(), source)
        for stored in weights.values():
            for end in stored.parts:
                del self._tensors[f"{stored.name}.{end}"]
        self._tensors.update(weights)
        self.quantized = weights.keys()
        self.config = replace(self.config, stored=scheme)

    def _all_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the architecture's tensors, including an output layer even if it is tied."""
        return expected_tensors(replace(self.config, tie_embeddings=False))

    def _head_is_embedding(self) -> bool:
        """Whether the stored output layer equals the embedding. Both are read in parts, up to the first difference."""
        head, table = self._tensors[LM_HEAD], self._tensors.get(EMBEDDING)
        if isinstance(head, StoredWeight) or not isinstance(table, SafetensorsEntry) or head.shape != table.shape:
            return False
        num_rows = head.shape[0]
        at_once = max(1, _COMPARED_BYTES * num_rows // max(1, head.num_bytes))
        parts = (range(first, min(first + at_once, num_rows)) for first in range(0, num_rows, at_once))
        return all(torch.equal(head.read(0, part).float(), table.read(0, part).float()) for part in parts)

    def _untie(self) -> None:
        logger.warning(
            "%s says 'tie_word_embeddings', but holds a %s that is not %s; the stored one is used",
            self.name,
            LM_HEAD,
            EMBEDDING,
        )
        self.config = replace(self.config, tie_embeddings=False)

    def read(self, name: str, *, device: torch.device | str = "cpu") -> Tensor:
        return self._tensors[name].read()

    def read_part(self, name: str, dim: int, part: range, *, device: torch.device | str = "cpu") -> Tensor:
        entry = self._tensors[name]
        if isinstance(entry, StoredWeight):
            return super().read_part(name, dim, part, device=device)
        return entry.read(dim, part)

    def read_weight(self, name: str, *, device: torch.device | str = "cpu") -> Weight:
        stored = self._tensors[name]
        return stored.read_weight() if isinstance(stored, StoredWeight) else stored.read()

    def tokenizer(self) -> Tokenizer | None:
        return folder_tokenizer(self.path)


@dataclass(frozen=True)
class SafetensorsEntry:
    """One tensor of a safetensors file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def is_float(self) -> bool:
        """Whether the tensor holds floats rather than codes."""
        return self.dtype in _READABLE_DTYPES

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        match = _DTYPE_BITS.match(self.dtype)
        return math.prod(self.shape) * (8 if match is None else int(match[1])) // 8

    def read(self, dim: int = 0, part: range | None = None) -> Tensor:
        """Read the tensor, or a part of it along `dim`, into new CPU memory. It has the file's dtype, which is a
        float."""
        return self._read(_READABLE_DTYPES, dim, part)

    def read_part(self) -> Tensor:
        """Read a tensor that is part of a quantised weight."""
        return self._read((*_READABLE_DTYPES, *PART_DTYPES))

    def _read(self, readable: tuple[str, ...], dim: int = 0, part: range | None = None) -> Tensor:
        if self.dtype not in readable:
            raise UnsupportedModelError(
                f"{self.path}: tensor {self.name} is of type {self.dtype}, which is not supported; "
                "use a float32, float16 or bfloat16 checkpoint, or a GGUF file"
            )
        with _open_safetensors(self.path) as file:
            if part is None:
                tensor: Tensor = file.get_tensor(self.name)
                return tensor.clone()
            window = slice(part.start, part.stop)
            found: Tensor = file.get_slice(self.name)[window if dim == 0 else (slice(None), window)]
            return found.clone()


def safetensors_entries(path: Path) -> list[SafetensorsEntry]:
    """The tensors in a file. The package checks the header against the file's size."""
    with path.open("rb") as start:
        first = start.read(8)
    if first == b"version ":
        raise CorruptModelError(f"{path} is a git-lfs pointer, not the weights; run `git lfs pull`")
    if len(first) < 8:  # an empty file cannot be mapped
        raise CorruptModelError(f"{path} is not a safetensors file, or is truncated: it has {len(first)} bytes")
    with _open_safetensors(path) as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it cannot be iterated over
        return [SafetensorsEntry(path, name, part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()]


@contextlib.contextmanager
def _open_safetensors(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise CorruptModelError(
            f"{path} is not a safetensors file, or is truncated or damaged ({error}); download it again"
        ) from error


def folder_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer in a folder, or None where the folder has no tokenizer file."""
    if not has_tokenizer([path.name for path in folder.iterdir() if path.is_file()]):
        return None
    from headway.tokenizer import tokenizer_from_folder

    return tokenizer_from_folder(folder)
