"""How values are distributed: which share of them is at most so large."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from headway.lab.charts.line_chart import line_chart
from headway.lab.charts.series import Series

_MOST_STEPS = 400


def cdf_chart(
    title: str,
    *,
    x: str,
    samples: Mapping[str, Sequence[float]],
    log_x: bool = True,
    x_lines: Mapping[str, float] | None = None,
) -> str:
    """An `<svg>` with a line for each sample, and named dashed lines from bottom to top (`x_lines`).

    Values that are not finite are left out; those that a logarithmic axis has no place for still count, so that the
    line begins higher.
    """
    series = [Series(name, *_steps(values), kind="step") for name, values in samples.items()]
    y = "share of values at or below (%)"
    return line_chart(title, x=x, y=y, series=series, log_x=log_x, lines=_marks(series), x_lines=x_lines)


def _marks(series: Sequence[Series]) -> dict[str, float]:
    return {"P50": 50.0, "P90": 90.0, "P99": 99.0} if any(one.xs for one in series) else {}


def _steps(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """The corners of the line: one for each value, or for some of them evenly, the largest always."""
    ordered = sorted(value for value in values if math.isfinite(value))
    if not ordered:
        return [], []
    count = len(ordered)
    every = max(1, count // _MOST_STEPS)
    places = sorted({0, *range(every - 1, count, every), count - 1})
    return [ordered[place] for place in places], [100.0 * (place + 1) / count for place in places]
