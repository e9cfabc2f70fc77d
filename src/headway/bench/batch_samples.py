"""What the batch looked like over time: how many ran, how many waited, and how full the KV cache was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.core import Scheduler

MAX_SAMPLES = 4_000


@dataclass(frozen=True)
class BatchSample:
    """One moment."""

    at_s: float
    """After the start of the run."""
    num_running: int
    num_waiting: int
    kv_used: float
    """Share of KV blocks that requests hold, from 0 to 1; `nan` where nobody tells."""


class SampleLog:
    """Keeps samples at even distances: whenever there are too many, every other one goes, and from then on fewer are
    taken."""

    def __init__(self, most: int = MAX_SAMPLES) -> None:
        self.samples: list[BatchSample] = []
        self._most = most
        self._stride = 1
        self._num_offered = 0

    def is_due(self) -> bool:
        """Whether the next sample is one to keep; asked once for each. Making those that are not would be waste."""
        self._num_offered += 1
        return (self._num_offered - 1) % self._stride == 0

    def add(self, sample: BatchSample) -> None:
        """Keep one that was due."""
        self.samples.append(sample)
        if len(self.samples) > self._most:
            del self.samples[1::2]
            self._stride *= 2


def sample_of(scheduler: Scheduler, at_s: float) -> BatchSample:
    """How a scheduler stands between two steps."""
    kv_cache = scheduler.kv_cache
    return BatchSample(
        at_s=at_s,
        num_running=len(scheduler.running) + len(scheduler.held),
        num_waiting=len(scheduler.waiting),
        kv_used=kv_cache.num_used_blocks / kv_cache.num_blocks,
    )
