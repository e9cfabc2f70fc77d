"""One number for each of a few things: bars from left to right, so that long names have room."""

from __future__ import annotations

import math
from collections.abc import Mapping

from headway.lab.charts import svg
from headway.lab.charts.frame import WIDTH
from headway.lab.charts.number_text import number_text
from headway.lab.charts.scale import Scale, domain_of

_MARGIN = 10.0
_ROW = 26.0
_BAR = 16.0
_MOST_NAME_PX = 260.0
_TOP = 56.0


def bar_chart(
    title: str,
    *,
    y: str,
    bars: Mapping[str, float],
    log_y: bool = False,
    notes: Mapping[str, str] | None = None,
    base: float | None = None,
) -> str:
    """An `<svg>`. `y` is the title of the values' axis, with its unit; `notes` stand behind the values; `base` is where
    bars begin, e.g. 1 for ratios, instead of 0 or the axis' end."""
    said = notes or {}
    names = {name: _shortened(name) for name in bars}
    left = _MARGIN + max((svg.text_width(name) for name in names.values()), default=0.0) + 10
    beside = max((svg.text_width(_beside(name, bars[name], said)) for name in bars), default=0.0)
    bottom = _TOP + _ROW * max(1, len(bars))
    head = [
        svg.text(title, _MARGIN, _MARGIN + 14, class_="hw-title"),
        svg.text(y, _MARGIN, _MARGIN + 34, class_="hw-dim"),
    ]
    least = min((value for value in bars.values() if value > 0), default=math.nan) / 2 if log_y else 0.0
    if base is not None:
        least = base
    domain = domain_of([least, *bars.values()], is_log=log_y, is_rounded=True)
    if domain is None or not any(math.isfinite(value) for value in bars.values()):
        middle = svg.text("no data", WIDTH / 2, (_TOP + bottom) / 2 + 4, text_anchor="middle", class_="hw-dim")
        return svg.document(title, WIDTH, bottom + _MARGIN, *head, middle)
    scale = Scale(domain, left, max(left + 120, WIDTH - _MARGIN - beside - 10))
    drawn = list(head)
    for tick in scale.fitting_ticks(lambda label: svg.text_width(label) + 14):
        x = scale.position(tick.value) or 0.0
        drawn.append(svg.tag("line", x1=x, x2=x, y1=_TOP, y2=bottom, stroke="var(--hw-grid)"))
        drawn.append(svg.text(tick.label, x, bottom + 16, text_anchor="middle", class_="hw-dim"))
    for row, (name, value) in enumerate(bars.items()):
        middle_px = _TOP + _ROW * (row + 0.5)
        drawn.append(_row(name, names[name], value, said.get(name, ""), scale, middle_px, left, _base(scale, base)))
    start = scale.position(_base(scale, base)) or 0.0
    drawn.append(svg.tag("line", x1=start, x2=start, y1=_TOP, y2=bottom, stroke="var(--hw-axis)", stroke_width=1.2))
    return svg.document(title, WIDTH, bottom + 26, *drawn)


def _row(name: str, shown: str, value: float, note: str, scale: Scale, middle: float, left: float, begin: float) -> str:
    base = scale.position(begin) or 0.0
    end = scale.position(value)
    told = svg.hover("\n".join(part for part in (f"{name}: {number_text(value)}", note) if part))
    label = svg.text(shown, left - 8, middle + 4, text_anchor="end")
    if end is None:
        return svg.tag("g", told, label, svg.text("no data", base + 6, middle + 4, class_="hw-dim"))
    size = {"width": max(1.0, abs(end - base)), "height": _BAR}
    bar = svg.tag("rect", x=min(base, end), y=middle - _BAR / 2, rx=2, fill=svg.colour(0), **size)
    number = svg.text(number_text(value), max(base, end) + 6, middle + 4, class_="hw-halo")
    behind = max(base, end) + 6 + svg.text_width(number_text(value)) + 8
    remark = svg.text(note, behind, middle + 4, class_="hw-dim hw-halo") if note else ""
    return svg.tag("g", told, label, bar, number, remark)


def _base(scale: Scale, given: float | None) -> float:
    """Where bars begin."""
    if given is not None:
        return given
    return scale.domain.low if scale.domain.is_log else 0.0


def _beside(name: str, value: float, notes: Mapping[str, str]) -> str:
    return f"{number_text(value)}  {notes.get(name, '')}"


def _shortened(name: str) -> str:
    while svg.text_width(name) > _MOST_NAME_PX:
        name = name[:-2].rstrip() + "…"
    return name
