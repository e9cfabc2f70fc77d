"""Flags that `headway sim`, `sim-check` and `tune` share: which work, how much of it, and which options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headway.console.flags import FlagSpec, chosen, count, engine_flags, number, suggest, with_shape_defaults
from headway.errors import ConfigError
from headway_lab.workload.catalogue import add_workload_argument
from headway_lab.workload.rates import arrival_rate

if TYPE_CHECKING:
    from headway.tokenizer import Tokenizer
    from headway_lab.sim.calibration import Calibration
    from headway_lab.sim.cost_model import Link
    from headway_lab.workload.bench_requests import BenchRequest
    from headway_lab.workload.workload import Workload


PREDICTORS = ("none", "oracle")


def add_work_flags(parser: argparse.ArgumentParser, *, is_required: bool = True) -> None:
    group = parser.add_argument_group("work")
    add_workload_argument(group, "--workload", "The requests.", required=is_required)
    group.add_argument("--data-dir", metavar="DIR", help="Where the files are that the workload names.")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="Put a value over one of the workload's, e.g. limits.max_input=2000. May be given several times.",
    )
    group.add_argument("--requests", type=count(1), metavar="N", help="How many, instead of the workload's own number.")
    group.add_argument(
        "--work-seed", type=int, default=0, metavar="N", help="Seed for drawing the workload. (default: 0)"
    )


def add_rate_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rate",
        type=arrival_rate,
        metavar="R",
        help="Requests/s instead of the workload's own rate; a trace is stretched to it. inf: all at once.",
    )


def load_work(arguments: argparse.Namespace) -> Workload:
    """The workload that the flags name."""
    from headway_lab.workload import load_workload, parse_overrides

    workload = load_workload(arguments.workload, data_dir=arguments.data_dir, **parse_overrides(arguments.set))
    workload.check_data()
    return workload


def draw_work(
    arguments: argparse.Namespace,
    workload: Workload,
    *,
    vocab_size: int,
    rate: float | None,
    tokenizer: Tokenizer | None = None,
) -> list[BenchRequest]:
    if workload.needs_tokenizer and tokenizer is None:
        tokenizer = _embedded_tokenizer()
    work = workload.draw(
        vocab_size=vocab_size,
        seed=arguments.work_seed,
        tokenizer=tokenizer,
        num_requests=arguments.requests,
        rate=rate,
    )
    if not work:
        raise ConfigError(f"The workload '{arguments.workload}' has no requests.")
    return work


def simulated_flags() -> list[FlagSpec]:
    """The engine's own flags of scheduler and cache. Flags that are not given keep the calibrated engine's values."""
    return [flag for flag in engine_flags() if flag.section in ("scheduler", "cache")]


def simulated_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of scheduler and cache that were given."""
    return chosen(arguments, simulated_flags())


def add_calibration_flag(parser: argparse.ArgumentParser, *, takes_several: bool = False) -> None:
    from headway_lab.sim.calibration import shipped_machines

    several = " Several of one model in other numbers of ranks may be given, with --replicas." if takes_several else ""
    machines = tuple(shipped_machines())
    action = parser.add_argument(
        "--calibration",
        metavar="FILE",
        required=True,
        action="append" if takes_several else "store",
        help="The machine: what 'headway calibrate' wrote, or the name of one that is shipped: "
        f"{', '.join(machines)}.{several}",
    )
    suggest(action, machines)


def load_calibration(text: str) -> Calibration:
    """The calibration that `--calibration` names: a file, or a shipped machine."""
    from headway_lab.sim.calibration import Calibration

    return Calibration.find(text)


def add_link_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for several devices: ranks of one model, and the link between them or between replicas with
    roles."""
    parser.add_argument(
        "--tensor-parallel-size",
        type=count(1),
        metavar="N",
        help="Devices that share each model; the calibration has to be that of one rank of N. (default: as calibrated)",
    )
    parser.add_argument(
        "--link-gb-s",
        type=number(1e-3, 1e6),
        metavar="X",
        help="With --roles, or ranks: how fast a device sends to another, and receives at the same time; 450 is about "
        "NVLink, 25 PCIe. (default: 450)",
    )
    parser.add_argument(
        "--link-latency-us",
        type=number(0.0, 1e9),
        metavar="Y",
        help="With --roles, or ranks: how long the first byte takes to another device, in microseconds. (default: 8)",
    )


def link_of(arguments: argparse.Namespace, calibrations: Sequence[Calibration], *, has_roles: bool) -> Link:
    """The link of the flags; `ConfigError` if nothing travels on it."""
    from headway_lab.sim.cost_model import Link
    from headway_lab.sim.setup import check_ranks

    for calibration in calibrations:
        check_ranks(calibration, arguments.tensor_parallel_size)
    given = {
        "gb_s": arguments.link_gb_s,
        "latency_s": None if arguments.link_latency_us is None else 1e-6 * arguments.link_latency_us,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if given and not has_roles and all(calibration.tensor_parallel_size == 1 for calibration in calibrations):
        raise ConfigError(
            "--link-gb-s and --link-latency-us are of the link between replicas with --roles, or between the ranks of "
            "a calibration of several: here nothing travels."
        )
    return Link(**given)


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The given options of the real engine, with those that a shape without weights needs."""
    given = chosen(arguments, engine_flags())
    return with_shape_defaults({name: value for name, value in given.items() if value is not None})


def _embedded_tokenizer() -> Tokenizer:
    from headway.config import ModelConfig
    from headway.loader.chosen_model import load_model_tokenizer

    tokenizer = load_model_tokenizer(ModelConfig())
    assert tokenizer is not None  # the embedded model has one
    return tokenizer
