"""Where the time of a step goes, summed up from a trace: host spans, kernels, and the gaps between kernels."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headway.errors import HeadwayError
from headway.lab.bench.kernel_kinds import kind_of, short_name
from headway.lab.bench.trace_file import STEP_SPAN, Trace, TraceEvent

MAX_KERNELS = 12


@dataclass(frozen=True)
class TimeShare:
    """What one name cost, per step."""

    name: str
    kind: str
    us_per_step: float
    calls_per_step: float


@dataclass(frozen=True)
class StepSummary:
    """Means over the steps of a trace. The device's times are those inside the window of the steps."""

    num_steps: int
    step_us: float
    """From the start of a step to the start of the next."""
    host: Sequence[TimeShare]
    """Spans by name, the longest first. A span inside another counts in both."""
    has_kernels: bool
    """False on a CPU: then the shares below are of the host's torch operators."""
    computing: Sequence[TimeShare]
    """All names, the longest first."""
    busy_us: float
    """Time in which at least one kernel ran."""
    gaps_per_step: float
    longest_gap_us: float

    @property
    def idle_us(self) -> float:
        return max(0.0, self.step_us - self.busy_us)

    @property
    def busy_share(self) -> float:
        return min(1.0, self.busy_us / self.step_us) if self.step_us else 0.0

    def by_kind(self) -> dict[str, float]:
        """Microseconds per step of each kind of kernel, the longest first."""
        kinds: dict[str, float] = defaultdict(float)
        for share in self.computing:
            kinds[share.kind] += share.us_per_step
        return dict(sorted(kinds.items(), key=lambda item: -item[1]))


def summarise(trace: Trace) -> StepSummary:
    """Sum up a trace that has at least one step."""
    steps = trace.steps
    if not steps:
        raise HeadwayError("The trace has no step of the engine in it.")
    start_us, end_us = steps[0].start_us, max(step.end_us for step in steps)
    inside = [clipped for event in trace.computing if (clipped := _clip(event, start_us, end_us)) is not None]
    spans = [event for event in trace.spans if event.name != STEP_SPAN]
    busy = _union(inside)
    gaps = [later[0] - earlier[1] for earlier, later in itertools.pairwise(busy)]
    return StepSummary(
        num_steps=len(steps),
        step_us=(end_us - start_us) / len(steps),
        host=_shares(spans, len(steps)),
        has_kernels=trace.has_kernels,
        computing=_shares(inside, len(steps)),
        busy_us=sum(end - start for start, end in busy) / len(steps),
        gaps_per_step=len(gaps) / len(steps),
        longest_gap_us=max(gaps, default=0.0),
    )


def _clip(event: TraceEvent, start_us: float, end_us: float) -> TraceEvent | None:
    """The part of an event inside the window, if there is one."""
    start, end = max(event.start_us, start_us), min(event.end_us, end_us)
    return TraceEvent(event.name, start, end - start, event.thread) if end > start else None


def _union(events: Iterable[TraceEvent]) -> list[tuple[float, float]]:
    """The stretches of time in which something ran, in order."""
    merged: list[tuple[float, float]] = []
    for event in sorted(events, key=lambda event: event.start_us):
        if merged and event.start_us <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], event.end_us))
        else:
            merged.append((event.start_us, event.end_us))
    return merged


def _shares(events: Iterable[TraceEvent], num_steps: int) -> list[TimeShare]:
    durations: dict[str, list[float]] = defaultdict(list)
    for event in events:
        durations[event.name].append(event.duration_us)
    shares = [
        TimeShare(short_name(name), kind_of(name), sum(times) / num_steps, len(times) / num_steps)
        for name, times in durations.items()
    ]
    return sorted(shares, key=lambda share: -share.us_per_step)
