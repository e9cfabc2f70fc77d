"""Plots of plain characters: dots of Braille for curves, blocks for histograms."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from headway_lab.charts.scale import Scale, Tick, bin_edges, counts_between, domain_of, number_text

_BLANK_BRAILLE = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a Braille character by column and row."""
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_MOST_ROWS = 12


def terminal_plot(
    xs: Sequence[float],
    ys: Sequence[float],
    *,
    width: int = 72,
    height: int = 12,
    x: str = "",
    y: str = "",
    log_x: bool = False,
) -> str:
    """A line through the points, `width` characters wide in all and `height` lines high without its axis."""
    points = [(px, py) for px, py in zip(xs, ys) if math.isfinite(px) and math.isfinite(py) and (px > 0 or not log_x)]
    x_domain = domain_of([px for px, _ in points], is_log=log_x)
    y_domain = domain_of([py for _, py in points], wants_zero=True, is_rounded=True)
    if x_domain is None or y_domain is None:
        return f"{y}: no data" if y else "no data"
    y_scale = Scale(y_domain, 4 * height - 1.0, 0.0)
    labels = {round((y_scale.position(tick.value) or 0.0) // 4): tick.label for tick in y_scale.ticks(height // 3)}
    margin = max(map(len, labels.values()), default=0)
    columns = max(8, width - margin - 2)
    x_scale = Scale(x_domain, 0.0, 2 * columns - 1.0)
    canvas = _Canvas(columns, height)
    places = [(x_scale.position(px) or 0.0, y_scale.position(py) or 0.0) for px, py in points]
    for start, end in zip(places, places[1:] or places):
        canvas.line(start, end)
    lines = [y] if y else []
    for number, row in enumerate(canvas.rows()):
        lines.append(f"{labels.get(number, ''):>{margin}} {'┤' if number in labels else '│'}{row}".rstrip())
    bottom = Scale(x_domain, 0.0, columns - 1.0)
    ticks = bottom.fitting_ticks(lambda label: len(label) + 3)
    places_of = {round(bottom.position(tick.value) or 0.0) for tick in ticks}
    axis = "".join("┬" if place in places_of else "─" for place in range(columns))
    lines.append(f"{'':>{margin}} └{axis}")
    lines.append(f"{'':>{margin + 2}}{_below(ticks, bottom, columns)}".rstrip())
    if x:
        lines.append(f"{x:>{margin + 2 + columns}}")
    return "\n".join(lines)


def terminal_histogram(values: Sequence[float], *, width: int = 72, label: str = "", log: bool = False) -> str:
    """A bar for each bin, with the number of its values. `log`: each bin is wider than the one before by the same
    factor."""
    drawable = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    edges = bin_edges(drawable, is_log=log, most=_MOST_ROWS)
    if not edges:
        return f"{label}: no data" if label else "no data"
    counts = counts_between(drawable, edges)
    names = [_bin_name(low, high) for low, high in itertools.pairwise(edges)]
    margin, numbers = max(map(len, names)), max(len(f"{count:,}") for count in counts)
    room = max(4, width - margin - numbers - 3)
    lines = [label] if label else []
    lines += [f"{name:>{margin}} │{_bar(count / max(counts) * room)} {count:,}" for name, count in zip(names, counts)]
    return "\n".join(lines)


class _Canvas:
    """Dots of Braille, two across and four down in each character."""

    def __init__(self, columns: int, height: int) -> None:
        self._cells = [[0] * columns for _ in range(height)]

    def line(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        steps = max(1, math.ceil(max(abs(end[0] - start[0]), abs(end[1] - start[1]))))
        for step in range(steps + 1):
            share = step / steps
            x = round(start[0] + share * (end[0] - start[0]))
            y = round(start[1] + share * (end[1] - start[1]))
            self._cells[y // 4][x // 2] |= _DOTS[x % 2][y % 4]

    def rows(self) -> list[str]:
        return ["".join(chr(_BLANK_BRAILLE + cell) if cell else " " for cell in row) for row in self._cells]


def _below(ticks: Sequence[Tick], scale: Scale, columns: int) -> str:
    line = [" "] * (columns + 16)
    for tick in ticks:
        middle = round(scale.position(tick.value) or 0.0)
        start = max(0, min(middle - len(tick.label) // 2, columns - len(tick.label)))
        line[start : start + len(tick.label)] = tick.label
    return "".join(line).rstrip()


def _bar(length: float) -> str:
    whole, part = divmod(round(length * 8), 8)
    return "█" * whole + (_EIGHTHS[part] if part else "")


def _bin_name(low: float, high: float) -> str:
    """Both edges of a bin; if it has room for only one whole number, that number."""
    if high - low == 1 and float(low).is_integer():
        return number_text(low)
    return f"{number_text(low)}–{number_text(high)}"
