"""Labels beside points: each goes where it covers no other, or is left out (the mouse still shows it)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headway.lab.charts import svg

_FONT_PX = 11.0
_GAP = 7.0
_LINE_CLASS = "hw-note hw-dim hw-halo"


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
    """Remembers what is taken."""

    def __init__(self, room: Box) -> None:
        self._room = room
        self._points: list[Box] = []
        self._labels: list[Box] = []

    def take(self, x: float, y: float, radius: float = 4.0) -> None:
        """A point lies here."""
        self._points.append(Box(x - radius, y - radius, x + radius, y + radius))

    def label(self, content: str, x: float, y: float) -> str:
        """The label of a point, drawn right, left, above or below it; empty where none of these is free."""
        return self._first_free(content, _around(x, y, _width(content)), "hw-note hw-halo")

    def line_label(self, content: str, y: float) -> str:
        """The name of a line across: above or below it, at its right end or at its left; above it if all are taken."""
        left, right = self._room.left + 4, self._room.right - _width(content)
        places = [Box(x, top, x + _width(content), top + 13) for x in (right, left) for top in (y - 14, y + 2)]
        return self._first_free(content, places, _LINE_CLASS) or _drawn(content, places[0], _LINE_CLASS)

    def upright_label(self, content: str, x: float) -> str:
        """The name of a line from bottom to top: beside it, where it is free; at its top if nothing is."""
        room, width = self._room, _width(content)
        lefts = (x + 5, x - 5 - width)
        tops = [room.top + share * (room.bottom - room.top - 13) for share in (0.14, 0.22, 0.3, 0.62, 0.7, 0.78, 0.86)]
        places = [Box(left, top, left + width, top + 13) for top in tops for left in lefts]
        return self._first_free(content, places, _LINE_CLASS) or _drawn(content, places[0], _LINE_CLASS)

    def _first_free(self, content: str, places: Sequence[Box], kind: str) -> str:
        """Free of points, too, if that is possible."""
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
