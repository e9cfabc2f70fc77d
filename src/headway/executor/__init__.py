"""Executors run the steps that the scheduler plans: one small protocol with several implementations.

Steps run in the order of submission. A block freed after step n was submitted may be given to another request in step
n+1. An executor on a device queues its steps in this order, so step n has read its blocks before step n+1 overwrites
them, and memory can be reused without waiting for results.
"""

from __future__ import annotations

from typing import Protocol

from headway.core.kv.moves import BlockMoves
from headway.core.scheduler_output import ModelRunnerOutput, PendingStep, SchedulerOutput
from headway.runner.base import UnsampledStep
from headway.transfer.block_store import BlockTransfers

__all__ = ["Executor", "FailedStep", "MaskedExecutor", "PendingStep", "UnsampledStep"]


class Executor(Protocol):
    """Runs planned steps in order. It keeps a copy of every request in the batch, and plans only contain changes.

    A plan never contains the token that the previous step samples: the executor appends each sampled token to its copy,
    and the next plan only says how many tokens to compute. If `submit` or `result` raises, the state of the step's
    requests is undefined and the engine fails them.
    """

    max_in_flight: int
    """The largest number of submitted steps whose results have not been taken. 1: a step is planned after the previous
    result; 2: it is planned while the previous step runs."""
    verifies_ahead: bool
    """Whether a step may be submitted before the previous one's drafts are verified; see `Runner`."""
    transfers: BlockTransfers | None
    """The transfers that fetch and store blocks while steps run, if there are any."""

    def submit(self, output: SchedulerOutput) -> PendingStep:
        """Start to compute the scheduled tokens and to sample where the plan says so. The plan is not empty."""
        ...

    def move(self, moves: BlockMoves) -> None:
        """Make the copies of these moves without a step, after the steps in flight."""
        ...

    def warm_up(self) -> int:
        """Do the work that would make the first step of each kind slow. Nothing may be in flight. Returns how many
        kinds of steps were prepared."""
        ...

    def shutdown(self) -> None:
        """Free what the executor holds. Nothing may be submitted afterwards."""
        ...


class MaskedExecutor(Executor, Protocol):
    """An executor that supports guided requests; see `headway.executor.guided`."""

    def forward(self, output: SchedulerOutput) -> UnsampledStep:
        """Start to compute the scheduled tokens, up to the logits. Tokens are sampled later, when the masks are ready.
        Nothing may be submitted before that."""
        ...


class FailedStep:
    """Stands for a step that could not be submitted, sampled or waited for, until its result is asked for."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def result(self) -> ModelRunnerOutput:
        """Raise the step's error. An interruption is raised as an `InterruptedError`."""
        if isinstance(self._error, Exception):
            raise self._error
        raise InterruptedError(f"the step was interrupted by {type(self._error).__name__}")
