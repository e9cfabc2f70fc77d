"""Heat maps: grids of numbers below each other, each cell with its number on the colour of the band that it lies in.

title
scale's title
■ under 1.5  ■ 1.5 to 3  ■ 3 and more

a grid's title
↓ title of the rows
      → title of the columns
         8     16     32
  1  ┌─────┬──────┬──────┐
 10  │     │      │      │
     └─────┴──────┴──────┘

The picture is narrow, so that its numbers can still be read where a phone shrinks it to its own width; on a wide page
it grows only a little. Bands and not shades: two readers see the same border, and light and dark pages both have enough
contrast between a number and its cell.
"""

from __future__ import annotations

import bisect
import itertools
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headway_lab.charts import svg
from headway_lab.charts.scale import MINUS, number_text


@dataclass(frozen=True)
class HeatGrid:
    """One grid: the value of each row and column. A value that is not finite is a cell without data."""

    title: str
    x: str
    """Title of the columns, with the unit."""
    y: str
    """Title of the rows, with the unit."""
    columns: Sequence[str]
    rows: Sequence[str]
    values: Sequence[Sequence[float]]
    """For each row, the value of each column."""

    @staticmethod
    def from_json(document: dict[str, Any]) -> HeatGrid:
        """Read a grid back from its fields; `None` among the values is what JSON has for a number that is not
        finite."""
        values = tuple(tuple(math.nan if one is None else one for one in row) for row in document["values"])
        names = {name: tuple(document[name]) for name in ("columns", "rows")}
        return HeatGrid(**{**document, **names, "values": values})


@dataclass(frozen=True)
class HeatMap:
    """Grids that share one scale."""

    grids: Sequence[HeatGrid]
    bounds: Sequence[float]
    """Rising: where one band of values ends and the next begins. At most as many as there are colours, less one."""
    unit: str = ""
    """Stands behind each number."""

    def __post_init__(self) -> None:
        if not self.grids or not self.bounds or len(self.bounds) >= len(_BANDS):
            raise ValueError(f"a heat map has grids, and 1 to {len(_BANDS) - 1} bounds")
        if not all(low < high for low, high in itertools.pairwise(self.bounds)):
            raise ValueError("the bounds of a heat map must rise")
        for grid in self.grids:
            if len(grid.values) != len(grid.rows) or any(len(row) != len(grid.columns) for row in grid.values):
                raise ValueError(f"the values of '{grid.title}' are not as many as its rows and columns")

    @staticmethod
    def from_json(document: dict[str, Any]) -> HeatMap:
        """Read what `dataclasses.asdict` made of a heat map."""
        grids = tuple(HeatGrid.from_json(grid) for grid in document["grids"])
        return HeatMap(grids, tuple(document["bounds"]), document["unit"])

    def band(self, value: float) -> int:
        """The band of a value: as many bounds as it reaches."""
        return bisect.bisect_right(self.bounds, value)

    def number(self, value: float) -> str:
        """The text of a cell: two digits, or whole numbers from ten on."""
        if not math.isfinite(value):
            return "–"
        text = f"{value:,.0f}" if abs(value) >= 9.95 else f"{value:.1f}"
        return f"{text.replace('-', MINUS)}{self.unit}"


@dataclass(frozen=True)
class _Band:
    colour: int
    opacity: float
    is_strong: bool = False
    """Whether the colour is so strong that a number on it has the colour of the page's background."""


_BANDS = (_Band(0, 0.07), _Band(0, 0.24), _Band(0, 0.45), _Band(0, 1.0, True), _Band(1, 1.0, True))
"""From low to high."""

_STYLE = """
.hw-heat{max-width:38rem;margin:0 auto}
.hw-heat .hw-cell{font-size:14px;font-weight:600;text-anchor:middle}.hw-heat .hw-on{fill:#fff}
@media (prefers-color-scheme:dark){.hw-heat .hw-on{fill:#0d1014}}
"""

_LAYOUT = {"width": 400.0, "margin": 8.0, "row": 32.0, "line": 17.0, "gap": 22.0, "swatch": 12.0}


def heat_map(title: str, *, y: str, heat: HeatMap) -> str:
    """An `<svg>`. `y` is the title of the scale, with its unit."""
    drawn, top = _head(title, y, heat)
    for grid in heat.grids:
        part, top = _grid(grid, heat, top)
        drawn += part
    return svg.document(title, _LAYOUT["width"], top, svg.tag("style", _STYLE), *drawn, class_="hw-heat")


def _head(title: str, y: str, heat: HeatMap) -> tuple[list[str], float]:
    """Title, scale and legend, and where they end."""
    margin, line, swatch = _LAYOUT["margin"], _LAYOUT["line"], _LAYOUT["swatch"]
    drawn, top = _lines(title, margin, margin + 14, font_px=15.5, class_="hw-title")  # bold letters are wider
    more, top = _lines(y, margin, top, class_="hw-dim")
    drawn += more
    x = margin
    for band, name in enumerate(_band_names(heat)):
        width = swatch + 5 + svg.text_width(name) + 12
        if x > margin and x + width > _LAYOUT["width"]:
            x, top = margin, top + line
        drawn.append(_rectangle(band, x, top - swatch + 2, swatch, swatch))
        drawn.append(svg.text(name, x + swatch + 5, top))
        x += width
    return drawn, top + line


def _band_names(heat: HeatMap) -> list[str]:
    """What each band of the legend is called."""
    texts = [f"{number_text(bound)}{heat.unit}" for bound in heat.bounds]
    between = [f"{low} to {high}" for low, high in itertools.pairwise(texts)]
    return [f"under {texts[0]}", *between, f"{texts[-1]} and more"]


def _grid(grid: HeatGrid, heat: HeatMap, top: float) -> tuple[list[str], float]:
    """One grid below `top`, and where it ends."""
    margin, line, row_px = _LAYOUT["margin"], _LAYOUT["line"], _LAYOUT["row"]
    drawn, top = _lines(grid.title, margin, top + _LAYOUT["gap"] - 6, font_px=13.5, font_weight=600.0)
    more, top = _lines(f"↓ {grid.y}", margin, top, class_="hw-dim")
    left = margin + max((svg.text_width(name) for name in grid.rows), default=0.0) + 10
    cell_px = (_LAYOUT["width"] - margin - left) / max(1, len(grid.columns))
    across, top = _lines(f"→ {grid.x}", left, top, class_="hw-dim")
    drawn += [*more, *across]
    for place, name in enumerate(grid.columns):
        drawn.append(svg.text(name, left + cell_px * (place + 0.5), top + 2, text_anchor="middle", class_="hw-dim"))
    top += line - 9
    for name, values in zip(grid.rows, grid.values, strict=True):
        drawn.append(svg.text(name, left - 8, top + row_px / 2 + 4, text_anchor="end", class_="hw-dim"))
        for place, (column, value) in enumerate(zip(grid.columns, values, strict=True)):
            hover = svg.hover(f"{grid.title}\n{grid.y}: {name}\n{grid.x}: {column}\n{_exact(value, heat.unit)}")
            drawn.append(_cell(heat, value, hover, left + cell_px * place, top, cell_px))
        top += row_px
    return drawn, top + margin


def _cell(heat: HeatMap, value: float, hover: str, x: float, y: float, width: float) -> str:
    middle, row_px = x + width / 2, _LAYOUT["row"]
    if not math.isfinite(value):
        return svg.tag("g", hover, svg.text("–", middle, y + row_px / 2 + 5, class_="hw-cell"))
    band = heat.band(value)
    kind = "hw-cell hw-on" if _BANDS[band].is_strong else "hw-cell"
    number = svg.text(heat.number(value), middle, y + row_px / 2 + 5, class_=kind)
    return svg.tag("g", hover, _rectangle(band, x + 1, y + 1, width - 2, row_px - 2), number)


def _exact(value: float, unit: str) -> str:
    return f"{number_text(float(f'{value:.4g}'))}{unit}" if math.isfinite(value) else "no data"


def _rectangle(band: int, x: float, y: float, width: float, height: float) -> str:
    kind = _BANDS[band]
    size = {"width": width, "height": height, "rx": 3.0}
    return svg.tag("rect", x=x, y=y, fill=svg.colour(kind.colour), fill_opacity=kind.opacity, **size)


def _lines(
    content: str, x: float, y: float, font_px: float = svg.FONT_PX, **attributes: str | float
) -> tuple[list[str], float]:
    """A text in as many lines as the picture's width needs, and where the line below it stands."""
    most = int((_LAYOUT["width"] - _LAYOUT["margin"] - x) / svg.text_width("m", font_px))
    drawn = []
    for part in textwrap.wrap(content, max(1, most)):
        drawn.append(svg.text(part, x, y, **attributes))
        y += _LAYOUT["line"]
    return drawn, y
