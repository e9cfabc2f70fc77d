"""What a chart draws, and how thousands of points become as many as can be seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

_APART_PX = 1.5
MOST_POINTS = 2_500
"""Of a cloud; more than that would only lie on top of each other."""


@dataclass(frozen=True)
class Series:
    """Points in order. A value that is not finite is a gap."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    kind: Literal["line", "step", "points"] = "line"
    """`step`: the value holds until the next point."""
    labels: Sequence[str] = ()
    """One for each point, shown beside it where there is room, and when the mouse rests on it."""
    is_reference: bool = False
    """A line to hold others against, dashed and grey."""
    is_broad: bool = False
    """A pale band, which another line may lie on."""


@dataclass(frozen=True)
class Twin:
    """A line among those that lie on each other."""

    first: int
    """Number of the one that was there first."""
    rank: int
    """Its own place among them, from 0."""
    num_above: int
    """How many are drawn over it."""


def twins_of(series: Sequence[Series], place: Callable[[Series], Sequence[tuple[float, float]]]) -> dict[int, Twin]:
    """Lines that cannot be told apart, by their numbers; those that lie alone are not in it. `place`: where a series is
    on the picture."""
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
    """Whether they are closer than the width of a line, everywhere."""
    return len(first) == len(second) and all(
        abs(x1 - x2) <= _APART_PX and abs(y1 - y2) <= _APART_PX for (x1, y1), (x2, y2) in zip(first, second)
    )


class Spot(NamedTuple):
    """A point on the picture, and the number of the one in the data that it shows."""

    x: float
    y: float
    number: int


def thin_line(spots: Sequence[Spot]) -> list[Spot]:
    """The same line with at most four points in each column of pixels: where it comes in, its extremes, where it
    leaves. Peaks stay, however narrow."""
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
    """One point for each spot of two pixels, and of these evenly as many as can be drawn."""
    by_place = {(round(spot.x / 2), round(spot.y / 2)): spot for spot in spots} if len(spots) > MOST_POINTS else None
    kept = list(by_place.values()) if by_place is not None else list(spots)
    every = -(-len(kept) // MOST_POINTS)
    return kept[:: max(1, every)]


def evenly(spots: Sequence[Spot], most: int) -> list[Spot]:
    """At most so many of them, the first and the last included."""
    if len(spots) <= most:
        return list(spots)
    return [spots[round(place * (len(spots) - 1) / (most - 1))] for place in range(most)]
