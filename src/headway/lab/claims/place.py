"""Where a claim is measured. A claim is written once and runs on the real engine and in the simulator alike."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from headway.lab.bench.online_metrics import OnlineMetrics
from headway.lab.bench.timelines import RequestTimeline
from headway.lab.claims.where import Where
from headway.lab.workload.requests import Work

if TYPE_CHECKING:
    from headway.cli.progress import Meter


@dataclass(frozen=True)
class Run:
    """What came of some work."""

    timelines: Sequence[RequestTimeline]
    duration_s: float
    waste: Sequence[float] = ()
    """At each step: which part of the KV memory that is kept from others holds nothing."""
    num_running: Sequence[int] = ()
    """And how many requests were in the batch."""

    @cached_property
    def metrics(self) -> OnlineMetrics:
        """The usual sums."""
        return OnlineMetrics.of(self.timelines, self.duration_s)

    @property
    def output_tok_s(self) -> float:
        return sum(timeline.num_output_tokens for timeline in self.timelines) / self.duration_s

    @property
    def total_tok_s(self) -> float:
        num_in = sum(timeline.num_prompt_tokens for timeline in self.timelines)
        return num_in / self.duration_s + self.output_tok_s

    @property
    def requests_s(self) -> float:
        return len(self.timelines) / self.duration_s

    @property
    def mean_batch(self) -> float:
        """Requests in the batch, the mean over steps."""
        return statistics.fmean(self.num_running) if self.num_running else 0.0

    @property
    def mean_step_s(self) -> float:
        """Time of a step, waiting for arrivals included."""
        return self.duration_s / len(self.num_running) if self.num_running else math.nan

    @property
    def mean_waste(self) -> float:
        return statistics.fmean(self.waste) if self.waste else 0.0

    @property
    def per_token_s(self) -> list[float]:
        """Of each request: from arrival to its last token, over the number of its tokens."""
        return [timeline.e2e_s / timeline.num_output_tokens for timeline in self.timelines]


class Place(Protocol):
    """Something that serves work."""

    where: Where

    @property
    def description(self) -> str:
        """Which model and machine."""
        ...

    @property
    def trust(self) -> str:
        """How far its numbers are from measured ones, in a few words; empty where they are measured."""
        ...

    @property
    def is_cpu(self) -> bool:
        """Whether it takes so long that work has to be small."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_num_seqs(self) -> int: ...

    @property
    def bytes_per_token(self) -> float:
        """Of KV memory."""
        ...

    @property
    def block_size(self) -> int: ...

    @property
    def kv_tokens(self) -> int:
        """Room in the KV memory."""
        ...

    def run(
        self,
        work: Work,
        *,
        kv_tokens: int | None = None,
        max_model_len: int | None = None,
        progress: Meter | None = None,
        **options: Any,
    ) -> Run:
        """Serve it with these options of scheduler and cache, everything else as by default, without a prefix cache. KV
        memory and the longest request can be made smaller."""
        ...

    def use_kv_dtype(self, kv_dtype: str | None) -> None:
        """From now on with keys and values in this format; `None`: as at first."""
        ...
