"""Targets: what a request is promised, and the share of requests that got it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway_lab.bench.timelines import RequestTimeline

if TYPE_CHECKING:
    from headway.core.request_options import RequestOptions


@dataclass(frozen=True)
class Targets:
    """The targets of a request; `None`: no target."""

    ttft_s: float | None = None
    """Most seconds from its arrival to its first token."""
    tpot_s: float | None = None
    """Most seconds of its later tokens, in the mean."""
    e2e_s: float | None = None
    """Most seconds from its arrival to its last token."""

    def __str__(self) -> str:
        bounds = {"TTFT": self.ttft_s, "TPOT": self.tpot_s, "E2E": self.e2e_s}
        return ", ".join(f"{name} ≤ {1e3 * s:g} ms" for name, s in bounds.items() if s is not None) or "none"

    def worst(self, timeline: RequestTimeline) -> float | None:
        """The largest of a request's times, as a multiple of its target; `None` if there are no targets."""
        if not timeline.is_complete:
            return math.inf
        pairs = ((timeline.ttft_s, self.ttft_s), (timeline.tpot_s, self.tpot_s), (timeline.e2e_s, self.e2e_s))
        return max((took / bound for took, bound in pairs if took is not None and bound), default=None)


def own_targets(options: Sequence[RequestOptions]) -> list[Targets] | None:
    """The targets that requests bring themselves, if any of them does."""
    each = [Targets(one.ttft_target_s, one.tpot_target_s) for one in options]
    return each if any(targets != Targets() for targets in each) else None


def class_names(options: Sequence[RequestOptions]) -> list[str]:
    """The name of each request's class: its tenant, with what distinguishes several classes of one tenant."""
    classes = list(dict.fromkeys(map(_class_key, options)))
    tenants = [tenant for tenant, *_ in classes]
    names = {}
    for key in classes:
        tenant, priority, ttft_s, tpot_s = key
        is_alone = tenants.count(tenant) == 1
        apart = "" if is_alone else f"priority {priority}, targets {Targets(ttft_s, tpot_s)}"
        names[key] = " ".join(filter(None, [tenant, f"({apart})" if tenant and apart else apart])) or "all"
    return [names[key] for key in map(_class_key, options)]


def _class_key(one: RequestOptions) -> tuple[str, int, float | None, float | None]:
    return one.tenant, one.priority, one.ttft_target_s, one.tpot_target_s


def targets_by_class(given: Targets | None, options: Sequence[RequestOptions]) -> dict[str, Targets]:
    """The targets by the names of the classes that have any; "" if they are the same for all."""
    if given is not None:
        return {"": given}
    own = own_targets(options) or []
    return {name: each for name, each in zip(class_names(options), own) if each != Targets()}


def targets_note(given: Targets | None, options: Sequence[RequestOptions]) -> str:
    """A sentence on the targets that a goodput counts."""
    if given is not None:
        return f"Targets, of every request (--goodput): {given}."
    own = own_targets(options)
    if own is None:
        return "No targets: neither does the work promise any, nor does --goodput."
    by_class = dict(zip(class_names(options), own))
    return f"Targets of the workload's classes: {'; '.join(f'{name}: {each}' for name, each in by_class.items())}."


@dataclass(frozen=True)
class Attainment:
    """How many of some requests met their targets. An incomplete request has met none."""

    num_requests: int
    num_met_ttft: int
    num_met_tpot: int
    num_met: int
    """Requests that met all targets."""

    @property
    def share(self) -> float:
        """The share of requests that met all, from 0 to 1; `nan` without requests."""
        return self.num_met / self.num_requests if self.num_requests else math.nan


def attainment(timelines: Sequence[RequestTimeline], targets: Targets | Sequence[Targets]) -> Attainment:
    """The attainment of these requests, with the same targets for all or with those of each. For one class, give only
    its requests; a refused request is a timeline without tokens."""
    each = [targets] * len(timelines) if isinstance(targets, Targets) else targets
    met = [_met(timeline, own) for timeline, own in zip(timelines, each, strict=True)]
    return Attainment(
        num_requests=len(met),
        num_met_ttft=sum(ttft for ttft, _, _ in met),
        num_met_tpot=sum(tpot for _, tpot, _ in met),
        num_met=sum(map(all, met)),
    )


def _met(timeline: RequestTimeline, targets: Targets) -> tuple[bool, bool, bool]:
    """Whether a request met the targets of its (first token, later tokens, last token)."""
    if not timeline.is_complete:
        return False, False, False
    tpot_s = timeline.tpot_s
    return (
        targets.ttft_s is None or timeline.ttft_s <= targets.ttft_s,
        targets.tpot_s is None or tpot_s is None or tpot_s <= targets.tpot_s,
        targets.e2e_s is None or timeline.e2e_s <= targets.e2e_s,
    )
