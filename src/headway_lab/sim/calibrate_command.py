"""`headway calibrate`: measures what steps cost on this machine and writes it down for `headway sim` and `tune`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from headway.config import EngineConfig
from headway.console.flags import add_flags, engine_flags, positive
from headway.console.output_files import check_writable, print_table
from headway.errors import ConfigError
from headway.progress import meter
from headway_lab.sim.sim_flags import engine_options

if TYPE_CHECKING:
    from headway.engine.llm_engine import LLMEngine
    from headway_lab.sim.calibration import Calibration


DEFAULT_OUTPUT = "calibration.json"
_SECONDS = 40.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", "-o", default=DEFAULT_OUTPUT, metavar="FILE", help="Where it goes. (default: %(default)s)"
    )
    add_calibration_flags(parser)
    add_flags(parser, engine_flags())


def add_calibration_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds",
        type=positive,
        default=_SECONDS,
        metavar="S",
        help="How long to measure, once the model is loaded. Longer is more exact. (default: %(default)g)",
    )


def run(arguments: argparse.Namespace) -> int:
    check_writable(arguments.output)
    config = EngineConfig.from_options(**engine_options(arguments))
    if config.device.tensor_parallel_size > 1 and config.device.collectives != "none":
        raise ConfigError(
            "Of several ranks one is measured alone, and the simulator adds what travels between them: give "
            "--collectives none."
        )

    from headway.console.loading import load_engine, model_title, stderr_console

    engine = load_engine(config, stderr_console(), quiet=True, warm=True)
    calibration = calibrate_with_bar(engine, model=model_title(config), seconds=arguments.seconds)
    calibration.save(arguments.output)
    print_calibration(calibration)
    print(f"\nWrote {arguments.output}; 'headway sim --calibration {arguments.output} --workload WORKLOAD' uses it.")
    return 0


def calibrate_with_bar(engine: LLMEngine, *, model: str, seconds: float, temperature: float = 1.0) -> Calibration:
    """Calibrate, and show the progress."""
    from headway_lab.sim.calibration_run import calibrate

    with meter(1.0, "Calibrating") as shown:
        return calibrate(engine, model=model, seconds=seconds, temperature=temperature, progress=shown)


def print_calibration(calibration: Calibration) -> None:
    from headway_lab.sim.sim_report import calibration_facts, fit_rows

    facts = calibration_facts(calibration)
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")
    print(f"\nThe cost model on steps that it was not fitted to (of {calibration.cost.num_steps:,}):")
    print_table(*fit_rows(calibration))
