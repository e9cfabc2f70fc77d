"""Targets and how many requests met them: what a user was promised, and the share of users for whom it was kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headway.bench.times import RequestTimeline


@dataclass(frozen=True)
class Targets:
    """What is promised to a request; `None`: nothing."""

    ttft_s: float | None = None
    """Its first token so long after its arrival, at most."""
    tpot_s: float | None = None
    """Mean time of its later tokens, at most."""
    e2e_s: float | None = None
    """Its last token so long after its arrival, at most."""


@dataclass(frozen=True)
class Attainment:
    """How many of some requests met their targets. One that is not complete has met none."""

    num_requests: int
    num_met_ttft: int
    num_met_tpot: int
    num_met: int
    """All that is promised."""

    @property
    def share(self) -> float:
        """Of requests that met all, from 0 to 1; `nan` without requests."""
        return self.num_met / self.num_requests if self.num_requests else math.nan


def attainment(timelines: Sequence[RequestTimeline], targets: Targets | Sequence[Targets]) -> Attainment:
    """Of these requests, with the same targets for all or with those of each. For one class, give only its requests;
    one that was refused is a timeline without tokens."""
    each = [targets] * len(timelines) if isinstance(targets, Targets) else targets
    met = [_met(timeline, own) for timeline, own in zip(timelines, each, strict=True)]
    return Attainment(
        num_requests=len(met),
        num_met_ttft=sum(ttft for ttft, _, _ in met),
        num_met_tpot=sum(tpot for _, tpot, _ in met),
        num_met=sum(map(all, met)),
    )


def _met(timeline: RequestTimeline, targets: Targets) -> tuple[bool, bool, bool]:
    """(first token, later tokens, last token)"""
    if not timeline.is_complete:
        return False, False, False
    tpot_s = timeline.tpot_s
    return (
        targets.ttft_s is None or timeline.ttft_s <= targets.ttft_s,
        targets.tpot_s is None or tpot_s is None or tpot_s <= targets.tpot_s,
        targets.e2e_s is None or timeline.e2e_s <= targets.e2e_s,
    )
