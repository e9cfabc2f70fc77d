"""Draws a few steps of a trace as an SVG: what the host did above, what the device did below, on one time line.

The trace is what `headway bench … --profile TRACE.json` writes.

    python benchmarks/draw_trace.py TRACE.json docs/images/profile.svg --steps 3
"""

from __future__ import annotations

import argparse
import html
import itertools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.console.step_trace import KINDS, Trace, TraceEvent, kind_of, read_trace, short_name
from headway.errors import HeadwayError

WIDTH, MARGIN, LABEL_WIDTH = 1200, 16, 64
ROW_HEIGHT, ROW_GAP, LANE_GAP = 26, 4, 18
HEADER_HEIGHT, AXIS_HEIGHT, LEGEND_HEIGHT = 40, 24, 28
MAX_HOST_ROWS = 3
NUM_TICKS = 8
LETTER_WIDTH = 6.6
MIN_GAP_PX = 0.5
"""Neighbours of one kind that stand closer than this are drawn as one."""

KIND_COLOURS = {
    "linear": "#4477aa",
    "attention": "#ee6677",
    "norm/rope/activation": "#228833",
    "sampling": "#ccbb44",
    "copy": "#66ccee",
    "other": "#aaaaaa",
}
SPAN_COLOURS = {"step": "#e8eaf0", "schedule": "#8e7cc3", "submit": "#c27ba0", "wait": "#d0d0d6", "update": "#76a5af"}
SPARE_SPAN_COLOURS = ("#b5a26a", "#93a56e", "#a58a93")
"""For spans of other names, in order of their appearance."""
INK = "#333344"


@dataclass(frozen=True)
class Window:
    """The stretch of the trace that is drawn, and where a moment of it lies in the picture."""

    start_us: float
    end_us: float

    @property
    def duration_us(self) -> float:
        return self.end_us - self.start_us

    def x(self, moment_us: float) -> float:
        """Pixels from the left; moments outside lie on the edge."""
        share = (min(max(moment_us, self.start_us), self.end_us) - self.start_us) / self.duration_us
        return MARGIN + LABEL_WIDTH + share * (WIDTH - 2 * MARGIN - LABEL_WIDTH)

    def has(self, event: TraceEvent) -> bool:
        """Whether some of the event is inside."""
        return event.end_us > self.start_us and event.start_us < self.end_us


@dataclass
class Box:
    """A rectangle of a lane: an event, or several that stand too close to be told apart."""

    left: float
    right: float
    colour: str
    label: str
    title: str


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("picture")
    parser.add_argument("--first", type=int, default=2, help="the first step drawn, counted from 0 (default: 2)")
    parser.add_argument("--steps", type=int, default=3, help="how many steps (default: 3)")
    options = parser.parse_args(arguments)
    try:
        picture = draw(read_trace(options.trace), first=options.first, num_steps=options.steps)
    except HeadwayError as error:
        print(f"draw_trace: {error}", file=sys.stderr)
        return 1
    Path(options.picture).write_text(picture, encoding="utf-8")
    print(f"wrote {options.picture}")
    return 0


def draw(trace: Trace, *, first: int, num_steps: int) -> str:
    """The picture. Fewer steps are drawn if the trace has no more."""
    if not trace.steps:
        raise HeadwayError("the trace has no step of the engine in it")
    steps = trace.steps[first : first + num_steps] or trace.steps[:num_steps]
    window = Window(steps[0].start_us, max(step.end_us for step in steps))
    spans = [event for event in trace.spans if window.has(event)]
    colours = span_colours(spans)
    top = HEADER_HEIGHT
    parts = [_text(MARGIN, 22, _headline(steps, window), size=14, weight="bold"), _text(MARGIN, top + 17, "host")]
    for row in span_rows(spans):
        parts += _boxes([_span_box(event, colours[event.name], window) for event in row], top)
        top += ROW_HEIGHT + ROW_GAP
    top += LANE_GAP
    parts.append(_text(MARGIN, top + 17, "device" if trace.has_kernels else "torch"))
    parts += _boxes(merge([_kernel_box(event, window) for event in trace.computing if window.has(event)]), top)
    top += ROW_HEIGHT + ROW_GAP
    parts += _axis(window, top)
    top += AXIS_HEIGHT
    for legend in (colours, {kind: KIND_COLOURS[kind] for kind in KINDS}):
        parts += _legend(legend, top + LEGEND_HEIGHT // 2)
        top += LEGEND_HEIGHT
    return _svg(parts, top + MARGIN)


def span_colours(spans: Sequence[TraceEvent]) -> dict[str, str]:
    """A colour for each name, in order of appearance."""
    names = dict.fromkeys(event.name for event in spans)
    spare = itertools.cycle(SPARE_SPAN_COLOURS)
    return {name: SPAN_COLOURS[name] if name in SPAN_COLOURS else next(spare) for name in names}


def span_rows(spans: Sequence[TraceEvent]) -> list[list[TraceEvent]]:
    """Spans by depth: those inside another one stand in the row below it. Deeper than `MAX_HOST_ROWS` is left out."""
    rows: list[list[TraceEvent]] = [[]]
    around: list[TraceEvent] = []
    for event in sorted(spans, key=lambda event: (event.start_us, -event.duration_us)):
        while around and around[-1].end_us <= event.start_us:
            around.pop()
        depth = len(around)
        around.append(event)
        if depth < MAX_HOST_ROWS:
            while len(rows) <= depth:
                rows.append([])
            rows[depth].append(event)
    return rows


def merge(boxes: Iterable[Box]) -> list[Box]:
    """Join neighbours of one colour that nobody could tell apart, so that thousands of kernels stay a small file."""
    merged: list[Box] = []
    for box in boxes:
        last = merged[-1] if merged else None
        if last is not None and last.colour == box.colour and box.left - last.right < MIN_GAP_PX:
            last.right = max(last.right, box.right)
            last.label = last.title = last.title.split(":")[0] + " and more"
        else:
            merged.append(box)
    return merged


def _kernel_box(event: TraceEvent, window: Window) -> Box:
    kind, name = kind_of(event.name), short_name(event.name)
    title = f"{name}: {event.duration_us:,.1f} µs"
    return Box(window.x(event.start_us), window.x(event.end_us), KIND_COLOURS[kind], name, title)


def _span_box(event: TraceEvent, colour: str, window: Window) -> Box:
    title = f"{event.name}: {event.duration_us:,.1f} µs"
    return Box(window.x(event.start_us), window.x(event.end_us), colour, event.name, title)


def _headline(steps: Sequence[TraceEvent], window: Window) -> str:
    plural = "s" if len(steps) > 1 else ""
    return f"{len(steps)} step{plural}, {window.duration_us / len(steps):,.0f} µs each"


def _boxes(boxes: Iterable[Box], top: float) -> list[str]:
    parts = []
    for box in boxes:
        width = max(box.right - box.left, 0.3)
        rect = f'<rect x="{box.left:.1f}" y="{top}" width="{width:.1f}" height="{ROW_HEIGHT}" fill="{box.colour}"/>'
        parts.append(f"<g><title>{html.escape(box.title)}</title>{rect}</g>")
        if len(box.label) * LETTER_WIDTH + 8 < width:
            parts.append(_text(box.left + 4, top + 17, box.label))
    return parts


def _axis(window: Window, top: float) -> list[str]:
    tick_us = _round_number(window.duration_us / NUM_TICKS)
    parts = []
    for number in range(int(window.duration_us / tick_us) + 1):
        x = window.x(window.start_us + number * tick_us)
        parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{top + 5}" stroke="{INK}" stroke-width="0.7"/>')
        if x < WIDTH - MARGIN - LABEL_WIDTH:
            parts.append(_text(x + 3, top + 14, f"{number * tick_us:,g} µs", size=10))
    return parts


def _legend(colours: Mapping[str, str], middle: float) -> list[str]:
    parts, x = [], float(MARGIN + LABEL_WIDTH)
    for name, colour in colours.items():
        parts.append(f'<rect x="{x:.1f}" y="{middle - 6}" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(x + 17, middle + 4, name))
        x += 17 + len(name) * LETTER_WIDTH + 22
    return parts


def _round_number(value: float) -> float:
    """The nearest 1, 2 or 5 times a power of ten above."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value)


def _text(x: float, y: float, text: str, *, size: int = 11, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y}" font-size="{size}" font-weight="{weight}">{html.escape(text)}</text>'


def _svg(parts: Sequence[str], height: float) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" fill="{INK}">'
    )
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height:.0f}" fill="white"/>', *parts, "</svg>", ""])


if __name__ == "__main__":
    sys.exit(main())
