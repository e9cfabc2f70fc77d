"""The records of a published claim's outcome: its numbers and texts, and a chart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from headway_lab.charts import HeatMap, Series, bar_chart, heat_map, line_chart
from headway_lab.charts.svg import WIDTH

Where = Literal["engine", "simulator", "scheduler", "recorded", "arithmetic"]
"""engine: the real engine. simulator: the real scheduler, with a cost model for the device. scheduler: the scheduler
alone, without a model. recorded: measured on an engine before, and kept with its date and commit. arithmetic: computed
from published numbers, nothing runs."""

EngineUse = Literal["always", "gpu", "asked", "never"]
"""When a claim runs on the real engine. always: a CPU is enough. gpu: when there is one, and not in a quick run. asked:
it takes long, so only with `--on engine`. never: it is not about steps of a device at all."""

Numbers = Mapping[str, Mapping[str, float]]
"""Row → column → number."""


def times(ratio: float) -> str:
    """2.7×"""
    if not math.isfinite(ratio):
        return "–"
    return f"{ratio:,.0f}×" if ratio >= 100 else f"{ratio:.3g}×" if ratio >= 10 else f"{ratio:.2f}×"


def percent(share: float, *, signed: bool = False) -> str:
    """61% or, of a change, −34%."""
    if not math.isfinite(share):
        return "–"
    digits = 1 if abs(share) < 0.1 or 0.99 < abs(share) < 1 else 0
    return f"{100 * share:{'+' if signed else ''}.{digits}f}%".replace("-", "−")


def milliseconds(seconds: float) -> str:
    """A latency as text; in seconds from ten seconds on."""
    if not math.isfinite(seconds):
        return "–"
    return f"{seconds:,.1f} s" if seconds >= 10 else f"{1e3 * seconds:,.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def change(new: float, old: float) -> float:
    """-0.34: a third less."""
    return new / old - 1.0 if old else math.nan


def sentences(parts: Sequence[str]) -> str:
    """The sentences that are not empty, one after the other."""
    return " ".join(part for part in parts if part)


@dataclass(frozen=True)
class Line:
    """Points over an axis; if they have labels, named dots."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True)
class Chart:
    """Bars; or lines, if there are any; or a heat map."""

    title: str
    y: str
    """Title of the values' axis, with the unit."""
    bars: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    """Texts after the bars' values."""
    lines: Sequence[Line] = ()
    x: str = ""
    log_x: bool = False
    log_y: bool = False
    levels: Mapping[str, float] = field(default_factory=dict)
    """Named horizontal dashed lines."""
    caption: str = ""
    heat: HeatMap | None = None
    """Grids of cells; `y` is then the title of their scale."""

    def svg(self, *, width: float = WIDTH) -> str:
        """The picture, made for this width."""
        if self.heat is not None:
            return heat_map(self.title, y=self.y, heat=self.heat)
        if not self.lines:
            bars, notes = self.bars, self.notes
            return bar_chart(self.title, y=self.y, bars=bars, log_y=self.log_y, notes=notes, width=width)
        series = [Series(line.name, line.xs, line.ys) for line in self.lines]
        return line_chart(
            self.title,
            x=self.x,
            y=self.y,
            series=series,
            log_x=self.log_x,
            log_y=self.log_y,
            lines=self.levels,
            width=width,
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Chart:
        heat = document.get("heat")
        parts = {
            "lines": tuple(Line(**line) for line in document["lines"]),
            "heat": None if heat is None else HeatMap.from_json(heat),
        }
        return Chart(**{**document, **parts})


@dataclass(frozen=True)
class Outcome:
    """The results of a claim."""

    value: float
    """The number that is compared with the published one."""
    unit: str
    ours: str
    """The value with its context, as a text."""
    workload: str
    """What was run, with its true numbers."""
    differs: str
    """How it differs from what was published, and why, if the run itself shows it."""
    where: Where
    chart: Chart
    numbers: Numbers = field(default_factory=dict)
    """Everything that was measured, side by side."""
    place: str = ""
    """Where it was measured, if not on the testbed."""
