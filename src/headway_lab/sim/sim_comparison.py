"""Comparisons of simulations: policies × rates, with one seed or several, for all requests and by class.

A run of some hundred requests does not show whether a load is above a machine's capacity, since its last answers take
their time at any load. So the same requests are simulated once more, all at once and repeated until they fill the batch
several times over. The rate at which they are served while the batch is full is the capacity.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from headway.front.roles import Roles
from headway.price import price_text
from headway_lab.bench.online_metrics import THIN_MARK, OnlineMetrics, is_thin, thin_note
from headway_lab.bench.pricing import price_notes, price_titles
from headway_lab.bench.serving_report import SERVED_CAPTION, target_lines
from headway_lab.bench.slo_targets import Targets, attainment, class_names, own_targets, targets_by_class
from headway_lab.bench.timelines import RequestTimeline, percentile
from headway_lab.charts import Page, Series, cdf_chart, line_chart
from headway_lab.sim.calibration import Calibration
from headway_lab.sim.cost_model import Link
from headway_lab.sim.setup import set_up
from headway_lab.sim.simulate import Simulation, simulate
from headway_lab.workload.bench_requests import BenchRequest, Work

_FULL_BATCHES = 4
_KEEPS_UP = 0.95
"""A run that serves this share of the offered rate is not checked for overload."""

Table = tuple[list[str], list[list[str]]]
"""(titles, rows)"""

_T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Quantiles of Student's t distribution with 1, 2, … degrees of freedom."""

CSV_TITLES = (
    *("policy", "rate", "seed", "request", "class", "priority", "arrival_s", "prompt_tokens", "output_tokens"),
    *("ttft_ms", "tpot_ms", "e2e_ms", "preemptions", "met_targets"),
)


@dataclass(frozen=True)
class Overload:
    """A load beyond capacity."""

    offered: float
    """Requests that arrived each second."""
    served: float
    """Requests served each second, over the whole run."""
    capacity: float
    """Requests that a full batch serves each second."""

    def __str__(self) -> str:
        return f"{self.offered:.3g}/s offered, {self.served:.3g}/s served (about {self.capacity:.3g}/s can be)"


BEYOND = "The longer a load beyond capacity lasts, the longer its requests wait: latencies tell the length of the run."


def overload(metrics: OnlineMetrics, capacity_of_all: Callable[[], float]) -> Overload | None:
    """The overload, if requests arrived faster than they can be served. The capacity is only computed if the run did
    not keep up."""
    offered = metrics.offered_s
    if offered is None or metrics.requests_s >= _KEEPS_UP * offered:
        return None
    most = capacity_of_all()
    return Overload(offered, metrics.requests_s, most) if offered > most else None


def capacity(
    work: Work,
    calibration: Calibration,
    options: Mapping[str, Any],
    *,
    link: Link | None = None,
    roles: Roles | None = None,
) -> float:
    """Requests each second that one machine serves while its batch is full, or all replicas together if there are
    roles. Requests are served in order of arrival: an order that lets short ones go first would only show that these
    are quick."""
    setup = set_up(calibration, {**options, "scheduling_policy": "fcfs"}, link=link)
    num_seqs = setup.scheduler.max_num_seqs * (1 if roles is None else roles.num_decode)
    crowd = _crowd(work, max(_FULL_BATCHES * num_seqs, len(work)))
    timelines = simulate(
        crowd,
        setup.machine,
        setup.scheduler,
        setup.cache,
        num_replicas=1 if roles is None else roles.num_replicas,
        router="least-loaded",
        roles=roles,
    ).timelines
    begun = [timeline.token_times_s[0] for timeline in timelines]
    from_s, to_s = percentile(begun, 25), max(begun)  # the batch has filled; the last one has got its place
    ended = [timeline.token_times_s[-1] for timeline in timelines]
    num_ended = sum(from_s < end_s <= to_s for end_s in ended)
    return num_ended / (to_s - from_s) if num_ended and to_s > from_s else len(timelines) / max(ended)


def _crowd(work: Work, number: int) -> list[BenchRequest]:
    """`number` requests like these, all at once, repeated from the first as needed; each repetition has its own
    prefixes."""
    crowd = []
    for place, request in enumerate(itertools.islice(itertools.cycle(work), number)):
        salt = f"{place // len(work)}/{request.options.cache_salt or ''}"
        options = dataclasses.replace(request.options, cache_salt=salt)
        crowd.append(dataclasses.replace(request, arrival_s=0.0, think_s=0.0, after=None, options=options))
    return crowd


@dataclass(frozen=True)
class SimRun:
    """One simulation of some work, and its results."""

    seed: int
    work: Sequence[BenchRequest]
    simulation: Simulation
    metrics: OnlineMetrics
    given: Targets | None = None
    """Targets of every request, in place of those of its class."""

    @property
    def options(self) -> list[Any]:
        return [request.options for request in self.work]

    @cached_property
    def classes(self) -> dict[str, OnlineMetrics]:
        """The metrics of each class by its name, in order of their first requests."""
        names, targets = class_names(self.options), self.targets
        found: dict[str, OnlineMetrics] = {}
        for name in dict.fromkeys(names):
            places = [place for place, other in enumerate(names) if other == name]
            found[name] = OnlineMetrics.of(
                [self.simulation.timelines[place] for place in places],
                self.metrics.duration_s,
                targets=None if targets is None else [targets[place] for place in places],
            )
        return found

    @property
    def targets(self) -> list[Targets] | None:
        return [self.given] * len(self.work) if self.given is not None else own_targets(self.options)


@dataclass(frozen=True)
class Case:
    """The runs of one policy at one rate."""

    policy: str
    rate: float | None
    """`None`: the workload's own."""
    runs: Sequence[SimRun] = field(default_factory=list)
    """One run for each seed."""
    overload: Overload | None = None
    """Set if the load was above the capacity."""

    @property
    def rate_text(self) -> str:
        return "own" if self.rate is None else f"{self.rate:g}"

    @property
    def most_waiting(self) -> int:
        return max(run.simulation.most_waiting for run in self.runs)


def run_table(cases: Sequence[Case]) -> Table:
    """A row for each case, with latencies in milliseconds."""
    prices = [case.runs[0].metrics.prices for case in cases]
    titles = ["policy", "rate", "req/s", "goodput/s", "good", *_LATENCY_TITLES, "most waiting", *price_titles(prices)]
    rows = []
    for case in cases:
        each = [run.metrics for run in case.runs]
        cells = [case.policy, case.rate_text, _cell(each, lambda m: m.requests_s, 2)]
        cells += [_cell(each, lambda m: m.good_requests_s, 2), _cell(each, _good_percent, 1, "%")]
        cells += [*_latency_cells(each), f"{case.most_waiting:,}"]
        rows.append([*cells, *(_price_cells(each) if prices[0] is not None else [])])
    return titles, rows


def class_table(cases: Sequence[Case]) -> Table | None:
    """The same table by class; `None` if there is only one."""
    names = list(dict.fromkeys(name for case in cases for run in case.runs for name in run.classes))
    if len(names) < 2:
        return None
    titles = ["class", "policy", "rate", "requests", "goodput/s", "good", *_LATENCY_TITLES]
    rows = []
    for name in names:
        for case in cases:
            each = [run.classes[name] for run in case.runs if name in run.classes]
            cells = [name, case.policy, case.rate_text, f"{sum(m.num_completed for m in each):,}"]
            cells += [_cell(each, lambda m: m.good_requests_s, 2), _cell(each, _good_percent, 1, "%")]
            rows.append([*cells, *_latency_cells(each)])
    return titles, rows


def notes_on(cases: Sequence[Case]) -> list[str]:
    """Warnings about the numbers: loads beyond capacity, ties, too few requests or seeds."""
    notes = [*overload_notes(cases), *_ties(cases)]
    fewest = min(m.num_completed for case in cases for run in case.runs for m in (run.metrics, *run.classes.values()))
    if is_thin(99, fewest):
        notes.append(thin_note(fewest))
    notes += price_notes([case.runs[0].metrics.prices for case in cases])
    num_seeds = len(cases[0].runs)
    if num_seeds > 1:
        notes.append(f"Means over {num_seeds} seeds, ± half of the 95% interval of the mean.")
    return notes


def _ties(cases: Sequence[Case]) -> list[str]:
    """The policies that did the same to every request, with the reason."""
    told: dict[str, list[str]] = {}
    for rate in dict.fromkeys(case.rate for case in cases):
        groups: dict[tuple[Any, ...], list[Case]] = {}
        for case in cases:
            if case.rate == rate:
                times = tuple(tuple(t.token_times_s) for run in case.runs for t in run.simulation.timelines)
                groups.setdefault(times, []).append(case)
        for group in groups.values():
            if len(group) > 1:
                names = " and ".join(case.policy for case in group)
                most = max(case.most_waiting for case in group)
                why = (
                    "no request waited for a seat, so there was none to put before another"
                    if not most
                    else "requests waited, but these policies put them in the same order"
                )
                told.setdefault(f"{names} did the same to every request: {why}", []).append(group[0].rate_text)
    return [f"{text} ({_at(rates)})." if rates != ["own"] else f"{text}." for text, rates in told.items()]


def _at(rates: Sequence[str]) -> str:
    return f"at {', '.join(rates)} requests/s"


def overload_notes(cases: Sequence[Case]) -> list[str]:
    """One note for each rate, since capacity does not depend on the policy."""
    beyond = {case.rate: str(case.overload) for case in reversed(cases) if case.overload is not None}
    return [f"Beyond capacity: {'; '.join(reversed(beyond.values()))}. {BEYOND}"] if beyond else []


def csv_text(cases: Sequence[Case]) -> str:
    """A line for each request of each run."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_TITLES)
    for case in cases:
        for run in case.runs:
            writer.writerows(_csv_rows(case, run))
    return out.getvalue()


def _csv_rows(case: Case, run: SimRun) -> Iterable[list[Any]]:
    names, targets = class_names(run.options), run.targets
    for place, (request, line) in enumerate(zip(run.work, run.simulation.timelines, strict=True)):
        tpot_s = line.tpot_s
        yield [
            *(case.policy, "" if case.rate is None else f"{case.rate:g}", run.seed, place, names[place]),
            *(request.options.priority, f"{line.arrival_s:.6f}"),
            *(line.num_prompt_tokens, line.num_output_tokens),
            *(f"{1e3 * line.ttft_s:.3f}", "" if tpot_s is None else f"{1e3 * tpot_s:.3f}", f"{1e3 * line.e2e_s:.3f}"),
            line.num_preemptions,
            "" if targets is None else attainment([line], targets[place]).num_met,
        ]


def comparison_page(title: str, cases: Sequence[Case], *, notes: Sequence[str]) -> Page:
    """A page with curves over the rates or, at one rate, distributions of latencies. `notes` are at its top, tables at
    its end."""
    first = cases[0].runs[0]
    page = Page(title, f"{len(cases)} cases of {len(first.work):,} requests each, simulated")
    for note in notes:
        page.text(note)
    page.table(*run_table(cases))
    targets = targets_by_class(first.given, first.options)
    rates = {case.rate for case in cases if case.rate is not None and math.isfinite(case.rate)}
    if len(rates) > 1:
        _rate_charts(page, [case for case in cases if case.rate in rates], targets)
    else:
        _distributions(page, cases, targets)
    if (by_class := class_table(cases)) is not None:
        page.heading("By class, in milliseconds")
        page.table(*by_class)
    return page


def _rate_charts(page: Page, cases: Sequence[Case], targets: dict[str, Targets]) -> None:
    rates = sorted({case.rate for case in cases if case.rate is not None})
    same = Series("offered = served", rates, rates, is_reference=True)
    page.chart(
        line_chart(
            "Offered and served",
            x="offered (requests/s)",
            y="served (requests/s)",
            series=[*_curves(cases, lambda m: m.requests_s), same],
        ),
        SERVED_CAPTION,
    )
    charts: list[tuple[str, str, Callable[[OnlineMetrics], float | None], dict[str, float]]] = [
        ("Time to first token, P50", "milliseconds", lambda m: m.ttft.percentiles[50], target_lines(targets, "ttft")),
        ("Time to first token, P99", "milliseconds", lambda m: m.ttft.percentiles[99], target_lines(targets, "ttft")),
        ("Time per output token, P99", "milliseconds", lambda m: m.tpot.percentiles[99], target_lines(targets, "tpot")),
    ]
    if cases[0].runs[0].metrics.good_share is not None:
        charts.insert(0, ("Requests that met their targets", "%", _good_percent, {}))
    for title, y, value, lines in charts:
        series = _curves(cases, value)
        page.chart(line_chart(title, x="offered (requests/s)", y=y, series=series, log_y=y != "%", lines=lines))


def _curves(cases: Sequence[Case], value: Callable[[OnlineMetrics], float | None]) -> list[Series]:
    series = []
    for policy in dict.fromkeys(case.policy for case in cases):
        own = sorted((case.rate or 0.0, _mean(case, value)) for case in cases if case.policy == policy)
        series.append(Series(policy, [rate for rate, _ in own], [mean for _, mean in own]))
    return series


def _mean(case: Case, value: Callable[[OnlineMetrics], float | None]) -> float:
    found = [number for run in case.runs if (number := value(run.metrics)) is not None]
    return statistics.fmean(found) if found else math.nan


def _distributions(page: Page, cases: Sequence[Case], targets: dict[str, Targets]) -> None:
    def samples(of: Callable[[RequestTimeline], float | None]) -> dict[str, list[float]]:
        return {
            case.policy: [
                1e3 * value for run in case.runs for line in run.simulation.timelines if (value := of(line)) is not None
            ]
            for case in cases
        }

    for title, of, lines in (
        ("Time to first token", lambda line: line.ttft_s, target_lines(targets, "ttft")),
        ("Time per output token", lambda line: line.tpot_s, target_lines(targets, "tpot")),
        ("From arrival to last token", lambda line: line.e2e_s, target_lines(targets, "e2e")),
    ):
        page.chart(cdf_chart(title, x="time (ms)", samples=samples(of), x_lines=lines))


_LATENCY_TITLES = ["TTFT P50", "P99", "TPOT P50", "P99", "ITL P99", "E2E P50"]
_LATENCIES = (("ttft", 50), ("ttft", 99), ("tpot", 50), ("tpot", 99), ("itl", 99), ("e2el", 50))


def _latency_cells(each: Sequence[OnlineMetrics]) -> list[str]:
    return [_percentile_cell(each, name, percent) for name, percent in _LATENCIES]


def _percentile_cell(each: Sequence[OnlineMetrics], name: str, percent: int) -> str:
    thin = any(is_thin(percent, metrics.num_completed) for metrics in each)
    return _cell(each, lambda m: m.latencies[name].percentiles[percent], 1) + (THIN_MARK if thin else "")


def _price_cells(each: Sequence[OnlineMetrics]) -> list[str]:
    """The means over the seeds of the prices of input and output tokens."""
    tokens = [metrics.prices.tokens for metrics in each if metrics.prices is not None]
    sides = ([one.input for one in tokens], [one.output for one in tokens])
    known = ([price for price in side if price is not None] for side in sides)
    return [price_text(statistics.fmean(side) if side else None) for side in known]


def _good_percent(metrics: OnlineMetrics) -> float | None:
    return None if metrics.good_share is None else 100 * metrics.good_share


def _cell(
    each: Sequence[OnlineMetrics], value: Callable[[OnlineMetrics], float | None], digits: int, unit: str = ""
) -> str:
    """The mean over the seeds and, if there are several, half of its interval."""
    values = [number for metrics in each if (number := value(metrics)) is not None and math.isfinite(number)]
    if not values:
        return "–"
    text = f"{statistics.fmean(values):,.{digits}f}"
    return (f"{text} ±{half_interval(values):,.{digits}f}" if len(values) > 1 else text) + unit


def half_interval(values: Sequence[float]) -> float:
    """Half of the 95% confidence interval of the mean of some runs."""
    freedom = len(values) - 1
    t = _T_95[freedom - 1] if freedom <= len(_T_95) else 1.96 + 2.4 / freedom
    return t * statistics.stdev(values) / math.sqrt(len(values))
