"""A chart as data, so that results can be kept, merged, and drawn again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from headway.lab.charts import Series, bar_chart, line_chart


@dataclass(frozen=True)
class Line:
    """Points over an axis; with labels, dots that are named."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True)
class Chart:
    """Bars, or lines if there are any."""

    title: str
    y: str
    """Title of the values' axis, with its unit."""
    bars: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    """Behind the bars' values."""
    lines: Sequence[Line] = ()
    x: str = ""
    log_x: bool = False
    log_y: bool = False
    levels: Mapping[str, float] = field(default_factory=dict)
    """Named dashed lines across."""
    caption: str = ""

    def svg(self) -> str:
        """The picture."""
        if not self.lines:
            return bar_chart(self.title, y=self.y, bars=self.bars, log_y=self.log_y, notes=self.notes)
        series = [Series(line.name, line.xs, line.ys) for line in self.lines]
        return line_chart(
            self.title, x=self.x, y=self.y, series=series, log_x=self.log_x, log_y=self.log_y, lines=self.levels
        )

    def as_json(self) -> dict[str, Any]:
        """For the results' file."""
        return asdict(self)

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Chart:
        """What `as_json` made."""
        return Chart(**{**document, "lines": tuple(Line(**line) for line in document["lines"])})
