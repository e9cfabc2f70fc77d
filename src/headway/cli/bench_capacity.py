"""`headway bench capacity`: the highest rate of requests that meets objectives for latency."""

from __future__ import annotations

import argparse

from headway.bench.capacity import Capacity, Limits, Probe, find_capacity
from headway.bench.objectives import SARATHI, Objective, parse_objective
from headway.bench.targets import Target
from headway.cli.bench_files import check_writable, write_json, write_page
from headway.cli.bench_probes import add_probe_flags, probe, seed_of
from headway.cli.bench_target_flags import engine_target, server_target
from headway.cli.bench_work import judging_of, rate_flag
from headway.cli.counts import count


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
        "--start-rate", type=rate_flag, default=default.start, metavar="X", help="First to try. (default: %(default)g)"
    )
    parser.add_argument(
        "--max-rate",
        type=rate_flag,
        default=default.highest,
        metavar="X",
        help="Highest to try. (default: %(default)g)",
    )
    parser.add_argument(
        "--precision",
        type=rate_flag,
        default=default.precision,
        metavar="P",
        help="Stop when the answer is known up to this part. (default: %(default)g)",
    )
    parser.add_argument("--max-probes", type=count(1), default=default.max_probes, metavar="N")
    add_probe_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    objectives = [parse_objective(text) for text in arguments.slo or SARATHI]
    check_writable(arguments.output_json, arguments.html)
    judging = judging_of(arguments)
    target: Target
    if arguments.base_url is None:
        target = engine_target(arguments, judging)
    else:
        target = server_target(arguments, judging)
    print(f"{target.name}: the highest rate with {' and '.join(map(str, objectives))}")
    limits = Limits(
        start=arguments.start_rate,
        lowest=min(Limits().lowest, arguments.start_rate),
        highest=arguments.max_rate,
        precision=arguments.precision,
        max_probes=arguments.max_probes,
    )
    found = find_capacity(
        lambda rate: probe(arguments, target, rate, f"{rate:.3g}/s").metrics,
        objectives,
        limits=limits,
        on_probe=lambda one: print(probe_line(one, objectives), flush=True),
    )
    print(verdict(found))
    if arguments.output_json is not None:
        write_json(arguments.output_json, capacity_json(target.name, found, objectives))
    if arguments.html is not None:
        from headway.bench.capacity_page import capacity_page

        page = capacity_page(f"Capacity of {target.name}", found, objectives)
        write_page(arguments, page, seed=seed_of(arguments), machine=target.machine)
    return 0 if found.rate is not None else 1


def probe_line(one: Probe, objectives: list[Objective]) -> str:
    """One probe on one line: what was bounded, and whether it held."""
    result = one.metrics.as_json()
    values = [f"{o.key} {'–' if (value := result.get(o.key)) is None else f'{value:,.4g}'}" for o in objectives]
    lost = f", {one.metrics.num_lost} failed" if one.metrics.num_lost else ""
    mark = "met   " if one.is_met else "missed"
    return f"{one.rate:>9.3g}/s  {mark}  {'  '.join(values)}  ({one.metrics.num_completed} requests{lost})"


def verdict(found: Capacity) -> str:
    """The answer as a sentence."""
    if found.rate is None:
        return f"No rate down to {found.first_miss:.3g} requests/s meets the objectives."
    if found.first_miss is None:
        return f"Capacity: at least {found.rate:.3g} requests/s; no higher rate was tried."
    return f"Capacity: {found.rate:.3g} requests/s ({found.first_miss:.3g} is too much)."


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
