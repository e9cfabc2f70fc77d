"""`--profile FILE`: a trace of some steps and its summary, for every command that steps an engine."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from headway.cli.flags import count
from headway.lab.bench.step_profiler import DEFAULT_NUM_STEPS

if TYPE_CHECKING:
    from rich.console import Console

    from headway.lab.bench.rounds import Step


def add_profile_flags(parser: argparse.ArgumentParser, where: str) -> None:
    """`--profile` and how long it watches."""
    parser.add_argument("--profile", metavar="FILE", help=f"Write a Chrome trace of some steps {where}, and sum it up.")
    parser.add_argument(
        "--profile-steps",
        type=count(1),
        default=DEFAULT_NUM_STEPS,
        metavar="N",
        help=f"How many steps. (default: {DEFAULT_NUM_STEPS})",
    )


def profile_steps(
    step: Step, run: Callable[[Step], object], *, path: str, first_step: int, num_steps: int, console: Console
) -> None:
    """Call `run` with a watched `step`, write the trace to `path` and print its summary."""
    from headway.lab.bench.report import print_summary
    from headway.lab.bench.step_profiler import StepProfiler
    from headway.lab.bench.step_summary import summarise
    from headway.lab.bench.trace_file import parse_trace, write_trace

    profiler = StepProfiler(step, first_step=first_step, num_steps=num_steps)
    run(profiler.step)
    raw = profiler.finish()
    write_trace(path, raw)
    print_summary(console, summarise(parse_trace(raw)))
    console.print(f"wrote {path}; open it in ui.perfetto.dev or chrome://tracing", markup=False)
