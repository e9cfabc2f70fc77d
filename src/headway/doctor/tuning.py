"""From where on a fact is worth a warning."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bounds:
    """The bounds of the checks."""

    small_memory: int = 2 * 2**30
    """Bytes. The embedded model takes about 1.3 GB while it serves (README, Results)."""
    small_disk: int = 2 * 2**30
    """Free bytes of a folder for kernels and models."""
    small_shared: int = 16 * 2**20
    """Free bytes of /dev/shm. A rank on the CPU takes 2 MiB (`layers/collectives.py`)."""
    small_shared_of_gpus: int = 2**30
    """Bytes of /dev/shm where there are several GPUs: NCCL's buffers go there. Docker gives 64 MiB by default."""
    few_files: int = 4096
    """Open files. Each connection is one."""
    busy_share: float = 0.5
    """Share of the cores that other programs keep busy."""
    taken_share: float = 0.1
    """Share of a GPU's memory that is taken already: by default the engine plans with 0.9 of all."""
    clock_slack_s: float = 86_400.0
    """How much earlier than Headway's own files the clock may be: time zones of file systems differ."""
    oldest_capability: tuple[int, int] = (8, 0)
    """Older GPUs have no bfloat16 and have never been measured."""


BOUNDS = Bounds()
