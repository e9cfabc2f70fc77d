"""What the bytes of a KV block depend on, beside its tokens and those before them.

Blocks go from one engine to another, over a folder on disk or straight from memory to memory, only if this is equal.
Whatever comes to change keys and values (a kernel that rounds otherwise, another layout, another kind of memory)
belongs here, and nowhere else.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

_VERSION = 3  # changes when blocks of the same model come to hold something else


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """Of one engine, made by its worker."""

    weights: tuple[bytes, ...]
    """The identity of each model that has its keys and values in a block: the one that answers, and a draft model."""
    numbers: str
    """The formats in which weights and activations are multiplied."""
    kernels: str
    attention_backend: str
    device: str
    """Its kind."""
    kv_format: str
    block_size: int
    block_bytes: int
    """Of all ranks' parts."""
    part_bytes: tuple[int, ...] = ()
    """Of each rank's part, where there are several."""
    collectives: str = ""
    """How their sums are made, which rounds."""

    @property
    def fingerprint(self) -> str:
        """Equal for equal formats: the name of a folder, and what engines tell each other."""
        return hashlib.blake2b(repr((_VERSION, self)).encode(), digest_size=16).hexdigest()
