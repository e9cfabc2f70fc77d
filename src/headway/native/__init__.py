"""The CPU kernels: C sources compiled once per machine, loaded through ctypes, called with torch tensors."""

from __future__ import annotations

from headway.native.lib import (
    GGUF_BLOCKS,
    NativeLibrary,
    PackedWeight,
    dequantize,
    get_num_threads,
    is_available,
    is_finite,
    load,
    pack_float32,
    pack_int4,
    pack_int8,
    set_num_threads,
)

__all__ = [
    "GGUF_BLOCKS",
    "NativeLibrary",
    "PackedWeight",
    "dequantize",
    "get_num_threads",
    "is_available",
    "is_finite",
    "load",
    "pack_float32",
    "pack_int4",
    "pack_int8",
    "set_num_threads",
]
