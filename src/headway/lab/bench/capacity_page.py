"""The search for a capacity as a page: what each bounded number was at each rate."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway.lab.bench.capacity import Capacity
from headway.lab.bench.objectives import Objective
from headway.lab.bench.online_metrics import THIN_MARK, OnlineMetrics, is_thin, thin_note
from headway.lab.charts import Page, Series, line_chart
from headway.lab.charts.scale import number_text


def capacity_page(title: str, found: Capacity, objectives: Sequence[Objective]) -> Page:
    """One chart for each objective, with its bound and the answer in it."""
    answer = "none found" if found.rate is None else f"{found.rate:.3g} requests/s"
    page = Page(title, " and ".join(map(str, objectives)))
    page.facts({"capacity": answer, "probes": f"{len(found.probes)}"})
    probes = sorted(found.probes, key=lambda probe: probe.rate)
    results = [probe.metrics.as_json() for probe in probes]
    for objective in objectives:
        values = [result[objective.key] for result in results]
        series = Series(
            objective.key, [p.rate for p in probes], [math.nan if value is None else value for value in values]
        )
        page.chart(
            line_chart(
                objective.key,
                x="request rate (requests/s)",
                y="milliseconds" if objective.key.endswith("_ms") else objective.key,
                series=[series],
                log_x=True,
                log_y=objective.key.endswith("_ms"),
                lines={"bound": objective.bound},
                x_lines={} if found.rate is None else {"capacity": found.rate},
            )
        )
    page.heading("Probes")
    page.table(
        ["requests/s", "met", *(objective.key for objective in objectives), "requests", "failed"],
        [
            [
                f"{probe.rate:.3g}",
                "yes" if probe.is_met else "no",
                *(_marked(objective, result[objective.key], probe.metrics) for objective in objectives),
                probe.metrics.num_completed,
                probe.metrics.num_lost,
            ]
            for probe, result in zip(probes, results, strict=True)
        ],
    )
    fewest = min((probe.metrics.num_completed for probe in probes), default=0)
    if is_thin(99, fewest) and any(objective.key.startswith("p99_") for objective in objectives):
        page.text(thin_note(fewest))
    return page


def _marked(objective: Objective, value: float | None, metrics: OnlineMetrics) -> str | None:
    """A P99 of too few requests has a mark."""
    if value is None:
        return None
    thin = objective.key.startswith("p99_") and is_thin(99, metrics.num_completed)
    return number_text(value) + (THIN_MARK if thin else "")
