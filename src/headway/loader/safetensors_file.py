"""Reading a safetensors file: a length, a JSON header, then the tensors' bytes.

Tensors are read into memory of their own, not mapped: pages of the file then never count as the process's memory, and
nothing breaks if the file changes after loading.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.errors import CorruptModelError, UnsupportedModelError

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64,
    "U64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class SafetensorsEntry:
    """One tensor of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    """From the start of the file."""
    num_bytes: int


class SafetensorsFile:
    """The header of one file, checked against the file's size, and access to its tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = self._read_header()

    def read(self, name: str) -> Tensor:
        """The tensor, on the CPU, in the dtype of the file."""
        entry = self.entries[name]
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name} is of type {entry.dtype}, which is not supported; "
                "use a float32, float16 or bfloat16 checkpoint, or a GGUF file"
            )
        if entry.num_bytes == 0:
            return torch.empty(entry.shape, dtype=dtype)
        data = np.fromfile(self.path, dtype=np.uint8, count=entry.num_bytes, offset=entry.offset)
        if data.size != entry.num_bytes:
            raise CorruptModelError(f"{self.path} ends inside tensor {name}")
        return torch.from_numpy(data).view(dtype).view(entry.shape)

    def _read_header(self) -> dict[str, SafetensorsEntry]:
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            start = file.read(8)
            if start.startswith(b"version "):
                raise CorruptModelError(f"{self.path} is a git-lfs pointer, not the weights; run `git lfs pull`")
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise CorruptModelError(f"{self.path} is not a safetensors file, or is truncated ({size} bytes)")
            text = file.read(length)
        try:
            header = json.loads(text)
        except ValueError as error:
            raise CorruptModelError(f"{self.path} has a damaged header: {error}") from error
        if not isinstance(header, dict):
            raise CorruptModelError(f"{self.path} has a damaged header: it is not an object")
        header.pop("__metadata__", None)
        return {name: self._entry(name, raw, 8 + length, size) for name, raw in header.items()}

    def _entry(self, name: str, raw: Any, data_start: int, file_size: int) -> SafetensorsEntry:
        try:
            dtype, shape, (begin, end) = raw["dtype"], tuple(raw["shape"]), raw["data_offsets"]
            valid = all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end))
            num_bytes = math.prod(shape) * _BITS[dtype] // 8
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptModelError(f"{self.path} has a damaged header entry for tensor {name}: {raw!r}") from error
        if not valid or end - begin != num_bytes:
            raise CorruptModelError(f"{self.path} has a damaged header entry for tensor {name}: {raw!r}")
        if data_start + end > file_size:
            raise CorruptModelError(
                f"{self.path} is truncated: tensor {name} ends at byte {data_start + end}, the file at {file_size}"
            )
        return SafetensorsEntry(dtype, shape, data_start + begin, num_bytes)


def index_of(files: list[SafetensorsFile]) -> Mapping[str, SafetensorsFile]:
    """Which file holds each tensor."""
    return {name: file for file in files for name in file.entries}
