"""What running some work on a testbed gave: the timelines of its requests, and numbers that follow from them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from headway.core.utilisation import Utilisation
from headway_lab.bench.online_metrics import OnlineMetrics
from headway_lab.bench.timelines import RequestTimeline


@dataclass(frozen=True)
class Run:
    """One run of some work on a testbed."""

    timelines: Sequence[RequestTimeline]
    duration_s: float
    waste: Sequence[float] = ()
    """At each step: the share of the reserved KV memory that holds nothing."""
    num_running: Sequence[int] = ()
    """At each step: how many requests were in the batch."""
    prompt_share: float | None = None
    """The share of the steps' time that prompt tokens took."""
    utilisation: Utilisation | None = None
    """How well steps used the device, where that is known."""

    @cached_property
    def metrics(self) -> OnlineMetrics:
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
        """The mean number of requests in the batch over all steps."""
        return statistics.fmean(self.num_running) if self.num_running else 0.0

    @property
    def mean_step_s(self) -> float:
        """The mean time of a step, waiting for arrivals included."""
        return self.duration_s / len(self.num_running) if self.num_running else math.nan

    @property
    def mean_waste(self) -> float:
        return statistics.fmean(self.waste) if self.waste else 0.0

    @property
    def per_token_s(self) -> list[float]:
        """For each request, the time from arrival to its last token, divided by the number of its tokens."""
        return [timeline.e2e_s / timeline.num_output_tokens for timeline in self.timelines]
