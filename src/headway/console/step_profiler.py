"""`--profile FILE`: a window of the engine's steps in torch's profiler, host spans and kernels on one time line.

profiler = StepProfiler(engine.step, first_step=100, num_steps=30)
... call profiler.step() wherever engine.step() was called ...
raw = profiler.finish()
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.console.flags import count
from headway.console.step_trace import SPAN_PREFIX, STEP_SPAN, move_spans
from headway.errors import HeadwayError
from headway.tracing import Recorder, record_into, span

if TYPE_CHECKING:
    from rich.console import Console

    from headway.engine.step_report import EngineStep


Step = Callable[[], "EngineStep"]
"""One step of the engine, or of a profiler or meter around it."""

WARMUP_STEPS = 3
"""Profiled steps before the window that are discarded, because a profiler's first steps are slower."""
DEFAULT_NUM_STEPS = 30
LATEST_FIRST_STEP = 50
"""The first step of the window if the length of the run is not known."""
_QUIET_LOG_LEVEL = "99"


class StepProfiler:
    """Replaces `engine.step`. Outside its window it costs one comparison."""

    def __init__(self, step: Step, *, first_step: int, num_steps: int = DEFAULT_NUM_STEPS) -> None:
        self._step = step
        self._first_step = max(1, first_step)
        self._last_step = self._first_step + num_steps - 1
        self._start_step = max(0, self._first_step - WARMUP_STEPS)
        self._index = 0
        self._profile: Any = None
        self._recorder = Recorder(annotate=_annotation)
        self._exported: dict[str, Any] | None = None

    def step(self) -> EngineStep:
        """One step of the engine, recorded inside the window."""
        index = self._index
        self._index += 1
        if not self._start_step <= index <= self._last_step:
            return self._step()
        if index == self._start_step:
            self._start()
        if index == self._first_step:
            record_into(self._recorder)
        try:
            with span(STEP_SPAN, index=index):
                step = self._step()
        except BaseException:
            self._stop()
            raise
        if index == self._last_step:
            self._stop()
        else:
            self._profile.step()
        return step

    def finish(self) -> dict[str, Any]:
        """The trace, as JSON for `write_trace`. Raises an error if the run ended before the window began."""
        if self._profile is not None:
            self._stop()
        if self._exported is None or not self._recorder.spans:
            raise HeadwayError(
                f"There is no profile: it would have begun at step {self._first_step}, but the run had only "
                f"{self._index} steps. Give it more to do."
            )
        return move_spans(self._exported, self._recorder.spans)

    def _start(self) -> None:
        # The profiler's library otherwise writes a line to stderr at each start and stop.
        os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET_LOG_LEVEL)
        from torch.profiler import profile, schedule

        self._profile = profile(
            schedule=schedule(
                wait=0,
                warmup=self._first_step - self._start_step,
                active=self._last_step - self._first_step + 1,
                repeat=1,
            ),
            on_trace_ready=self._export,
        )
        self._profile.start()

    def _stop(self) -> None:
        """Close the window. Kernels that are still running belong to its last step."""
        import torch

        record_into(None)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.stop()
        self._profile = None

    def _export(self, profile: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            self._exported = json.loads(path.read_text(encoding="utf-8"))


def first_step_of(num_expected_steps: int) -> int:
    """The first step of the window in a run of this many steps: a third into the run."""
    return num_expected_steps // 3


def _annotation(name: str) -> Any:
    from torch.profiler import record_function

    return record_function(SPAN_PREFIX + name)


def add_profile_flags(parser: argparse.ArgumentParser, where: str) -> None:
    """Add `--profile` and the flag for the number of profiled steps."""
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
    """Call `run` with a profiled `step`, write the trace to `path` and print its summary."""
    from headway.console.step_summary import print_summary
    from headway.console.step_trace import parse_trace, summarise, write_trace

    profiler = StepProfiler(step, first_step=first_step, num_steps=num_steps)
    run(profiler.step)
    raw = profiler.finish()
    write_trace(path, raw)
    print_summary(console, summarise(parse_trace(raw)))
    console.print(f"wrote {path}; open it in ui.perfetto.dev or chrome://tracing", markup=False)
