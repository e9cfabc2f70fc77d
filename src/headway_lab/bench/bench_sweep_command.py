"""`headway bench sweep`: the same work at several rates, and with several settings of the engine."""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.config import check_names
from headway.console.flags import engine_flags
from headway.console.output_files import check_writable, print_table, write_json
from headway.errors import ConfigError
from headway_lab.bench.load_flags import Probing, add_probe_flags, judging_of, targets_of
from headway_lab.bench.online_metrics import OnlineMetrics, is_thin, thin_note
from headway_lab.bench.pricing import price_cells, price_notes, price_titles
from headway_lab.bench.serving_report import SERVED_CAPTION, target_lines
from headway_lab.bench.slo_targets import Targets
from headway_lab.charts import Page, Series, line_chart
from headway_lab.charts.html_page import write_page
from headway_lab.workload.rates import arrival_rate

AUTO_SHARES = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1)
"""The automatic rates, as parts of the rate that is served when everything is there at once."""

Setting = Mapping[str, Any]
"""Options of the engine."""

_PROBE_SECONDS, _MIN_REQUESTS = 30.0, 50


@dataclass(frozen=True)
class SweepPoint:
    setting: Setting
    rate: float
    metrics: OnlineMetrics

    @property
    def label(self) -> str:
        return setting_text(self.setting)

    def as_json(self) -> dict[str, Any]:
        rate: float | str = "inf" if math.isinf(self.rate) else self.rate
        return {"request_rate": rate, "setting": dict(self.setting)} | self.metrics.as_json()


def setting_text(setting: Setting) -> str:
    """On one line; "" for the default."""
    return ", ".join(f"{name}={value}" for name, value in setting.items())


def parse_rates(text: str) -> list[float] | None:
    """`None` for "auto". `ConfigError` for anything that is not rates."""
    if text == "auto":
        return None
    try:
        return [arrival_rate(part) for part in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--rates must be 'auto' or rates above 0 such as 1,2,4,8 (or inf): {error}.") from None


def auto_rates(served_rate: float) -> list[float]:
    """Rates around the one that is served when everything is there at once."""
    return [float(f"{share * served_rate:.3g}") for share in AUTO_SHARES]


def parse_knob(text: str) -> tuple[str, list[str]]:
    """From `OPTION=VALUE,VALUE`, the values still as text. `ConfigError` names the option that was probably meant."""
    name, _, values = text.partition("=")
    name = name.replace("-", "_").removeprefix("__")
    check_names([name])
    if not values or not all(values.split(",")):
        raise ConfigError(f"A knob is OPTION=VALUE,VALUE, e.g. max_num_seqs=16,64, not '{text}'.")
    return name, values.split(",")


def settings_of(knobs: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of the values; one empty setting if there are no knobs."""
    return [dict(zip(knobs, values, strict=True)) for values in itertools.product(*knobs.values())]


def sweep_page(
    title: str,
    points: Sequence[SweepPoint],
    *,
    notes: Sequence[str] = (),
    targets: Mapping[str, Targets] | None = None,
) -> Page:
    """Curves against the rate, one line for each setting; against the settings where there is only one rate. `targets`
    by class are drawn."""
    page = Page(title, f"{len(points)} runs")
    for note in notes:
        page.text(note)
    if served := _served(points):
        page.chart(served, SERVED_CAPTION)
    page.chart(_curves(points, "Throughput", "output tokens/s", "output_throughput", False))
    for chart_title, key, name in (
        ("Time to first token, P99", "p99_ttft_ms", "ttft"),
        ("Between tokens, P99", "p99_itl_ms", "tpot"),
        ("Whole answer, P99", "p99_e2el_ms", "e2e"),
    ):
        page.chart(_curves(points, chart_title, "milliseconds", key, True, target_lines(targets or {}, name)))
    if all(point.metrics.prices is not None for point in points):
        key = "price_per_million_output_tokens_all_in"
        page.chart(
            _curves(points, "Price", "per 1M output tokens, all in", key, True),
            "The price of the devices, divided by the output tokens alone.",
        )
    page.chart(_frontier(points), "Up and to the left is better.")
    page.heading("All runs")
    page.table(*sweep_table(points))
    for note in sweep_notes(points):
        page.text(note)
    return page


def sweep_table(points: Sequence[SweepPoint]) -> tuple[list[str], list[list[str]]]:
    """(titles, rows) for terminal and page."""
    has_settings = any(point.setting for point in points)
    has_goodput = any(point.metrics.good_requests_s is not None for point in points)
    titles = ["setting"] * has_settings + ["rate", "req/s"] + ["goodput"] * has_goodput
    titles += ["out tok/s", "TTFT P50", "P99", "TPOT P50", "ITL P50", "P99", "E2E P99", "failed"]
    prices = [point.metrics.prices for point in points]
    titles += price_titles(prices)
    rows = []
    for place, point in enumerate(points):
        m = point.metrics
        cells = [point.label or "default"] * has_settings + [f"{point.rate:g}", f"{m.requests_s:.2f}"]
        cells += [f"{m.good_requests_s or 0.0:.2f}"] * has_goodput + [f"{m.output_tok_s:,.1f}"]
        cells += [m.percentile_text("ttft", percent) for percent in (50, 99)]
        cells += [m.percentile_text(name, 50, 2) for name in ("tpot", "itl")]
        cells += [m.percentile_text("itl", 99), m.percentile_text("e2el", 99), f"{m.num_lost}"]
        rows.append([*cells, *price_cells(prices, place)])
    return titles, rows


def sweep_notes(points: Sequence[SweepPoint]) -> list[str]:
    """Notes below the table."""
    fewest = min((point.metrics.num_completed for point in points), default=0)
    thin = [thin_note(fewest)] if is_thin(99, fewest) else []
    return [*thin, *price_notes([point.metrics.prices for point in points])]


def _by_setting(points: Sequence[SweepPoint]) -> dict[str, list[SweepPoint]]:
    groups: dict[str, list[SweepPoint]] = {}
    for point in points:
        groups.setdefault(point.label, []).append(point)
    return groups


def _served(points: Sequence[SweepPoint]) -> str:
    """A chart of offered against served requests each second, with the line on which both are equal."""
    rates = sorted({point.rate for point in points if math.isfinite(point.rate)})
    if len(rates) < 2:
        return ""
    series = [
        Series(name or "served", [p.rate for p in group], [p.metrics.requests_s for p in group])
        for name, group in _by_setting(points).items()
    ]
    same = Series("offered = served", rates, rates, is_reference=True)
    return line_chart("Offered and served", x="offered (requests/s)", y="served (requests/s)", series=[*series, same])


def _curves(
    points: Sequence[SweepPoint],
    title: str,
    y: str,
    key: str,
    log_y: bool,
    lines: Mapping[str, float] | None = None,
) -> str:
    groups = _by_setting(points)
    if len({point.rate for point in points}) > 1:
        series = [
            Series(name or y, [p.rate for p in group], [_value(p, key) for p in group])
            for name, group in groups.items()
        ]
        return line_chart(title, x="request rate (requests/s)", y=y, series=series, log_y=log_y, lines=lines)
    labels = list(groups)
    values = [_value(group[0], key) for group in groups.values()]
    one = Series(y, [float(place) for place in range(1, len(labels) + 1)], values, labels=labels)
    return line_chart(title, x="setting", y=y, series=[one], log_y=log_y, lines=lines)


def _frontier(points: Sequence[SweepPoint]) -> str:
    series = [
        Series(
            name or "runs",
            [_value(point, "p99_itl_ms") for point in group],
            [point.metrics.output_tok_s for point in group],
            kind="points",
            labels=[f"{point.rate:g}/s" for point in group],
        )
        for name, group in _by_setting(points).items()
    ]
    return line_chart(
        "Throughput against P99", x="P99 between tokens (ms)", y="output tokens/s", series=series, log_x=True
    )


def _value(point: SweepPoint, key: str) -> float:
    value = point.metrics.as_json()[key]
    return math.nan if value is None else value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rates",
        default="auto",
        metavar="LIST",
        help="Requests a second: 1,2,4,8, or inf for all at once, or auto: from a quarter of what is served when all "
        "are there at once to a tenth above it. (default: auto)",
    )
    parser.add_argument(
        "--knob",
        action="append",
        default=[],
        metavar="OPTION=LIST",
        help="Values of an option of the engine in this process, e.g. max_num_seqs=16,64,256. May be given several "
        "times: every value is tried with every other.",
    )
    add_probe_flags(parser, probe_seconds=_PROBE_SECONDS, min_requests=_MIN_REQUESTS)


def run(arguments: argparse.Namespace) -> int:
    rates = parse_rates(arguments.rates)
    settings = settings_of(_knobs(arguments.knob))
    check_writable(arguments.output_json, arguments.html)
    makers = targets_of(arguments, judging_of(arguments), settings)
    probing = Probing.of(arguments, rates or (1.0,))
    points: list[SweepPoint] = []
    name = machine = ""
    for setting, make in zip(settings, makers, strict=True):
        target = make()
        name, machine = target.name, target.machine
        if rates is None:  # of the first setting, so that all are compared at the same rates
            rates = auto_rates(probing.served_rate(target))
        for place, rate in enumerate(rates, start=1):
            title = " ".join(filter(None, [setting_text(setting), f"{rate:g}/s"]))
            metrics = probing.run(target, rate, f"{title} ({place} of {len(rates)})").metrics
            print(f"{title}: {metrics.requests_s:.2f} requests/s, {metrics.output_tok_s:,.1f} tok/s", file=sys.stderr)
            points.append(SweepPoint(setting, rate, metrics))
        target.close()
    print(f"{name}, seed {probing.seed}")
    print_table(*sweep_table(points))
    print("\n".join(["latencies in ms", *sweep_notes(points)]))
    if arguments.output_json is not None:
        found = {"target": name, "seed": probing.seed, "points": [point.as_json() for point in points]}
        write_json(arguments.output_json, found)
    if arguments.html is not None:
        targets = judging_of(arguments).targets
        page = sweep_page(f"Sweep of {name}", points, targets={"": targets} if targets is not None else {})
        write_page(arguments, page, seed=probing.seed, machine=machine)
    return 1 if any(point.metrics.num_lost for point in points) else 0


def _knobs(texts: list[str]) -> dict[str, list[Any]]:
    """The values as the engine's own flags read them."""
    flags = {flag.name: flag for flag in engine_flags()}
    knobs: dict[str, list[Any]] = {}
    for text in texts:
        name, values = parse_knob(text)
        try:
            knobs[name] = [flags[name].convert(value) for value in values]
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"--knob {name}: {error}.") from None
    return knobs
