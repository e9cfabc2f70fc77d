"""Lines, steps and clouds of points over two axes; long series are thinned, labels cover nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from headway_lab.charts import svg
from headway_lab.charts.scale import Domain, Scale, domain_of, number_text
from headway_lab.charts.svg import PLOT_HEIGHT, WIDTH, Axis, LegendItem, framed

_APART_PX = 1.5
MOST_POINTS = 2_500
"""Most points of a cloud; more would only overlap."""

_FONT_PX = 11.0
_GAP = 7.0
_LINE_CLASS = "hw-note hw-dim hw-halo"

MOST_HOVERS = 60
"""Most places of a line that show their value under the mouse."""
MOST_MARKERS = 25
"""A line with at most this many points shows markers."""
MOST_LABELS = 40
MOST_AVOIDED = 300
"""Labels avoid the points of a series with at most this many points."""


@dataclass(frozen=True)
class Series:
    """Points in order. A value that is not finite makes a gap."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    kind: Literal["line", "step", "points"] = "line"
    """`step`: the value holds until the next point."""
    labels: Sequence[str] = ()
    """A label for each point, shown beside it if there is room, and under the mouse."""
    is_reference: bool = False
    """A line to compare others with, dashed and grey."""
    is_broad: bool = False
    """A pale band, over which another line may be drawn."""


@dataclass(frozen=True)
class Twin:
    """A line that overlaps with others."""

    first: int
    """The number of the first of these lines."""
    rank: int
    """Its place among these lines, from 0."""
    num_above: int
    """How many of them are drawn over it."""


def twins_of(series: Sequence[Series], place: Callable[[Series], Sequence[tuple[float, float]]]) -> dict[int, Twin]:
    """The lines that cannot be distinguished from another one, by their numbers; all others are left out. `place`:
    where a series is on the picture."""
    groups: list[list[int]] = []
    places = {number: place(one) for number, one in enumerate(series) if one.kind != "points" and not one.is_reference}
    for number, own in places.items():
        if not own:
            continue
        group = next((group for group in groups if _is_covered(places[group[0]], own)), None)
        if group is None:
            groups.append([number])
        else:
            group.append(number)
    return {
        number: Twin(group[0], rank, len(group) - 1 - rank)
        for group in groups
        if len(group) > 1
        for rank, number in enumerate(group)
    }


def _is_covered(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> bool:
    """Whether two lines are closer than the width of a line, everywhere."""
    return len(first) == len(second) and all(
        abs(x1 - x2) <= _APART_PX and abs(y1 - y2) <= _APART_PX for (x1, y1), (x2, y2) in zip(first, second)
    )


class Spot(NamedTuple):
    """A point on the picture, and the number of its point in the data."""

    x: float
    y: float
    number: int


def thin_line(spots: Sequence[Spot]) -> list[Spot]:
    """The same line with at most four points in each column of pixels: its first, its extremes, and its last. Peaks
    stay, however narrow."""
    kept: list[Spot] = []
    column: list[Spot] = []
    for spot in spots:
        if column and math.floor(spot.x) != math.floor(column[0].x):
            kept += _corners(column)
            column = []
        column.append(spot)
    return kept + _corners(column)


def _corners(column: list[Spot]) -> list[Spot]:
    if len(column) <= 4:
        return column
    places = range(len(column))
    chosen = {0, min(places, key=lambda i: column[i].y), max(places, key=lambda i: column[i].y), len(column) - 1}
    return [column[place] for place in sorted(chosen)]


def thin_cloud(spots: Sequence[Spot]) -> list[Spot]:
    """One point for each spot of two pixels, evenly thinned to as many as can be drawn."""
    by_place = {(round(spot.x / 2), round(spot.y / 2)): spot for spot in spots} if len(spots) > MOST_POINTS else None
    kept = list(by_place.values()) if by_place is not None else list(spots)
    every = -(-len(kept) // MOST_POINTS)
    return kept[:: max(1, every)]


def evenly(spots: Sequence[Spot], most: int) -> list[Spot]:
    """At most `most` of them, chosen evenly, the first and the last included."""
    if len(spots) <= most:
        return list(spots)
    return [spots[round(place * (len(spots) - 1) / (most - 1))] for place in range(most)]


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )

    def is_inside(self, other: Box) -> bool:
        return (
            self.left >= other.left
            and self.right <= other.right
            and self.top >= other.top
            and self.bottom <= other.bottom
        )


class LabelPlacer:
    """Places labels, and remembers which places are taken."""

    def __init__(self, room: Box) -> None:
        self._room = room
        self._points: list[Box] = []
        self._labels: list[Box] = []

    def take(self, x: float, y: float, radius: float = 4.0) -> None:
        """Mark the place of a point as taken."""
        self._points.append(Box(x - radius, y - radius, x + radius, y + radius))

    def label(self, content: str, x: float, y: float) -> str:
        """The label of a point, drawn right, left, above or below it; empty if all of these are taken."""
        return self._first_free(content, _around(x, y, _width(content)), "hw-note hw-halo")

    def line_label(self, content: str, y: float) -> str:
        """The name of a horizontal line: above or below it, at its right or left end; above it if all places are
        taken."""
        left, right = self._room.left + 4, self._room.right - _width(content)
        places = [Box(x, top, x + _width(content), top + 13) for x in (right, left) for top in (y - 14, y + 2)]
        return self._first_free(content, places, _LINE_CLASS) or _drawn(content, places[0], _LINE_CLASS)

    def upright_label(self, content: str, x: float) -> str:
        """The name of a vertical line: beside it, at a free height; at its top if none is free."""
        room, width = self._room, _width(content)
        lefts = (x + 5, x - 5 - width)
        tops = [room.top + share * (room.bottom - room.top - 13) for share in (0.14, 0.22, 0.3, 0.62, 0.7, 0.78, 0.86)]
        places = [Box(left, top, left + width, top + 13) for top in tops for left in lefts]
        return self._first_free(content, places, _LINE_CLASS) or _drawn(content, places[0], _LINE_CLASS)

    def _first_free(self, content: str, places: Sequence[Box], kind: str) -> str:
        """Draw at the first free place, preferably one without points, too."""
        for avoided in (self._labels + self._points, self._labels):
            for box in places:
                if box.is_inside(self._room) and not any(box.overlaps(other) for other in avoided):
                    self._labels.append(box)
                    return _drawn(content, box, kind)
        return ""


def _width(content: str) -> float:
    return svg.text_width(content, _FONT_PX)


def _drawn(content: str, box: Box, kind: str) -> str:
    return svg.text(content, box.left, box.bottom - 3, class_=kind)


def _around(x: float, y: float, width: float) -> Sequence[Box]:
    half = _FONT_PX / 2 + 1
    lefts = (x + _GAP, x - _GAP - width)
    beside = [Box(left, y - half, left + width, y + half) for left in lefts]
    middles = (y - _GAP - half, y + _GAP + half)
    return beside + [Box(x - width / 2, middle - half, x + width / 2, middle + half) for middle in middles]


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
    width: float = WIDTH,
) -> str:
    """An `<svg>`. `x` and `y` are the axes' titles, with units; `lines` are named horizontal dashed lines, `x_lines`
    vertical ones; `width` is the width at which texts have their size."""
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
    return framed(title, x=Axis(x, x_domain), y=Axis(y, y_domain), legend=legend, inside=inside, width=width)


def _dashes(series: Series, number: int, twin: Twin | None) -> tuple[str, float]:
    """The (pattern, offset) of a line."""
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
    """Add room for points at the ends, and for their labels."""
    if domain.is_log:
        factor = (domain.high / domain.low) ** 0.05
        return Domain(domain.low / factor, domain.high * factor, is_log=True)
    margin = (domain.high - domain.low) * 0.05
    return Domain(0.0 if domain.low == 0 else domain.low - margin, domain.high + margin)


class _Drawing:
    """Everything between the axes. Labels and places for the mouse are collected, to be drawn over everything else."""

    def __init__(self, x_scale: Scale, y_scale: Scale, x_title: str, y_title: str) -> None:
        self._x, self._y = x_scale, y_scale
        self._titles = (x_title, y_title)
        self._placer = LabelPlacer(Box(x_scale.start, y_scale.end - 6, x_scale.end, y_scale.start - 2))
        self._labelled: list[tuple[Spot, str]] = []
        self._hovers: list[str] = []

    def shape(self, series: Series, number: int, twin: Twin | None = None) -> str:
        """Draw one series, and remember its labels. Series that overlap are dashed so that all are visible."""
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
        """The series on the picture, cut where a point cannot be drawn."""
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
