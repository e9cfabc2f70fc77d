"""Reading a GGUF file: header, metadata and tensor directory, in the time it takes to walk a few megabytes.

The `gguf` package's reader makes several numpy arrays for every token of a vocabulary and takes seconds; this one walks
the same bytes with `struct`. Every length is checked against the file's size before it is used.

    magic "GGUF", version, number of tensors, number of metadata entries
    metadata: key, type, value                    (strings are a 64-bit length and UTF-8; arrays a type and a length)
    directory: name, dimensions (innermost first), element type, offset from the start of the data
    padding to the alignment, then the data
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headway.errors import CorruptModelError, UnsupportedModelError

_STRING, _ARRAY = 8, 9
_BOOL = 7
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_UINT32, _UINT64 = struct.Struct("<I"), struct.Struct("<Q")
_SUPPORTED_VERSIONS = (2, 3)
_MAX_ARRAY_DEPTH = 4


@dataclass(frozen=True)
class GGUFType:
    """An element type: `block_size` elements take `block_bytes` bytes."""

    id: int
    name: str
    block_size: int
    block_bytes: int


F32 = GGUFType(0, "F32", 1, 4)
F16 = GGUFType(1, "F16", 1, 2)
BF16 = GGUFType(30, "BF16", 1, 2)
Q4_0 = GGUFType(2, "Q4_0", 32, 18)
Q4_1 = GGUFType(3, "Q4_1", 32, 20)
Q8_0 = GGUFType(8, "Q8_0", 32, 34)
Q4_K = GGUFType(12, "Q4_K", 256, 144)
Q6_K = GGUFType(14, "Q6_K", 256, 210)
# The common types are known here so that reading them does not need the gguf package, which takes 0.2 s to import.
_KNOWN_TYPES = {known.id: known for known in (F32, F16, BF16, Q4_0, Q4_1, Q8_0, Q4_K, Q6_K)}


@dataclass(frozen=True)
class GGUFTensor:
    """One entry of the directory, checked to lie within the file."""

    name: str
    shape: tuple[int, ...]
    """Outermost first, as torch has it."""
    type: GGUFType
    offset: int
    """The offset in bytes from the start of the file."""
    num_bytes: int


class GGUFFile:
    """Metadata and tensor directory of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        size = path.stat().st_size
        if size < 24:
            raise CorruptModelError(f"{path} is not a GGUF file: it has only {size} bytes")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                self._parse(_Cursor(data, size))
            except (_EndOfFile, struct.error) as error:
                raise CorruptModelError(f"{path} is truncated: the file ends inside its header") from error
            except UnicodeDecodeError as error:
                raise CorruptModelError(f"{path} has a damaged header: a string is not UTF-8") from error

    def read(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A tensor's bytes as stored, uint8 [rows, bytes per row]."""
        tensor = self.tensors[name]
        data = np.fromfile(self.path, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
        if data.size != tensor.num_bytes:
            raise CorruptModelError(f"{self.path} ends inside tensor {name}")
        return data.reshape(math.prod(tensor.shape[:-1]), -1)

    def _parse(self, cursor: _Cursor) -> None:
        if (magic := cursor.take(4)) != b"GGUF":
            if magic == b"vers":
                raise CorruptModelError(f"{self.path} is a git-lfs pointer, not the weights; run `git lfs pull`")
            raise CorruptModelError(f"{self.path} is not a GGUF file: it begins with {magic!r}")
        version = cursor.uint32()
        if version & 0xFFFF == 0:
            raise UnsupportedModelError(f"{self.path} is a big-endian GGUF file, which is not supported")
        if version not in _SUPPORTED_VERSIONS:
            raise UnsupportedModelError(f"{self.path} is GGUF version {version}; versions 2 and 3 are supported")
        num_tensors, num_entries = cursor.uint64(), cursor.uint64()
        for _ in range(num_entries):
            key = cursor.string()
            self.metadata[key] = self._value(cursor, cursor.uint32())
        directory = [self._directory_entry(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise CorruptModelError(f"{self.path} has a damaged header: alignment {alignment!r}")
        data_start = -(-cursor.position // alignment) * alignment
        for name, shape, type_id, offset in directory:
            self.tensors[name] = self._checked(name, shape, type_id, data_start + offset, cursor.size)

    def _value(self, cursor: _Cursor, type_id: int, depth: int = 0) -> Any:
        if type_id == _STRING:
            return cursor.string()
        if type_id in _SCALARS:
            return cursor.scalars(_SCALARS[type_id], 1)[0]
        if type_id == _ARRAY and depth < _MAX_ARRAY_DEPTH:
            element, count = cursor.uint32(), cursor.uint64()
            if element == _STRING:
                return cursor.strings(count)
            if element in _SCALARS:
                return cursor.scalars(_SCALARS[element], count)
            cursor.require(count)
            return [self._value(cursor, element, depth + 1) for _ in range(count)]
        raise CorruptModelError(f"{self.path} has a damaged header: unknown value type {type_id}")

    def _directory_entry(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.string()
        num_dimensions = cursor.uint32()
        if not 0 < num_dimensions <= 8:
            raise CorruptModelError(f"{self.path} has a damaged header: tensor {name} has {num_dimensions} dimensions")
        shape = tuple(cursor.scalars("<u8", num_dimensions)[::-1])
        return name, shape, cursor.uint32(), cursor.uint64()

    def _checked(self, name: str, shape: tuple[int, ...], type_id: int, offset: int, file_size: int) -> GGUFTensor:
        kind = _KNOWN_TYPES.get(type_id) or _library_type(type_id)
        if kind is None:
            raise UnsupportedModelError(f"{self.path}: tensor {name} is of unknown GGUF type {type_id}")
        if shape[-1] % kind.block_size:
            raise CorruptModelError(f"{self.path}: rows of {shape[-1]} in tensor {name} do not fill {kind.name} blocks")
        num_bytes = math.prod(shape) // kind.block_size * kind.block_bytes
        if offset + num_bytes > file_size:
            raise CorruptModelError(
                f"{self.path} is truncated: tensor {name} ends at byte {offset + num_bytes}, the file at {file_size}"
            )
        return GGUFTensor(name, shape, kind, offset, num_bytes)


class _EndOfFile(Exception):
    """A length in the header points past the end of the file."""


class _Cursor:
    """A position in the header that cannot leave the file."""

    def __init__(self, data: mmap.mmap, size: int) -> None:
        self._data = data
        self.size = size
        self.position = 0

    def require(self, num_bytes: int) -> None:
        """Raise unless that many bytes are left."""
        if num_bytes > self.size - self.position:
            raise _EndOfFile

    def take(self, num_bytes: int) -> bytes:
        self.require(num_bytes)
        self.position += num_bytes
        return self._data[self.position - num_bytes : self.position]

    def uint32(self) -> int:
        return int(_UINT32.unpack(self.take(4))[0])

    def uint64(self) -> int:
        return int(_UINT64.unpack(self.take(8))[0])

    def string(self) -> str:
        return self.take(self.uint64()).decode()

    def scalars(self, dtype: str, count: int) -> list[Any]:
        kind = np.dtype(dtype)
        self.require(count * kind.itemsize)
        values: list[Any] = np.frombuffer(self.take(count * kind.itemsize), dtype=kind).tolist()
        return values

    def strings(self, count: int) -> list[str]:
        """`string` repeated; a vocabulary has up to a few hundred thousand, so the loop is kept tight."""
        self.require(8 * count)
        data, size, position = self._data, self.size, self.position
        length_at = _UINT64.unpack_from
        values = []
        for _ in range(count):
            begin = position + 8
            position = begin + length_at(data, position)[0]
            if position > size:
                raise _EndOfFile
            values.append(data[begin:position].decode())
        self.position = position
        return values


def _library_type(type_id: int) -> GGUFType | None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(type_id)
        return GGUFType(type_id, kind.name, *GGML_QUANT_SIZES[kind])
    except (ValueError, KeyError):
        return None
