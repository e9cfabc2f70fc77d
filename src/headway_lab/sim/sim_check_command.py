"""`headway sim-check`: runs the same work in the real engine and in the simulator, and shows how much they differ."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.config import EngineConfig
from headway.console.flags import add_flags, engine_flags, number, positive
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
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="'NAME OPTION=VALUE …'",
        help="Check an engine with these options, besides those of the command, e.g. 'fp8 quantization=fp8'. May be "
        "given several times: each variant is loaded, calibrated and checked by itself, and one table shows all.",
    )
    parser.add_argument(
        "--temperature",
        type=number(0.0, 10.0),
        default=_TEMPERATURE,
        metavar="T",
        help="Of all requests. At 0 a model repeats itself, which guesses of --speculation ngram live on. "
        "(default: %(default)g)",
    )
    parser.add_argument("--markdown", metavar="FILE", help="Write the tables here.")
    parser.add_argument("--output-json", metavar="FILE", help="Write everything here.")
    parser.add_argument(
        "--save-calibration",
        metavar="FILE",
        help="Write the last calibration here with the errors that were found, beside those it has already, for "
        "'headway sim' to show. With several variants, {variant} in the name stands for theirs.",
    )
    add_work_flags(parser)
    add_flags(parser, engine_flags())


def run(arguments: argparse.Namespace) -> int:
    from headway_lab.sim.sim_variants import errors_table, file_of, parse_variants

    if arguments.load and arguments.rate:
        raise ConfigError("--load and --rate both say how fast requests arrive; give one of them.")
    variants = parse_variants(arguments.variant)
    saved = {one.name: file_of(arguments.save_calibration, one, num_variants=len(variants)) for one in variants}
    check_writable(arguments.markdown, arguments.output_json, *saved.values())
    if arguments.calibration is not None and len(variants) > 1:
        raise ConfigError("--calibration is that of one engine: leave it out, and each variant is calibrated.")
    options = engine_options(arguments)
    configs = {one.name: EngineConfig.from_options(**{**options, **one.options}) for one in variants}
    workload = load_work(arguments)
    calibration = None if arguments.calibration is None else load_calibration(arguments.calibration)
    sessions = {}
    for name, config in configs.items():
        sessions[name] = _check_engine(arguments, config, workload, calibration, name)
        if (path := saved[name]) is not None:
            sessions[name].save(path)
    checks = [check for session in sessions.values() for check in session.checks]
    tables = {
        "Errors": errors_table(checks),
        "Errors at the measured speed of the machine": errors_table(checks, at_measured_speed=True),
    }
    for title, table in tables.items() if len(variants) > 1 else ():
        print(title)
        print_table(*table)
        print()
    _write(arguments, sessions, tables)
    return 0


def _check_engine(
    arguments: argparse.Namespace,
    config: EngineConfig,
    workload: Workload,
    calibration: Calibration | None,
    name: str,
) -> _Session:
    """Load an engine, check it, and free its memory."""
    from headway.console.loading import load_engine, model_title, stderr_console

    engine = load_engine(config, stderr_console(), quiet=True, warm=True)
    session = _Session(arguments, engine, model_title(config), workload, calibration, name)
    try:
        if arguments.check_capacity:
            session.check(rate=math.inf)
        if arguments.rate:
            session.check(rate=arguments.rate)
        for load in [] if arguments.rate else arguments.load or [0.5, 0.9]:
            session.check(load=load)
    finally:
        engine.shutdown()
    return session


def _write(
    arguments: argparse.Namespace,
    sessions: Mapping[str, _Session],
    tables: Mapping[str, tuple[list[str], list[list[str]]]],
) -> None:
    """Write what --markdown and --output-json ask for."""
    from headway_lab.sim.sim_report import checks_markdown, markdown_table

    if arguments.markdown is not None:
        pages = [checks_markdown(one.calibration, one.checks, name=name) for name, one in sessions.items()]
        summary = ["# Simulated against measured, all variants", ""]
        for title, table in tables.items():
            summary += [f"## {title}", "", *markdown_table(table), ""]
        write_text(arguments.markdown, "\n".join([*summary, *pages] if len(pages) > 1 else pages))
    if arguments.output_json is not None:
        found = [
            {
                **({"variant": name} if name else {}),
                "calibration": session.calibration.as_json(),
                "checks": [check.as_json() for check in session.checks],
            }
            for name, session in sessions.items()
        ]
        write_json(arguments.output_json, found[0] if len(found) == 1 else {"variants": found})


class _Session:
    """Checks of one workload on one engine."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        engine: LLMEngine,
        model: str,
        workload: Workload,
        calibration: Calibration | None,
        name: str = "",
    ) -> None:
        """`name`: that of the variant, if there are several."""
        self._arguments, self._engine, self._model, self._name = arguments, engine, model, name
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
            self._last = calibrate_with_bar(
                engine, model=self._model, seconds=arguments.seconds, temperature=arguments.temperature
            )
        calibration = self.calibration
        if load is not None:
            rate = load * rate_at_once(engine, calibration, self._draw(None)[:_CAPACITY_REQUESTS])
        work = self._draw(rate)
        check_work(work, calibration.machine())
        is_at_once = rate is not None and math.isinf(rate)
        name = ", ".join(filter(None, [self._name, Path(arguments.workload).stem]))
        with progress_bar(len(work), "real engine") as progress:
            done = check(
                engine,
                calibration,
                at_once(work) if is_at_once else work,
                name=name,
                rate=None if is_at_once else rate,
                load=load,
                temperature=arguments.temperature,
                num_warm_up=len(work) // 4 if engine.plan.device.startswith("cuda") else 0,
                progress=progress,
            )
        self.checks.append(done)
        print(check_title(done))
        print_table(*error_table(done))
        print(f"{speed_note(done)}\n")

    def save(self, path: str) -> None:
        """Write the last calibration, with the errors that were found."""
        verified = {**(self.calibration.verified or {}), **_verified(self.checks)}
        dataclasses.replace(self.calibration, verified=verified).save(path)

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
