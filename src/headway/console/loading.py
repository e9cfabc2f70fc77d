"""Starts an engine with a progress bar on the terminal, then prints how its memory is divided.

Everything here is written to stderr, so that stdout has only answers.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from headway.config import EngineConfig
from headway.engine_process.main import spare_the_collector
from headway.progress import meter, showing

if TYPE_CHECKING:
    from headway.engine.llm_engine import LLMEngine


def stderr_console() -> Console:
    """The console for all output that is not an answer."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def load_engine(config: EngineConfig, console: Console, *, quiet: bool = False, warm: bool = False) -> LLMEngine:
    """Build the engine, showing progress, and print the memory plan. With `quiet`, only a bar on a terminal is shown.

    With `warm`, the engine is warmed up as for a server, so that no step is slow because it is the first of its kind.
    """
    started = time.monotonic()
    engine = _load_with_bar(config, console) if console.is_terminal else _load_with_lines(config, is_shown=not quiet)
    if warm:
        engine.warm_up()
    spare_the_collector()
    if not quiet:
        console.print(str(engine.plan), style="dim", markup=False)
        console.print(f"Ready in {time.monotonic() - started:.1f} s.", style="dim")
    return engine


def _load_with_lines(config: EngineConfig, *, is_shown: bool) -> LLMEngine:
    from headway.engine.llm_engine import LLMEngine

    with meter(None, "Loading weights", unit="bytes", is_shown=is_shown) as shown:
        return LLMEngine.from_config(config, progress=shown.at)


def _load_with_bar(config: EngineConfig, console: Console) -> LLMEngine:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with showing(), Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("Starting", total=None)
        from headway.engine.llm_engine import LLMEngine

        def show(done: int, total: int) -> None:
            size = f"{total / 2**20:.0f} MiB"
            bar.update(task, description=f"Loading weights, {size}", completed=done, total=total)

        return LLMEngine.from_config(config, progress=show)


def model_title(config: EngineConfig) -> str:
    """The model's name for headers."""
    from headway.loader.embedded import MODEL_NAME

    return (config.model.model or MODEL_NAME).rstrip("/").rsplit("/", 1)[-1]


def stdin_is_terminal() -> bool:
    """Whether stdin is a terminal; False if there is no stdin."""
    return sys.stdin is not None and sys.stdin.isatty()
