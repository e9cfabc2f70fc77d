"""Axes: where a value lies on the picture, which round numbers are ticks, how numbers are written, edges of bins.

value ──(identity or log10)──► share of the way from low to high ──► pixels from start to end
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

MINUS = "−"
_MILLION = 1_000_000.0


_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_TICK_COUNTS = (14, 12, 10, 8, 7, 6, 5, 4, 3, 2)
_MOST_LINEAR_TICKS = 10
_SMALLEST_SHARE_FOR_ZERO = 0.5
"""An axis of positive values begins at 0 unless they all lie above this share of the largest."""


def number_text(value: float) -> str:
    """About four digits: 1,234,567 · 12.35 · 0.001235."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞" if value > 0 else f"{MINUS}∞"
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-4:
        text = f"{value:.3g}"
    elif size >= 1_000 or float(value).is_integer():
        text = f"{value:,.0f}"
    else:
        text = f"{value:.4g}"
    return text.replace("-", MINUS) if value < 0 else text


def tick_texts(values: list[float], step: float) -> list[str]:
    """Labels of evenly spaced ticks: all with as many decimals as their step needs, millions as M."""
    largest = max(map(abs, values), default=0.0)
    if largest >= 1e12 or step < 1e-6:
        return [_signed(f"{value:g}") for value in values]
    unit, suffix = (_MILLION, "M") if largest >= _MILLION else (1.0, "")
    decimals = _num_decimals(step / unit)
    return [_signed(f"{value / unit:,.{decimals}f}{suffix}") if value else "0" for value in values]


def log_tick_text(value: float) -> str:
    """The label of one tick of a logarithmic axis."""
    if 1e6 <= value < 1e12:
        return f"{value / _MILLION:,g}M"
    if 1e-4 <= value < 1e6:
        return f"{value:,.10g}"
    return f"{value:g}"


def _num_decimals(step: float) -> int:
    for decimals in range(12):
        if math.isclose(step * 10**decimals, round(step * 10**decimals), rel_tol=1e-9):
            return decimals
    return 12


def _signed(text: str) -> str:
    return text.replace("-", MINUS)


@dataclass(frozen=True)
class Domain:
    """The values that an axis spans."""

    low: float
    high: float
    is_log: bool = False


@dataclass(frozen=True)
class Tick:
    value: float
    label: str


@dataclass(frozen=True)
class Scale:
    """A domain between two positions; `end` may be smaller than `start` (y axes grow upwards)."""

    domain: Domain
    start: float
    end: float

    def position(self, value: float) -> float | None:
        """The position of a value; None if it has none: it is not finite, or not positive on a logarithmic axis."""
        if not math.isfinite(value) or (self.domain.is_log and value <= 0):
            return None
        low, high = self._moved(self.domain.low), self._moved(self.domain.high)
        return self.start + (self._moved(value) - low) / (high - low) * (self.end - self.start)

    def ticks(self, most: int) -> list[Tick]:
        """At most `most` round numbers inside the domain, or a few more if that cannot be avoided."""
        if self.domain.is_log:
            return [Tick(value, log_tick_text(value)) for value in _log_ticks(self.domain, most)]
        values, step = _linear_ticks(self.domain.low, self.domain.high, min(most, _MOST_LINEAR_TICKS))
        return [Tick(value, label) for value, label in zip(values, tick_texts(values, step))]

    def fitting_ticks(self, extent: Callable[[str], float]) -> list[Tick]:
        """As many ticks as fit side by side; `extent` is a label's size along the axis, its margin included."""
        ticks: list[Tick] = []
        for most in _TICK_COUNTS:
            ticks = self.ticks(most)
            if not self._overlap(ticks, extent):
                return ticks
        return ticks[:1]

    def _overlap(self, ticks: list[Tick], extent: Callable[[str], float]) -> bool:
        spans = sorted((self.position(t.value) or 0.0, extent(t.label) / 2) for t in ticks)
        return any(right - half_r < left + half_l for (left, half_l), (right, half_r) in itertools.pairwise(spans))

    def _moved(self, value: float) -> float:
        return math.log10(value) if self.domain.is_log else value


def domain_of(
    values: Iterable[float], *, is_log: bool = False, wants_zero: bool = False, is_rounded: bool = False
) -> Domain | None:
    """What an axis of these values spans; None where not one of them can be drawn.

    `wants_zero`: begin at 0 where that does not flatten everything. `is_rounded`: end at ticks.
    """
    drawable = [value for value in values if math.isfinite(value) and (value > 0 or not is_log)]
    if not drawable:
        return None
    low, high = float(min(drawable)), float(max(drawable))
    if math.isclose(low, high, rel_tol=1e-6):  # rounding errors are no range
        low = high
    if is_log:
        return _log_domain(low, high, is_rounded)
    if wants_zero and 0 <= low <= high * _SMALLEST_SHARE_FOR_ZERO:
        low = 0.0
    if low == high:
        low, high = (0.0, 2 * high) if high > 0 else (2 * low, 0.0) if low < 0 else (0.0, 1.0)
    if is_rounded:
        step = round_step((high - low) / 6)
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return Domain(low, high)


def _log_domain(low: float, high: float, is_rounded: bool) -> Domain:
    if low == high:
        return Domain(low / 2, high * 2, is_log=True)
    if is_rounded:
        low, high = _round_down(low), _round_up(high)
    return Domain(low, high, is_log=True)


def _round_down(value: float) -> float:
    """The next of 1, 2, 5 × 10ⁿ at or below."""
    power = 10.0 ** math.floor(math.log10(value) + 1e-12)
    return max(step * power for step in (1, 2, 5) if step * power <= value * (1 + 1e-9))


def _round_up(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value) + 1e-12)
    return min(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))


def round_step(step: float) -> float:
    """The next of 1, 2, 2.5, 5 × 10ⁿ at or above."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in _STEPS if factor * power >= step * (1 - 1e-9))


def _linear_ticks(low: float, high: float, most: int) -> tuple[list[float], float]:
    step = round_step((high - low) / most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)], step


def _log_ticks(domain: Domain, most: int) -> list[float]:
    """1-2-5 if there is room, else powers of ten, else some of them; inside one decade, evenly spaced values."""
    low, high = domain.low * (1 - 1e-9), domain.high * (1 + 1e-9)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    fine = [step * 10.0**power for power in range(first, last + 1) for step in (1, 2, 5)]
    fine = [value for value in fine if low <= value <= high]
    if len(fine) < 3:
        return _linear_ticks(domain.low, domain.high, most)[0]
    if len(fine) <= most:
        return fine
    decades = [10.0**power for power in range(first, last + 1) if low <= 10.0**power <= high]
    if len(decades) < 2:
        return fine
    every = -(-len(decades) // most)
    return decades[::every]


def bin_edges(values: Sequence[float], *, is_log: bool, most: int) -> list[float]:
    """Edges around all values that can be drawn, for at most about `most` bins; none without values."""
    domain = domain_of(values, is_log=is_log)
    if domain is None:
        return []
    whole = all(float(value).is_integer() for value in values if math.isfinite(value))
    if len(set(values)) == 1:
        return [values[0], values[0] + (1 if whole else abs(values[0]) / 10)]
    return _log_edges(domain, most) if is_log else _linear_edges(domain, most, is_whole=whole)


def _linear_edges(domain: Domain, most: int, *, is_whole: bool) -> list[float]:
    step = round_step((domain.high - domain.low) / most)
    if is_whole:
        step = max(1.0, math.ceil(step))
    first = math.floor(domain.low / step + 1e-9)
    last = max(first + 1, math.floor(domain.high / step + 1e-9) + 1)
    return [step * number for number in range(first, last + 1)]


def _log_edges(domain: Domain, most: int) -> list[float]:
    """Edges at equal fractions of a decade: 1, 2, 5, 10 if three bins fit into one."""
    low, high = math.log10(domain.low), math.log10(domain.high) + 1e-9
    finest = (10, 5, 3, 1) if most > 20 else (3, 1)
    per_decade = next((n for n in finest if (high - low) * n <= most), 1)
    powers = range(math.floor(low), math.floor(high) + 1)
    steps = (1.0, 2.0, 5.0) if per_decade == 3 else [10 ** (n / per_decade) for n in range(per_decade)]
    edges = [step * 10.0**power for power in powers for step in steps] + [10.0 ** (powers[-1] + 1)]
    first = bisect.bisect_right(edges, domain.low * (1 + 1e-9)) - 1
    last = bisect.bisect_right(edges, domain.high * (1 + 1e-9))
    return edges[max(0, first) : last + 1]


def counts_between(values: Sequence[float], edges: Sequence[float]) -> list[int]:
    """How many values lie in each bin: at or above its lower edge, below its upper one; in the last also on it."""
    counts = [0] * (len(edges) - 1)
    for value in values:
        if math.isfinite(value) and edges[0] * (1 - 1e-12) <= value <= edges[-1] * (1 + 1e-12):
            counts[min(max(0, bisect.bisect_right(edges, value) - 1), len(counts) - 1)] += 1
    return counts
