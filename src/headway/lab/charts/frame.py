"""What surrounds every plot: title, legend, axes with ticks and titles, a grid. What is inside comes from outside.

title
■ legend  ■ legend
y title
│
│   inside
└────────────────
          x title
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headway.lab.charts import svg
from headway.lab.charts.scale import Domain, Scale, Tick

WIDTH = 760.0
PLOT_HEIGHT = 250.0
_MARGIN = 10.0
_RIGHT = 18.0
_LINE_PX = 18.0
_LABEL_GAP = 14.0
_Y_TICK_PX = 32.0


@dataclass(frozen=True)
class Axis:
    """An axis as it is asked for. Without a domain there is nothing to draw."""

    title: str
    """With its unit."""
    domain: Domain | None


@dataclass(frozen=True)
class LegendItem:
    name: str
    index: int
    """Number of the series: decides its colour."""
    is_points: bool = False
    dashes: str = "none"
    """The pattern of its line."""
    is_reference: bool = False


Inside = Callable[[Scale, Scale], Sequence[str]]
"""Draws what lies between the axes, given the x and the y scale."""


def framed(title: str, *, x: Axis, y: Axis, legend: Sequence[LegendItem] = (), inside: Inside) -> str:
    """The chart as a whole."""
    rows = _legend_rows(legend)
    top = _MARGIN + 22 + _LINE_PX * len(rows) + _LINE_PX + 12
    bottom = top + PLOT_HEIGHT
    height = bottom + 44
    head = [svg.text(title, _MARGIN, _MARGIN + 14, class_="hw-title"), *_legend(rows)]
    head.append(svg.text(y.title, _MARGIN, top - 15, class_="hw-dim"))
    head.append(svg.text(x.title, WIDTH - _RIGHT, bottom + 37, text_anchor="end", class_="hw-dim"))
    if x.domain is None or y.domain is None:
        middle = svg.text("no data", WIDTH / 2, (top + bottom) / 2, text_anchor="middle", class_="hw-dim")
        return svg.document(title, WIDTH, height, *head, _box(_MARGIN, top, bottom), middle)
    y_scale = Scale(y.domain, bottom, top)
    y_ticks = y_scale.fitting_ticks(lambda label: _Y_TICK_PX)
    left = _MARGIN + max((svg.text_width(tick.label) for tick in y_ticks), default=0.0) + 8
    x_scale = Scale(x.domain, left, WIDTH - _RIGHT)
    x_ticks = x_scale.fitting_ticks(lambda label: svg.text_width(label) + _LABEL_GAP)
    grid = [*_y_grid(y_scale, y_ticks, left), *_x_grid(x_scale, x_ticks, bottom)]
    return svg.document(title, WIDTH, height, *head, *grid, *inside(x_scale, y_scale))


def _legend_rows(legend: Sequence[LegendItem]) -> list[list[tuple[float, LegendItem]]]:
    """Items from left to right, in as many rows as they need. One alone needs no legend: the title says what it is."""
    rows: list[list[tuple[float, LegendItem]]] = []
    x = WIDTH
    for item in legend if len(legend) > 1 else ():
        width = 18 + svg.text_width(item.name) + 16
        if x + width > WIDTH - _RIGHT:
            rows.append([])
            x = _MARGIN
        rows[-1].append((x, item))
        x += width
    return rows


def _legend(rows: list[list[tuple[float, LegendItem]]]) -> list[str]:
    drawn = []
    for number, row in enumerate(rows):
        y = _MARGIN + 22 + _LINE_PX * number + 13
        for x, item in row:
            drawn.append(_key(item, x, y - 4))
            drawn.append(svg.text(item.name, x + 18, y))
    return drawn


def _key(item: LegendItem, x: float, y: float) -> str:
    colour = "var(--hw-dim)" if item.is_reference else svg.colour(item.index)
    if item.is_points:
        return svg.tag("circle", cx=x + 6, cy=y, r=4, fill=colour)
    ends = {"x1": x, "x2": x + 13, "y1": y, "y2": y}
    return svg.tag("line", stroke=colour, stroke_width=3, stroke_dasharray=item.dashes, **ends)


def _box(left: float, top: float, bottom: float) -> str:
    size = {"width": WIDTH - _RIGHT - left, "height": bottom - top}
    return svg.tag("rect", x=left, y=top, fill="none", stroke="var(--hw-grid)", rx=4, **size)


def _y_grid(scale: Scale, ticks: Sequence[Tick], left: float) -> list[str]:
    drawn = []
    for tick in ticks:
        y = scale.position(tick.value) or 0.0
        drawn.append(svg.tag("line", x1=left, x2=WIDTH - _RIGHT, y1=y, y2=y, stroke="var(--hw-grid)"))
        drawn.append(svg.text(tick.label, left - 7, y + 4, text_anchor="end", class_="hw-dim"))
    return drawn


def _x_grid(scale: Scale, ticks: Sequence[Tick], bottom: float) -> list[str]:
    drawn = [
        svg.tag("line", x1=scale.start, x2=scale.end, y1=bottom, y2=bottom, stroke="var(--hw-axis)", stroke_width=1.2)
    ]
    for tick in ticks:
        x = scale.position(tick.value) or 0.0
        drawn.append(svg.tag("line", x1=x, x2=x, y1=bottom, y2=bottom + 4, stroke="var(--hw-axis)"))
        drawn.append(svg.text(tick.label, x, bottom + 18, text_anchor=_anchor(tick, x, scale), class_="hw-dim"))
    return drawn


def _anchor(tick: Tick, x: float, scale: Scale) -> str:
    """Centred, but for a label that would leave the picture on the right."""
    return "end" if x + svg.text_width(tick.label) / 2 > WIDTH - 2 and x > scale.start else "middle"
