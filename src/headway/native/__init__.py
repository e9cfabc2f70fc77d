"""The CPU kernels: C sources compiled once per machine, or for the wheel, loaded through ctypes, called with torch
tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    """`lib` is imported when one of its names is first asked for: it brings torch, which `build` does without."""
    if name not in __all__:
        raise AttributeError(f"module 'headway.native' has no attribute '{name}'")
    from headway.native import lib

    return getattr(lib, name)
