"""`headway bench sweep`: the same work at several rates, and with several settings of the engine."""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

from headway.bench.datasets import at_once
from headway.bench.sweep import (
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
from headway.bench.targets import Target
from headway.cli.bench_files import check_writable, print_table, progress_bar, write_json, write_page
from headway.cli.bench_probes import add_probe_flags, num_requests_at, probe, seed_of
from headway.cli.bench_target_flags import engine_target, server_target
from headway.cli.bench_work import dataset_of, draw_of, judging_of
from headway.cli.flags import engine_flags
from headway.errors import ConfigError


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
    add_probe_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    rates = parse_rates(arguments.rates)
    settings = settings_of(_knobs(arguments.knob))
    check_writable(arguments.output_json, arguments.html)
    points: list[SweepPoint] = []
    name = machine = ""
    for setting in settings:
        target = _target(arguments, setting)
        name, machine = target.name, target.machine
        if rates is None:  # of the first setting, so that all are compared at the same rates
            rates = auto_rates(_served_rate(arguments, target))
        for rate in rates:
            title = " ".join(filter(None, [setting_text(setting), f"{rate:g}/s"]))
            metrics = probe(arguments, target, rate, title).metrics
            print(f"{title}: {metrics.requests_s:.2f} requests/s, {metrics.output_tok_s:,.1f} tok/s", file=sys.stderr)
            points.append(SweepPoint(setting, rate, metrics))
        target.close()
    print(name)
    print_table(*sweep_table(points))
    print("\n".join(["latencies in ms", *sweep_notes(points)]))
    if arguments.output_json is not None:
        write_json(arguments.output_json, {"target": name, "points": [point.as_json() for point in points]})
    if arguments.html is not None:
        targets = judging_of(arguments).targets
        page = sweep_page(f"Sweep of {name}", points, targets={"": targets} if targets is not None else {})
        write_page(arguments, page, seed=seed_of(arguments), machine=machine)
    return 1 if any(point.metrics.num_lost for point in points) else 0


def _target(arguments: argparse.Namespace, setting: dict[str, Any]) -> Target:
    judging = judging_of(arguments)
    if arguments.base_url is None:
        return engine_target(arguments, judging, setting)
    if setting:
        raise ConfigError("--knob sets an option of the engine in this process; a server's options are its own.")
    return server_target(arguments, judging)


def _served_rate(arguments: argparse.Namespace, target: Target) -> float:
    """Requests a second, if all are there at once."""
    num_requests = num_requests_at(arguments, math.inf)
    wanted = draw_of(arguments, rate=math.inf, seed=seed_of(arguments), num_requests=num_requests)
    work = at_once(target.draw(dataset_of(arguments), wanted))
    with progress_bar(len(work), "all at once", is_shown=not arguments.disable_tqdm) as progress:
        rate = target.run(work, progress).metrics.requests_s
    if not rate:
        raise ConfigError("No request was answered, so there is no rate to start from; give --rates.")
    return rate


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
