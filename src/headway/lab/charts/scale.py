"""An axis: where a value lies on the picture, and which round numbers are its ticks.

value ──(identity or log10)──► share of the way from low to high ──► pixels from start to end
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headway.lab.charts.number_text import log_tick_text, tick_texts

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_TICK_COUNTS = (14, 12, 10, 8, 7, 6, 5, 4, 3, 2)
_MOST_LINEAR_TICKS = 10
_SMALLEST_SHARE_FOR_ZERO = 0.5
"""An axis of positive values begins at 0 unless they all lie above this share of the largest."""


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
    """A domain laid out between two positions; `end` may be smaller than `start` (y axes grow upwards)."""

    domain: Domain
    start: float
    end: float

    def position(self, value: float) -> float | None:
        """Where the value lies; None for one that has no place: not finite, or not positive on a logarithmic axis."""
        if not math.isfinite(value) or (self.domain.is_log and value <= 0):
            return None
        low, high = self._moved(self.domain.low), self._moved(self.domain.high)
        return self.start + (self._moved(value) - low) / (high - low) * (self.end - self.start)

    def ticks(self, most: int) -> list[Tick]:
        """At most so many round numbers inside the domain, or a few more where that cannot be helped."""
        if self.domain.is_log:
            return [Tick(value, log_tick_text(value)) for value in _log_ticks(self.domain, most)]
        values, step = _linear_ticks(self.domain.low, self.domain.high, min(most, _MOST_LINEAR_TICKS))
        return [Tick(value, label) for value, label in zip(values, tick_texts(values, step))]

    def fitting_ticks(self, extent: Callable[[str], float]) -> list[Tick]:
        """As many ticks as have room side by side; `extent` is a label's size along the axis, its margin included."""
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
    """1-2-5 if there is room, else powers of ten, else some of these; inside one decade, evenly spaced values."""
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
