"""Lines, steps and clouds of points over two axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from headway.lab.charts import svg
from headway.lab.charts.frame import PLOT_HEIGHT, WIDTH, Axis, LegendItem, framed
from headway.lab.charts.number_text import number_text
from headway.lab.charts.placing import Box, LabelPlacer
from headway.lab.charts.scale import Domain, Scale, domain_of
from headway.lab.charts.series import Series, Spot, Twin, evenly, thin_cloud, thin_line, twins_of

MOST_HOVERS = 60
"""Places of a line that tell their value to the mouse."""
MOST_MARKERS = 25
"""A line of no more points than this shows them."""
MOST_LABELS = 40
MOST_AVOIDED = 300
"""Labels keep away from the points of a series of no more than this."""


def line_chart(
    title: str,
    *,
    x: str,
    y: str,
    series: Sequence[Series],
    log_x: bool = False,
    log_y: bool = False,
    lines: Mapping[str, float] | None = None,
    x_lines: Mapping[str, float] | None = None,
) -> str:
    """An `<svg>`. `x` and `y` are the axes' titles, with units; `lines` are named dashed lines across, `x_lines` such
    from bottom to top."""
    across, upright = dict(lines or {}), dict(x_lines or {})
    points = [point for one in series for point in zip(one.xs, one.ys) if _can_be_drawn(*point, log_x, log_y)]
    x_domain = domain_of(itertools.chain((px for px, _ in points), upright.values()), is_log=log_x, wants_zero=True)
    y_domain = domain_of(
        itertools.chain((py for _, py in points), across.values()), is_log=log_y, wants_zero=True, is_rounded=True
    )
    if not points:
        x_domain = y_domain = None
    elif x_domain is not None and any(one.kind == "points" or one.labels for one in series):
        x_domain = _with_margins(x_domain)

    twins = {} if x_domain is None or y_domain is None else _twins(series, x_domain, y_domain)

    def inside(x_scale: Scale, y_scale: Scale) -> list[str]:
        drawing = _Drawing(x_scale, y_scale, x, y)
        shapes = [drawing.shape(one, number, twins.get(number)) for number, one in enumerate(series)]
        drawn = [*drawing.upright(upright), *drawing.across(across)]  # their names keep away from points
        return [*drawn, *shapes, *drawing.labels(), *drawing.hovers()]

    legend = []
    for number, one in enumerate(series):
        twin = twins.get(number)
        name, pattern = one.name, _dashes(one, number, None)[0]
        if twin is not None and twin.rank:
            first = series[twin.first]
            is_same = list(one.xs) == list(first.xs) and list(one.ys) == list(first.ys)
            name, pattern = f"{one.name} ({'same' if is_same else 'nearly'} as {first.name})", "4 3"
        legend.append(LegendItem(name, number, one.kind == "points", pattern, one.is_reference))
    return framed(title, x=Axis(x, x_domain), y=Axis(y, y_domain), legend=legend, inside=inside)


def _dashes(series: Series, number: int, twin: Twin | None) -> tuple[str, float]:
    """(pattern, offset) of a line."""
    if twin is not None and twin.rank:
        # Each takes half of what those below it left open.
        length = 16.0 / 2**twin.rank
        return f"{length:g} {16 - length:g}", length - 16.0 if twin.rank > 1 else 0.0
    return ("6 5" if series.is_reference else svg.dashes(number)), 0.0


def _twins(series: Sequence[Series], x_domain: Domain, y_domain: Domain) -> dict[int, Twin]:
    x_scale, y_scale = Scale(x_domain, 0.0, WIDTH), Scale(y_domain, PLOT_HEIGHT, 0.0)

    def place(one: Series) -> list[tuple[float, float]]:
        spots = ((x_scale.position(x), y_scale.position(y)) for x, y in zip(one.xs, one.ys))
        return [(-1.0 if x is None else x, -1.0 if y is None else y) for x, y in spots]

    return twins_of(series, place)


def _can_be_drawn(x: float, y: float, log_x: bool, log_y: bool) -> bool:
    return math.isfinite(x) and math.isfinite(y) and (x > 0 or not log_x) and (y > 0 or not log_y)


def _with_margins(domain: Domain) -> Domain:
    """Room for points at the ends, and for what stands beside them."""
    if domain.is_log:
        factor = (domain.high / domain.low) ** 0.05
        return Domain(domain.low / factor, domain.high * factor, is_log=True)
    margin = (domain.high - domain.low) * 0.05
    return Domain(0.0 if domain.low == 0 else domain.low - margin, domain.high + margin)


class _Drawing:
    """Everything between the axes. Labels and what the mouse finds are collected, to lie on top."""

    def __init__(self, x_scale: Scale, y_scale: Scale, x_title: str, y_title: str) -> None:
        self._x, self._y = x_scale, y_scale
        self._titles = (x_title, y_title)
        self._placer = LabelPlacer(Box(x_scale.start, y_scale.end - 6, x_scale.end, y_scale.start - 2))
        self._labelled: list[tuple[Spot, str]] = []
        self._hovers: list[str] = []

    def shape(self, series: Series, number: int, twin: Twin | None = None) -> str:
        """One series, and what belongs to it remembered. Those that lie on each other are dashed so that all show."""
        runs = self._runs(series)
        spots = [spot for run in runs for spot in run]
        shown = thin_cloud(spots) if series.kind == "points" else evenly(spots, MOST_HOVERS)
        self._hovers += [self._hover(series, spot) for spot in shown]
        if len(spots) <= MOST_AVOIDED:
            for spot in spots:
                self._placer.take(spot.x, spot.y)
        if series.labels and len(spots) <= MOST_LABELS:
            self._labelled += [(spot, series.labels[spot.number]) for spot in spots if spot.number < len(series.labels)]
        colour = "var(--hw-dim)" if series.is_reference else svg.colour(number)
        if series.kind == "points":
            dots = [svg.tag("circle", cx=spot.x, cy=spot.y, r=4 if len(shown) < 100 else 2.5) for spot in shown]
            return svg.tag("g", *dots, fill=colour, fill_opacity=1 if len(shown) < 100 else 0.55) if dots else ""
        marks = [
            svg.tag("circle", cx=spot.x, cy=spot.y, r=3 + 2 * (twin.num_above if twin is not None else 0), fill=colour)
            for run in runs
            for spot in run
            if not series.is_reference and (len(run) == 1 or (series.kind == "line" and len(spots) <= MOST_MARKERS))
        ]
        pattern, offset = _dashes(series, number, twin)
        path = svg.tag(
            "path",
            d=" ".join(_path(thin_line(run), is_step=series.kind == "step") for run in runs),
            fill="none",
            stroke=colour,
            stroke_width=6 if series.is_broad else 2,
            stroke_opacity=0.35 if series.is_broad else 1,
            stroke_linejoin="round",
            stroke_dasharray=pattern,
            stroke_dashoffset=offset,
        )
        return path + "".join(marks)

    def labels(self) -> Iterable[str]:
        return [self._placer.label(content, spot.x, spot.y) for spot, content in self._labelled if content]

    def hovers(self) -> Iterable[str]:
        return self._hovers

    def across(self, lines: Mapping[str, float]) -> Iterable[str]:
        for name, value in lines.items():
            y = self._y.position(value)
            if y is None:
                continue
            yield self._dashed(name, value, x1=self._x.start, x2=self._x.end, y1=y, y2=y)
            yield self._placer.line_label(name, y)

    def upright(self, lines: Mapping[str, float]) -> Iterable[str]:
        for name, value in lines.items():
            x = self._x.position(value)
            if x is None:
                continue
            yield self._dashed(name, value, x1=x, x2=x, y1=self._y.start, y2=self._y.end)
            yield self._placer.upright_label(name, x)

    def _dashed(self, name: str, value: float, **ends: float) -> str:
        told = svg.hover(f"{name}: {number_text(value)}")
        return svg.tag("line", told, stroke="var(--hw-dim)", stroke_width=1.3, stroke_dasharray="5 4", **ends)

    def _runs(self, series: Series) -> list[list[Spot]]:
        """The series on the picture, cut where a point has no place."""
        runs: list[list[Spot]] = [[]]
        for index, (x_value, y_value) in enumerate(zip(series.xs, series.ys)):
            x, y = self._x.position(x_value), self._y.position(y_value)
            if x is not None and y is not None:
                runs[-1].append(Spot(x, y, index))
            elif runs[-1]:
                runs.append([])
        return [run for run in runs if run]

    def _hover(self, series: Series, spot: Spot) -> str:
        values = (series.xs[spot.number], series.ys[spot.number])
        told = [f"{title}: {number_text(value)}" for title, value in zip(self._titles, values)]
        label = [series.labels[spot.number]] if spot.number < len(series.labels) else []
        name = [series.name] if series.name else []
        return svg.tag(
            "circle", svg.hover("\n".join([*name, *label, *told])), cx=spot.x, cy=spot.y, r=6, class_="hw-hit"
        )


def _path(run: Sequence[Spot], *, is_step: bool) -> str:
    parts = [f"M{run[0].x:.1f} {run[0].y:.1f}"]
    parts += [f"H{spot.x:.1f}V{spot.y:.1f}" if is_step else f"L{spot.x:.1f} {spot.y:.1f}" for spot in run[1:]]
    return "".join(parts)
