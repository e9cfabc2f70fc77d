"""The boundary between decisions and their execution."""

from __future__ import annotations

from typing import Protocol

from headway.core.scheduler_output import ModelRunnerOutput, SchedulerOutput


class Executor(Protocol):
    """Runs planned steps in order. It keeps its own copy of every request in the batch; only changes reach it.

    If `execute` raises, the state of the step's requests is undefined and the engine fails them.
    """

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the scheduled tokens and sample where the plan says so."""
        ...

    def shutdown(self) -> None:
        """Free what the executor holds. Nothing may be executed afterwards."""
        ...
