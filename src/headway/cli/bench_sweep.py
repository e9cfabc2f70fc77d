"""`headway bench sweep`: the same work at several rates, and with several settings of the engine."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from headway.cli.bench_probes import Probing, add_probe_flags
from headway.cli.bench_target_flags import targets_of
from headway.cli.bench_work import judging_of
from headway.cli.flags import engine_flags
from headway.cli.output_files import check_writable, print_table, write_json
from headway.errors import ConfigError
from headway.lab.bench.sweep import (
    SweepPoint,
    auto_rates,
    parse_knob,
    parse_rates,
    setting_text,
    settings_of,
    sweep_notes,
    sweep_page,
    sweep_table,
)
from headway.lab.charts.html_page import write_page

_PROBE_SECONDS, _MIN_REQUESTS = 30.0, 50


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
    """Values as the engine's own flags read them."""
    flags = {flag.name: flag for flag in engine_flags()}
    knobs: dict[str, list[Any]] = {}
    for text in texts:
        name, values = parse_knob(text)
        try:
            knobs[name] = [flags[name].convert(value) for value in values]
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"--knob {name}: {error}.") from None
    return knobs
