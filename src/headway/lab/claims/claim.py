"""A claim: what was published, by whom, and how it is measured here. An outcome: what came of measuring it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from headway.lab.claims.chart import Chart
from headway.lab.claims.where import Where

if TYPE_CHECKING:
    from headway.lab.claims.context import Context

EngineUse = Literal["always", "gpu", "asked", "never"]
"""When a claim runs on the real engine. always: a CPU is enough. gpu: when there is one, and not in a quick run. asked:
it takes long, so only with `--on engine`. never: it is not about steps of a device at all."""

Numbers = Mapping[str, Mapping[str, float]]
"""Row → column → number."""


@dataclass(frozen=True)
class Outcome:
    """What was found."""

    value: float
    """The number that stands against the published one."""
    unit: str
    ours: str
    """The same and what belongs to it, as a text."""
    workload: str
    """What was run, with its true numbers."""
    differs: str
    """Where it differs from what was published, and why, as far as the run itself tells."""
    where: Where
    chart: Chart
    numbers: Numbers = field(default_factory=dict)
    """Everything that was measured, side by side."""


@dataclass(frozen=True)
class Claim:
    """Something that was published, with the way to measure it."""

    id: str
    title: str
    published: str
    """With its number."""
    source: str
    workload: str
    """As published."""
    method: str
    """How it is measured here."""
    measure: Callable[[Context], Outcome]
    engine: EngineUse = "asked"
