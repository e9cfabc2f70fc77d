"""`headway bench capacity`: the highest rate of requests that meets objectives for latency."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence

from headway.console.flags import count, number, positive
from headway.console.output_files import check_writable, write_json
from headway.price import price_text
from headway_lab.bench.capacity_search import Capacity, Limits, Probe, find_capacity
from headway_lab.bench.load_flags import Probing, add_probe_flags, judging_of, targets_of
from headway_lab.bench.load_target import Target
from headway_lab.bench.online_metrics import (
    SARATHI,
    THIN_MARK,
    Objective,
    OnlineMetrics,
    is_thin,
    parse_objective,
    thin_note,
)
from headway_lab.charts import Page, Series, line_chart
from headway_lab.charts.html_page import write_page
from headway_lab.charts.scale import number_text
from headway_lab.workload.rates import finite_rate

_PROBE_SECONDS, _MIN_REQUESTS, _MAX_SECONDS = 10.0, 30, 100.0


def capacity_page(title: str, found: Capacity, objectives: Sequence[Objective]) -> Page:
    """One chart for each objective, with its bound and the answer in it."""
    answer = "none found" if found.rate is None else f"{found.rate:.3g} requests/s"
    page = Page(title, " and ".join(map(str, objectives)))
    prices = None if found.best is None else found.best.metrics.prices
    price = {} if prices is None else {"price per 1M tokens, in / out": " / ".join(prices.cells())}
    page.facts({"capacity": answer, "probes": f"{len(found.probes)}", **price})
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
    """The value, marked if it is a P99 of too few requests."""
    if value is None:
        return None
    thin = objective.key.startswith("p99_") and is_thin(99, metrics.num_completed)
    return number_text(value) + (THIN_MARK if thin else "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = Limits()
    parser.add_argument(
        "--slo",
        action="append",
        metavar="KEY=BOUND",
        help="A bound on a key of the result: p99_itl_ms=100, p50_ttft_ms=2000, goodput_share=0.99. May be given "
        f"several times; all must hold. (default: {' '.join(SARATHI)})",
    )
    parser.add_argument(
        "--start-rate",
        type=finite_rate,
        metavar="X",
        help="First to try. (default: what is served when --min-requests are there at once)",
    )
    parser.add_argument(
        "--max-rate",
        type=finite_rate,
        default=default.highest,
        metavar="X",
        help="Highest to try. (default: %(default)g)",
    )
    parser.add_argument(
        "--precision",
        type=positive,
        default=default.precision,
        metavar="P",
        help="Stop when the answer is known up to this part. (default: %(default)g)",
    )
    parser.add_argument(
        "--max-probes",
        type=count(1),
        default=default.max_probes,
        metavar="N",
        help="Rates to try at most. (default: %(default)s)",
    )
    parser.add_argument(
        "--max-seconds",
        type=number(0.0, is_above=True, may_be_infinite=True),
        default=_MAX_SECONDS,
        metavar="S",
        help="Time for all of it, once a model is loaded: no rate is tried that would take longer. inf: no limit. "
        "(default: %(default)g)",
    )
    add_probe_flags(parser, probe_seconds=_PROBE_SECONDS, min_requests=_MIN_REQUESTS)


def run(arguments: argparse.Namespace) -> int:
    objectives = [parse_objective(text) for text in arguments.slo or SARATHI]
    check_writable(arguments.output_json, arguments.html)
    (make,) = targets_of(arguments, judging_of(arguments))
    probing = Probing.of(arguments)
    target = make()
    promised = " and ".join(map(str, objectives))
    print(f"{target.name}: the highest rate with {promised}, seed {probing.seed}", flush=True)
    search = _TimedSearch(probing, target, arguments.max_seconds)
    start = min(arguments.start_rate or search.served_rate(), arguments.max_rate)
    limits = Limits(
        start=start,
        lowest=min(Limits().lowest, start),
        highest=arguments.max_rate,
        precision=arguments.precision,
        max_probes=arguments.max_probes,
        max_seconds=arguments.max_seconds,
    )
    found = find_capacity(
        search.measure,
        objectives,
        limits=limits,
        on_probe=lambda one: print(probe_line(one, objectives), flush=True),
        seconds_at=search.seconds_at,
        elapsed_s=search.elapsed_s,
    )
    target.close()
    print(verdict(found))
    if found.best is not None and (prices := found.best.metrics.prices) is not None:
        print("\n".join([*(f"{name}: {text}" for name, text in prices.lines().items()), prices.note]))
    if arguments.output_json is not None:
        write_json(arguments.output_json, {"seed": probing.seed, **capacity_json(target.name, found, objectives)})
    if arguments.html is not None:
        page = capacity_page(f"Capacity of {target.name}", found, objectives)
        write_page(arguments, page, seed=probing.seed, machine=target.machine)
    return 0 if found.rate is not None else 1


class _TimedSearch:
    """Probes of a target, and how long they take."""

    def __init__(self, probing: Probing, target: Target, max_seconds: float) -> None:
        self._probing, self._target, self._max_seconds = probing, target, max_seconds
        self._started_s = time.monotonic()
        self._best_rate = math.inf
        """The highest rate served so far."""
        self._num_probes = 0

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def seconds_at(self, rate: float) -> float:
        """The expected seconds of a probe. Above the highest served rate, requests take as long as at that rate."""
        return self._probing.num_requests_at(rate) / min(rate, self._best_rate)

    def served_rate(self) -> float:
        """Requests served each second when all are there at once."""
        self._best_rate = self._probing.served_rate(self._target)
        print(f"all at once: {self._best_rate:.3g} requests/s are served", flush=True)
        return self._best_rate

    def measure(self, rate: float) -> OnlineMetrics:
        self._num_probes += 1
        left_s = self._max_seconds - self.elapsed_s()
        limit = "" if math.isinf(left_s) else f" ({max(left_s, 0.0):.0f} s left in all)"
        metrics = self._probing.run(self._target, rate, f"Probe {self._num_probes}, {rate:.3g}/s{limit}").metrics
        known = 0.0 if math.isinf(self._best_rate) else self._best_rate
        self._best_rate = max(known, metrics.requests_s) or math.inf
        return metrics


def probe_line(one: Probe, objectives: list[Objective]) -> str:
    """A probe on one line: the bounded values, and whether they met their bounds."""
    result = one.metrics.as_json()
    values = [f"{o.key} {'–' if (value := result.get(o.key)) is None else f'{value:,.4g}'}" for o in objectives]
    prices = one.metrics.prices
    values += [] if prices is None else [f"price/M out, all in {price_text(prices.tokens.all_in)}"]
    lost = f", {one.metrics.num_lost} failed" if one.metrics.num_lost else ""
    mark = "met   " if one.is_met else "missed"
    return f"{one.rate:>9.3g}/s  {mark}  {'  '.join(values)}  ({one.metrics.num_completed} requests{lost})"


def verdict(found: Capacity) -> str:
    """The answer as a sentence."""
    cut = " Time or probes ran out: --max-seconds and --max-probes allow more." if found.is_cut else ""
    if found.rate is None:
        return f"No rate down to {found.first_miss:.3g} requests/s meets the objectives.{cut}"
    if found.first_miss is None:
        return f"Capacity: at least {found.rate:.3g} requests/s; no higher rate was tried.{cut}"
    return f"Capacity: {found.rate:.3g} requests/s ({found.first_miss:.3g} is too much).{cut}"


def capacity_json(name: str, found: Capacity, objectives: list[Objective]) -> dict[str, object]:
    """The result file: the best probe's numbers, and every probe."""
    best = found.best
    return {
        "target": name,
        "capacity": found.rate,
        "first_miss": found.first_miss,
        "slo": {objective.key: objective.bound for objective in objectives},
        **({} if best is None else best.metrics.as_json()),
        "probes": [{"rate": one.rate, "met": one.is_met, **one.metrics.as_json()} for one in found.probes],
    }
