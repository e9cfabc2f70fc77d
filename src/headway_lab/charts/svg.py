"""SVG as strings: elements, text, the style that every chart carries, and the frame around a plot.

title
■ legend  ■ legend
y title
│
│   inside
└────────────────
          x title
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headway_lab.charts.scale import Domain, Scale, Tick

NUM_COLOURS = 7
"""Series after this number repeat the colours, dashed."""
FONT_PX = 12.0
_WIDTH_PER_CHARACTER = 0.56
"""A share of the font's size; a wide guess, since the reader's font is not known."""

# Okabe and Ito's colours, distinguishable with every kind of colour vision; lightened for dark surroundings.
_STYLE = """
.hw-chart{--hw-text:#1c2128;--hw-dim:#5d6570;--hw-grid:#e3e5e8;--hw-axis:#9aa1aa;--hw-back:#fff;
--hw-1:#0072b2;--hw-2:#d55e00;--hw-3:#009e73;--hw-4:#b8568f;--hw-5:#c98a00;--hw-6:#3a9ad9;--hw-7:#5d6570;
font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif;font-size:12px;display:block;
width:100%;height:auto;font-variant-numeric:tabular-nums}
@media (prefers-color-scheme:dark){.hw-chart{--hw-text:#e3e7eb;--hw-dim:#98a2ae;--hw-grid:#272e37;--hw-axis:#5d6773;
--hw-back:#151a20;--hw-1:#58b2ee;--hw-2:#f58b4c;--hw-3:#33c99b;--hw-4:#e59cc6;--hw-5:#ecc04d;--hw-6:#9fd3ff;
--hw-7:#aeb7c2}}
.hw-chart text{fill:var(--hw-text)}.hw-chart .hw-dim{fill:var(--hw-dim)}
.hw-chart .hw-title{font-size:14px;font-weight:600}.hw-chart .hw-note{font-size:11px}
.hw-chart .hw-halo{paint-order:stroke;stroke:var(--hw-back);stroke-width:3px;stroke-linejoin:round}
.hw-chart .hw-hit{fill:transparent}.hw-chart .hw-hit:hover{fill:var(--hw-text);fill-opacity:.25}
"""

WIDTH = 760.0
"""Of a picture on a wide page."""
NARROW = 380.0
"""Of a picture on a phone, where a wide one would be shrunk until nothing can be read."""
PLOT_HEIGHT = 250.0
_MARGIN = 10.0
_RIGHT = 18.0
_LINE_PX = 18.0
_LABEL_GAP = 14.0
_Y_TICK_PX = 32.0


def tag(name: str, *content: str, **attributes: str | float) -> str:
    """An element. Attributes are escaped, content is markup; `class_` and `font_size` become class and font-size."""
    shown = "".join(f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"' for key, value in attributes.items())
    return f"<{name}{shown}>{''.join(content)}</{name}>" if content else f"<{name}{shown}/>"


def text(content: str, x: float, y: float, **attributes: str | float) -> str:
    return tag("text", html.escape(content), x=x, y=y, **attributes)


def hover(content: str) -> str:
    """A text that the browser shows when the mouse rests on the element that contains it."""
    return tag("title", html.escape(content))


def text_width(content: str, font_px: float = FONT_PX) -> float:
    """The approximate width of a text."""
    return len(content) * font_px * _WIDTH_PER_CHARACTER


def colour(index: int) -> str:
    """The colour of the series with this number."""
    return f"var(--hw-{index % NUM_COLOURS + 1})"


def dashes(index: int) -> str:
    """The dash pattern of the series with this number."""
    return ("none", "6 4", "2 3")[index // NUM_COLOURS % 3]


def document(title: str, width: float, height: float, *content: str, class_: str = "") -> str:
    """The whole picture. It is as wide as the element that contains it, unless the style of a further class says
    otherwise."""
    return tag(
        "svg",
        tag("style", _STYLE),
        *content,
        xmlns="http://www.w3.org/2000/svg",
        class_=f"hw-chart {class_}".rstrip(),
        viewBox=f"0 0 {_value(width)} {_value(height)}",
        role="img",
        aria_label=title,
    )


def _value(value: str | float) -> str:
    if isinstance(value, str):
        return html.escape(value)
    return f"{value:.2f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class Axis:
    """The values and title of an axis. Without a domain nothing is drawn."""

    title: str
    """The title, with the unit."""
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


def framed(
    title: str, *, x: Axis, y: Axis, legend: Sequence[LegendItem] = (), inside: Inside, width: float = WIDTH
) -> str:
    """The whole chart."""
    head, top = title_lines(title, width)
    rows = _legend_rows(legend, width)
    head += _legend(rows, top)
    told, top = wrapped(y.title, _MARGIN, top + _LINE_PX * len(rows) + 15, width - _MARGIN, class_="hw-dim")
    head += told
    top += 1
    bottom = top + PLOT_HEIGHT
    below, height = wrapped(x.title, width - _RIGHT, bottom + 37, width - _RIGHT, text_anchor="end", class_="hw-dim")
    head += below
    height -= _LINE_PX - 7
    if x.domain is None or y.domain is None:
        middle = text("no data", width / 2, (top + bottom) / 2, text_anchor="middle", class_="hw-dim")
        return document(title, width, height, *head, _box(_MARGIN, width - _RIGHT, top, bottom), middle)
    y_scale = Scale(y.domain, bottom, top)
    y_ticks = y_scale.fitting_ticks(lambda label: _Y_TICK_PX)
    left = _MARGIN + max((text_width(tick.label) for tick in y_ticks), default=0.0) + 8
    x_scale = Scale(x.domain, left, width - _RIGHT)
    x_ticks = x_scale.fitting_ticks(lambda label: text_width(label) + _LABEL_GAP)
    grid = [*_y_grid(y_scale, y_ticks, x_scale), *_x_grid(x_scale, x_ticks, bottom)]
    return document(title, width, height, *head, *grid, *inside(x_scale, y_scale))


def title_lines(title: str, width: float) -> tuple[list[str], float]:
    """The title of a picture in as many lines as it needs, and where they end."""
    bold_px = 15.5  # its letters are 14 px high, and bold ones are wider
    drawn, y = wrapped(title, _MARGIN, _MARGIN + 14, width - _MARGIN, font_px=bold_px, class_="hw-title")
    return drawn, y - _LINE_PX + 8


def wrapped(
    content: str, x: float, y: float, end: float, *, font_px: float = FONT_PX, **attributes: str | float
) -> tuple[list[str], float]:
    """A text in as many lines as it needs to keep inside `end`, and the y of the line that would follow. With
    `text_anchor="end"`, x is where the lines end."""
    room = x - _MARGIN if attributes.get("text_anchor") == "end" else end - x
    drawn = []
    for part in textwrap.wrap(content, max(1, int(room / text_width("m", font_px)))):
        drawn.append(text(part, x, y, **attributes))
        y += _LINE_PX
    return drawn, y


def _legend_rows(legend: Sequence[LegendItem], width: float) -> list[list[tuple[float, LegendItem]]]:
    """Items from left to right, in as many rows as they need. A single item needs no legend, since the title names
    it."""
    rows: list[list[tuple[float, LegendItem]]] = []
    x = width
    for item in legend if len(legend) > 1 else ():
        needed = 18 + text_width(item.name) + 16
        if x + needed > width - _RIGHT or not rows:
            rows.append([])
            x = _MARGIN
        rows[-1].append((x, item))
        x += needed
    return rows


def _legend(rows: list[list[tuple[float, LegendItem]]], top: float) -> list[str]:
    drawn = []
    for number, row in enumerate(rows):
        y = top + _LINE_PX * number + 13
        for x, item in row:
            drawn.append(_key(item, x, y - 4))
            drawn.append(text(item.name, x + 18, y))
    return drawn


def _key(item: LegendItem, x: float, y: float) -> str:
    stroke = "var(--hw-dim)" if item.is_reference else colour(item.index)
    if item.is_points:
        return tag("circle", cx=x + 6, cy=y, r=4, fill=stroke)
    ends = {"x1": x, "x2": x + 13, "y1": y, "y2": y}
    return tag("line", stroke=stroke, stroke_width=3, stroke_dasharray=item.dashes, **ends)


def _box(left: float, right: float, top: float, bottom: float) -> str:
    size = {"width": right - left, "height": bottom - top}
    return tag("rect", x=left, y=top, fill="none", stroke="var(--hw-grid)", rx=4, **size)


def _y_grid(scale: Scale, ticks: Sequence[Tick], across: Scale) -> list[str]:
    drawn = []
    for tick in ticks:
        y = scale.position(tick.value) or 0.0
        drawn.append(tag("line", x1=across.start, x2=across.end, y1=y, y2=y, stroke="var(--hw-grid)"))
        drawn.append(text(tick.label, across.start - 7, y + 4, text_anchor="end", class_="hw-dim"))
    return drawn


def _x_grid(scale: Scale, ticks: Sequence[Tick], bottom: float) -> list[str]:
    drawn = [tag("line", x1=scale.start, x2=scale.end, y1=bottom, y2=bottom, stroke="var(--hw-axis)", stroke_width=1.2)]
    for tick in ticks:
        x = scale.position(tick.value) or 0.0
        drawn.append(tag("line", x1=x, x2=x, y1=bottom, y2=bottom + 4, stroke="var(--hw-axis)"))
        drawn.append(text(tick.label, x, bottom + 18, text_anchor=_anchor(tick, x, scale), class_="hw-dim"))
    return drawn


def _anchor(tick: Tick, x: float, scale: Scale) -> str:
    """Centred, except for a label that would leave the picture on the right."""
    return "end" if x + text_width(tick.label) / 2 > scale.end + _RIGHT - 2 and x > scale.start else "middle"
