"""Values sorted into bins with round edges, evenly wide or evenly wide on a logarithmic axis."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from headway.lab.charts.scale import Domain, domain_of, round_step


def bin_edges(values: Sequence[float], *, is_log: bool, most: int) -> list[float]:
    """Edges around all values that can be drawn, for at most about so many bins; none without values."""
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
    """Some fraction of a decade each: 1, 2, 5, 10 where three of them go into one."""
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
