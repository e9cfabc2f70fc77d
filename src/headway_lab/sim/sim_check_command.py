"""`headway sim-check`: runs the same work in the real engine and in the simulator, and shows how much they differ."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.config import EngineConfig
from headway.console.flags import add_flags, engine_flags, positive
from headway.console.output_files import check_writable, print_table, write_json, write_text
from headway.errors import ConfigError
from headway.progress import progress_bar
from headway_lab.sim.calibrate_command import add_calibration_flags, calibrate_with_bar
from headway_lab.sim.sim_flags import (
    add_rate_flag,
    add_work_flags,
    draw_work,
    engine_options,
    load_calibration,
    load_work,
)

if TYPE_CHECKING:
    from headway.engine.llm_engine import LLMEngine
    from headway_lab.sim.calibration import Calibration
    from headway_lab.sim.sim_accuracy import Check
    from headway_lab.workload.workload import Workload


_CAPACITY_REQUESTS = 200
_TEMPERATURE = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--load",
        type=positive,
        action="append",
        metavar="X",
        help="A rate, as a fraction of the capacity: what is served when all requests are there at once. May be given "
        "several times. (default: 0.5 and 0.9, unless --rate is given)",
    )
    add_rate_flag(parser)
    parser.add_argument(
        "--check-capacity",
        action="store_true",
        help="Measure the capacity, too: one more run before the others, with all requests there at once.",
    )
    parser.add_argument(
        "--calibration", metavar="FILE", help="A calibration of this engine. Default: calibrate right before each load."
    )
    add_calibration_flags(parser)
    parser.add_argument("--markdown", metavar="FILE", help="Write the tables here.")
    parser.add_argument("--output-json", metavar="FILE", help="Write everything here.")
    parser.add_argument(
        "--save-calibration",
        metavar="FILE",
        help="Write the last calibration here with the errors that were found, beside those it has already, for "
        "'headway sim' to show.",
    )
    add_work_flags(parser)
    add_flags(parser, engine_flags())


def run(arguments: argparse.Namespace) -> int:
    check_writable(arguments.markdown, arguments.output_json, arguments.save_calibration)
    if arguments.load and arguments.rate:
        raise ConfigError("--load and --rate both say how fast requests arrive; give one of them.")
    config = EngineConfig.from_options(**engine_options(arguments))
    workload = load_work(arguments)
    calibration = None if arguments.calibration is None else load_calibration(arguments.calibration)

    from headway.console.loading import load_engine, model_title, stderr_console
    from headway_lab.sim.sim_report import checks_markdown

    engine = load_engine(config, stderr_console(), quiet=True, warm=True)
    session = _Session(arguments, engine, model_title(config), workload, calibration)
    if arguments.check_capacity:
        session.check(rate=math.inf)
    if arguments.rate:
        session.check(rate=arguments.rate)
    for load in [] if arguments.rate else arguments.load or [0.5, 0.9]:
        session.check(load=load)
    calibration, checks = session.calibration, session.checks
    if arguments.markdown is not None:
        write_text(arguments.markdown, checks_markdown(calibration, checks))
    if arguments.output_json is not None:
        found = {"calibration": calibration.as_json(), "checks": [check.as_json() for check in checks]}
        write_json(arguments.output_json, found)
    if arguments.save_calibration is not None:
        verified = {**(calibration.verified or {}), **_verified(checks)}
        dataclasses.replace(calibration, verified=verified).save(arguments.save_calibration)
    return 0


class _Session:
    """Checks of one workload on one engine."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        engine: LLMEngine,
        model: str,
        workload: Workload,
        calibration: Calibration | None,
    ) -> None:
        self._arguments, self._engine, self._model = arguments, engine, model
        self._workload, self._given = workload, calibration
        self.checks: list[Check] = []
        self._last: Calibration | None = self._given

    @property
    def calibration(self) -> Calibration:
        """The calibration that was used last."""
        assert self._last is not None
        return self._last

    def check(self, *, load: float | None = None, rate: float | None = None) -> None:
        """Check at a fraction of the capacity, or at a rate."""
        from headway_lab.sim.setup import check_work
        from headway_lab.sim.sim_accuracy import at_once, check, rate_at_once
        from headway_lab.sim.sim_report import check_title, error_table, speed_note

        arguments, engine = self._arguments, self._engine
        if self._given is None:
            self._last = calibrate_with_bar(engine, model=self._model, seconds=arguments.seconds)
        calibration = self.calibration
        if load is not None:
            rate = load * rate_at_once(engine, calibration, self._draw(None)[:_CAPACITY_REQUESTS])
        work = self._draw(rate)
        check_work(work, calibration.machine())
        is_at_once = rate is not None and math.isinf(rate)
        name = Path(arguments.workload).stem
        with progress_bar(len(work), "real engine") as progress:
            done = check(
                engine,
                calibration,
                at_once(work) if is_at_once else work,
                name=name,
                rate=None if is_at_once else rate,
                load=load,
                temperature=_TEMPERATURE,
                num_warm_up=len(work) // 4 if engine.plan.device.startswith("cuda") else 0,
                progress=progress,
            )
        self.checks.append(done)
        print(check_title(done))
        print_table(*error_table(done))
        print(f"{speed_note(done)}\n")

    def _draw(self, rate: float | None) -> list[Any]:
        engine = self._engine
        return draw_work(
            self._arguments,
            self._workload,
            vocab_size=engine.model_config.vocab_size,
            rate=rate,
            tokenizer=engine.tokenizer,
        )


def _verified(checks: list[Check]) -> dict[str, Any]:
    """The errors that have a promise, by check."""
    from headway_lab.sim.sim_report import check_title

    return {
        check_title(check): {row.key: row.error for row in check.rows if row.tolerance is not None} for check in checks
    }
