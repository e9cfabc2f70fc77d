"""Bars, histograms and cumulative distributions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway_lab.charts import svg
from headway_lab.charts.line_chart import Series, line_chart
from headway_lab.charts.scale import Domain, Scale, bin_edges, counts_between, domain_of, number_text
from headway_lab.charts.svg import WIDTH, Axis, LegendItem, framed

_MARGIN = 10.0
_ROW = 26.0
_BAR = 16.0
_MOST_NAME_PX = 260.0

_MOST_BINS = 40

_MOST_STEPS = 400


def bar_chart(
    title: str,
    *,
    y: str,
    bars: Mapping[str, float],
    log_y: bool = False,
    notes: Mapping[str, str] | None = None,
    base: float | None = None,
    width: float = WIDTH,
) -> str:
    """An `<svg>`. `y` is the title of the values' axis, with its unit; `notes` are written after the values; `base` is
    where bars begin, e.g. 1 for ratios, instead of 0 or the axis' end; `width` is the width at which texts have their
    size. In a narrow picture, names stand above their bars."""
    said = notes or {}
    head, top = svg.title_lines(title, width)
    told, top = svg.wrapped(y, _MARGIN, top + 12, width - _MARGIN, class_="hw-dim")
    head += told
    rows = _Rows.of(bars, said, top - 8, width)
    least = min((value for value in bars.values() if value > 0), default=math.nan) / 2 if log_y else 0.0
    if base is not None:
        least = base
    domain = domain_of([least, *bars.values()], is_log=log_y, is_rounded=True)
    if domain is None or not any(math.isfinite(value) for value in bars.values()):
        middle = svg.text("no data", width / 2, (rows.top + rows.bottom) / 2 + 4, text_anchor="middle", class_="hw-dim")
        return svg.document(title, width, rows.bottom + _MARGIN, *head, middle)
    scale = Scale(domain, rows.left, rows.right)
    drawn = list(head)
    for tick in scale.fitting_ticks(lambda label: svg.text_width(label) + 14):
        x = scale.position(tick.value) or 0.0
        drawn.append(svg.tag("line", x1=x, x2=x, y1=rows.top, y2=rows.bottom, stroke="var(--hw-grid)"))
        drawn.append(svg.text(tick.label, x, rows.bottom + 16, text_anchor="middle", class_="hw-dim"))
    for place, (name, value) in enumerate(bars.items()):
        drawn.append(_row(rows, place, name, value, said.get(name, ""), scale, _base(scale, base)))
    start = scale.position(_base(scale, base)) or 0.0
    ends = {"x1": start, "x2": start, "y1": rows.top, "y2": rows.bottom}
    drawn.append(svg.tag("line", stroke="var(--hw-axis)", stroke_width=1.2, **ends))
    return svg.document(title, width, rows.bottom + 26, *drawn)


@dataclass(frozen=True)
class _Rows:
    """Where the rows of a picture with bars are: from `left` to `right`, from `top` to `bottom`."""

    left: float
    right: float
    top: float
    bottom: float
    height: float
    is_stacked: bool
    """Whether names stand above their bars, as there is no room beside them."""

    @staticmethod
    def of(bars: Mapping[str, float], notes: Mapping[str, str], top: float, width: float) -> _Rows:
        names = max((svg.text_width(_shortened(name)) for name in bars), default=0.0)
        beside = max((svg.text_width(_beside(name, bars[name], notes)) for name in bars), default=0.0)
        is_stacked = _MARGIN + names + 10 + beside > width - 160
        left = _MARGIN + 8 if is_stacked else _MARGIN + names + 10
        height = _ROW + 16 if is_stacked else _ROW
        right = max(left + 90, width - _MARGIN - beside - 10)
        return _Rows(left, right, top, top + height * max(1, len(bars)), height, is_stacked)


def _row(rows: _Rows, place: int, name: str, value: float, note: str, scale: Scale, begin: float) -> str:
    middle = rows.top + rows.height * (place + 1) - _ROW / 2
    base = scale.position(begin) or 0.0
    end = scale.position(value)
    told = svg.hover("\n".join(part for part in (f"{name}: {number_text(value)}", note) if part))
    if rows.is_stacked:
        label = svg.text(name, rows.left + 5, middle - _ROW / 2, class_="hw-halo")
    else:
        label = svg.text(_shortened(name), rows.left - 8, middle + 4, text_anchor="end")
    if end is None:
        return svg.tag("g", told, label, svg.text("no data", base + 6, middle + 4, class_="hw-dim"))
    size = {"width": max(1.0, abs(end - base)), "height": _BAR}
    bar = svg.tag("rect", x=min(base, end), y=middle - _BAR / 2, rx=2, fill=svg.colour(0), **size)
    number = svg.text(number_text(value), max(base, end) + 6, middle + 4, class_="hw-halo")
    behind = max(base, end) + 6 + svg.text_width(number_text(value)) + 8
    remark = svg.text(note, behind, middle + 4, class_="hw-dim hw-halo") if note else ""
    return svg.tag("g", told, label, bar, number, remark)


def _base(scale: Scale, given: float | None) -> float:
    """The value at which bars begin."""
    if given is not None:
        return given
    return scale.domain.low if scale.domain.is_log else 0.0


def _beside(name: str, value: float, notes: Mapping[str, str]) -> str:
    return f"{number_text(value)}  {notes.get(name, '')}"


def _shortened(name: str) -> str:
    while svg.text_width(name) > _MOST_NAME_PX:
        name = name[:-2].rstrip() + "…"
    return name


def histogram_chart(title: str, *, x: str, samples: Mapping[str, Sequence[float]], log_x: bool = False) -> str:
    """An `<svg>` with the share of each sample's values in each bin, one sample over the other."""
    drawable = {
        name: [value for value in values if math.isfinite(value) and (value > 0 or not log_x)]
        for name, values in samples.items()
    }
    edges = bin_edges([value for values in drawable.values() for value in values], is_log=log_x, most=_MOST_BINS)
    counts = {name: counts_between(values, edges) for name, values in drawable.items()} if edges else {}
    shares = {name: [100 * n / max(1, sum(each)) for n in each] for name, each in counts.items()}

    def inside(x_scale: Scale, y_scale: Scale) -> list[str]:
        return [
            _bars(name, edges, counts[name], shares[name], (x_scale, y_scale), number)
            for number, name in enumerate(samples)
        ]

    x_domain = Domain(edges[0], edges[-1], is_log=log_x) if edges else None
    y_domain = domain_of([0.0, *(share for each in shares.values() for share in each)], is_rounded=True)
    legend = [LegendItem(name, number, dashes=svg.dashes(number)) for number, name in enumerate(samples)]
    y = Axis("share of values (%)", y_domain)
    return framed(title, x=Axis(x, x_domain), y=y, legend=legend, inside=inside)


def _bars(
    name: str,
    edges: Sequence[float],
    counts: Sequence[int],
    shares: Sequence[float],
    scales: tuple[Scale, Scale],
    number: int,
) -> str:
    x_scale, y_scale = scales
    places = [x_scale.position(edge) or 0.0 for edge in edges]
    bars = []
    for bin_number, (count, share) in enumerate(zip(counts, shares)):
        if not count:
            continue
        left, right = places[bin_number], places[bin_number + 1]
        top = y_scale.position(share) or 0.0
        low, high = edges[bin_number], edges[bin_number + 1]
        told = f"{name}\n{number_text(low)} to {number_text(high)}: {count:,} ({share:.1f}%)".strip()
        size = {"width": max(0.5, right - left - 1), "height": y_scale.start - top}
        bars.append(svg.tag("rect", svg.hover(told), x=left + 0.5, y=top, **size))
    colour = svg.colour(number)
    return svg.tag("g", *bars, fill=colour, fill_opacity=0.55, stroke=colour, stroke_width=1) if bars else ""


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
    """The corners of the line: one for each value, or for evenly chosen ones, always with the largest."""
    ordered = sorted(value for value in values if math.isfinite(value))
    if not ordered:
        return [], []
    count = len(ordered)
    every = max(1, count // _MOST_STEPS)
    places = sorted({0, *range(every - 1, count, every), count - 1})
    return [ordered[place] for place in places], [100.0 * (place + 1) / count for place in places]
