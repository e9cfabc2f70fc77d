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

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.num_running and not self.num_waiting


class SampleLog:
    """Keeps samples at even distances: whenever there are too many, every other one goes, and from then on fewer are
    taken. A sample counts until the next one, so those of an engine that falls idle stay: without them it would seem to
    go on running until its next request."""

    def __init__(self, most: int = MAX_SAMPLES) -> None:
        self.samples: list[BatchSample] = []
        self._most = most
        self._stride = 1
        self._num_offered = 0

    def is_due(self, *, is_idle: bool = False) -> bool:
        """Whether the next sample is one to keep; asked once for each. Making those that are not would be waste."""
        self._num_offered += 1
        return is_idle or (self._num_offered - 1) % self._stride == 0

    def add(self, sample: BatchSample) -> None:
        """Keep one that was due."""
        self.samples.append(sample)
        if len(self.samples) > self._most:
            self._thin()

    def _thin(self) -> None:
        idle = [one for one in self.samples if one.is_idle]
        if len(idle) > self._most // 2:  # too many to be seen apart
            del self.samples[1::2]
        else:
            busy = [one for one in self.samples if not one.is_idle][::2]
            self.samples = sorted([*idle, *busy], key=lambda one: one.at_s)
        self._stride *= 2


def sample_of(scheduler: Scheduler, at_s: float) -> BatchSample:
    """How a scheduler stands between two steps."""
    kv_cache = scheduler.kv_cache
    return BatchSample(
        at_s=at_s,
        num_running=scheduler.num_in_batch,
        num_waiting=len(scheduler.waiting),
        kv_used=kv_cache.num_used_blocks / kv_cache.num_blocks,
    )
