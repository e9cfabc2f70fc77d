"""The information with which a rank starts, and how the ranks of a model connect."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from headway import native
from headway.config import ResolvedConfig
from headway.errors import ConfigError
from headway.layers.collectives import (
    Absent,
    Collectives,
    GroupCollectives,
    Meeting,
    SharedMemoryCollectives,
    SymmetricCollectives,
    ThreadCollectives,
)
from headway.loader.chosen_model import open_model

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankStart:
    """The information with which a rank starts."""

    rank: int
    size: int
    config: ResolvedConfig
    eos_token_ids: tuple[int, ...]
    collectives: str
    store: str
    """A file through which the ranks find each other."""
    memory: str
    """A file that is their shared memory."""
    slots: int
    """The descriptor of the ranks' shared memory for blocks on the host, if these go to disk; otherwise -1."""
    log_level: int

    @property
    def max_in_flight(self) -> int:
        return 2 if self.config.device.async_scheduling else 1

    def join(self, meeting: Meeting | None) -> Collectives:
        """Connect to the other ranks, and wait for them."""
        if self.collectives == "none":
            return Absent(self.rank, self.size)
        if meeting is not None:
            return ThreadCollectives(self.rank, meeting)
        if self.collectives == "shared-memory":
            return SharedMemoryCollectives(self.rank, self.size, self.memory)
        store = torch.distributed.FileStore(self.store, self.size)
        if self.collectives == "gloo":
            return GroupCollectives.gloo(self.rank, self.size, store)
        device = torch.device("cuda", torch.cuda.current_device())
        if self.collectives == "nccl":
            return GroupCollectives.nccl(self.rank, self.size, store, device)
        limits = self.config.scheduler
        # The largest parts: activations of a step, and logits.
        vocab = open_model(self.config.model).config
        num_tokens = max(limits.max_num_batched_tokens, limits.max_num_lines)
        widest = max(num_tokens * vocab.hidden_size, limits.max_num_lines * vocab.vocab_size)
        return SymmetricCollectives(self.rank, self.size, store, device, num_bytes=4 * widest)

    def choose_device(self) -> None:
        """Select this rank's GPU, or the one that all ranks share."""
        if self.config.device.kind == "cuda":
            torch.cuda.set_device(self.rank % torch.cuda.device_count() if self.collectives != "none" else 0)


@contextlib.contextmanager
def first_rank(config: ResolvedConfig, *, eos_token_ids: tuple[int, ...]) -> Iterator[RankStart]:
    """A context with rank 0's start, from which those of the other ranks are made. All must have started before it
    ends."""
    size = config.device.tensor_parallel_size
    collectives = choose_collectives(config)
    if config.device.kind == "cpu":
        num_threads = max(1, (config.device.num_threads or len(os.sched_getaffinity(0))) // size)
        config = dataclasses.replace(config, device=dataclasses.replace(config.device, num_threads=num_threads))
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="headway-ranks-", dir=in_memory))
    # Not a file there: containers have little room for those.
    slots = os.memfd_create("headway-slots", os.MFD_CLOEXEC) if config.cache.disk_cache else -1
    try:
        start = RankStart(
            rank=0,
            size=size,
            config=config,
            eos_token_ids=eos_token_ids,
            collectives=collectives,
            store=str(folder / "store"),
            memory=str(folder / "memory"),
            slots=slots,
            log_level=logging.getLogger("headway").getEffectiveLevel(),
        )
        start.choose_device()
        yield start
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # they have found each other
        if slots >= 0:
            os.close(slots)


def choose_collectives(config: ResolvedConfig) -> str:
    """Choose the collectives for these devices. Raises `ConfigError` for a choice that cannot work."""
    chosen, size = config.device.collectives, config.device.tensor_parallel_size
    if config.device.kind == "cpu":
        if chosen in ("nccl", "symmetric-memory"):
            raise ConfigError(f"collectives '{chosen}' are for CUDA devices; use 'shared-memory' or 'auto' on the CPU.")
        if chosen == "shared-memory" and not native.is_available():
            raise ConfigError("collectives 'shared-memory' need the native kernels, which cannot be built; use 'gloo'.")
        if chosen == "auto":
            return "shared-memory" if native.is_available() else "gloo"
        return chosen
    num_devices = torch.cuda.device_count()
    if chosen == "auto":
        chosen = "nccl" if num_devices >= size else "symmetric-memory"
    if chosen == "none":
        return chosen
    if chosen in ("shared-memory", "gloo", "threads"):
        raise ConfigError(f"collectives '{chosen}' are for the CPU; use 'nccl', 'symmetric-memory' or 'auto' on CUDA.")
    if num_devices not in (1, *range(size, num_devices + 1)) or (chosen == "nccl" and num_devices < size):
        raise ConfigError(
            f"tensor_parallel_size {size} needs as many CUDA devices, and there are {num_devices}. On a single one "
            "ranks can share it with collectives 'symmetric-memory', which is for tests."
        )
    if num_devices < size:
        logger.warning("%d ranks share one GPU, which takes turns: for tests, not for speed", size)
        if config.cache.kv_cache_memory is None and config.cache.num_kv_blocks is None:
            raise ConfigError("Ranks that share a GPU cannot tell what is theirs: give kv_cache_memory.")
    return chosen
