"""Identifies everything that the bytes of a KV block depend on besides its tokens and those before them.

Engines exchange blocks, over a folder on disk or from memory to memory, only if their formats are equal. Anything that
changes keys and values (a kernel with different rounding, another layout, another kind of memory) belongs here, and
nowhere else.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

_VERSION = 3  # changes when blocks of the same model come to hold something else


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """The block format of one engine, made by its worker."""

    weights: tuple[bytes, ...]
    """The identity of each model with keys and values in a block: the main model, and a draft model."""
    numbers: str
    """The formats in which weights and activations are multiplied."""
    kernels: str
    attention_backend: str
    device: str
    """The kind of device."""
    kv_format: str
    block_size: int
    block_bytes: int
    """The size of a block, with the parts of all ranks."""
    part_bytes: tuple[int, ...] = ()
    """The size of each rank's part, where there are several ranks."""
    collectives: str = ""
    """The method of summing over ranks, which affects rounding."""

    @property
    def fingerprint(self) -> str:
        """A hash that is equal for equal formats. It names a folder, and engines compare it."""
        return hashlib.blake2b(repr((_VERSION, self)).encode(), digest_size=16).hexdigest()
