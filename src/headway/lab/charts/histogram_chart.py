"""How often values occur, in bins with round edges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from headway.lab.charts import svg
from headway.lab.charts.binning import bin_edges, counts_between
from headway.lab.charts.frame import Axis, LegendItem, framed
from headway.lab.charts.number_text import number_text
from headway.lab.charts.scale import Domain, Scale, domain_of

_MOST_BINS = 40


def histogram_chart(title: str, *, x: str, samples: Mapping[str, Sequence[float]], log_x: bool = False) -> str:
    """An `<svg>`: the share of each sample's values in each bin, one sample over the other."""
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
