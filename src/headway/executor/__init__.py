"""What runs a step, the boundary between decisions and their execution: one small protocol, several implementations.

Steps run in the order of submission; a block freed after step n was submitted may be given to another request in
step n+1. An executor that runs steps on a device queues them there one behind the other, so that whatever step n reads
has been read before step n+1 writes over it; no result is waited for before memory changes hands.
"""

from __future__ import annotations

from typing import Protocol

from headway.core.kv.moves import BlockMoves
from headway.core.scheduler_output import ModelRunnerOutput, PendingStep, SchedulerOutput
from headway.runner.base import UnsampledStep
from headway.transfer.block_store import BlockTransfers

__all__ = ["Executor", "FailedStep", "MaskedExecutor", "PendingStep", "UnsampledStep"]


class Executor(Protocol):
    """Runs planned steps in order. It keeps its own copy of every request in the batch; only changes reach it.

    A plan never names the token that the step before it samples: the executor appends each sampled token to its own
    copy, and the next plan only says how many tokens to compute. If `submit` or `result` raises, the state of the
    step's requests is undefined and the engine fails them.
    """

    max_in_flight: int
    """Submitted steps whose results have not been taken. 1: a step is planned when the one before has answered;
    2: it is planned while the one before runs."""
    verifies_ahead: bool
    """As in `Runner`."""
    transfers: BlockTransfers | None
    """What fetches and stores blocks beside the steps, if anything does."""

    def submit(self, output: SchedulerOutput) -> PendingStep:
        """Start to compute the scheduled tokens and to sample where the plan says so. The plan is not empty."""
        ...

    def move(self, moves: BlockMoves) -> None:
        """Make the copies of these moves without a step, behind those that are in flight."""
        ...

    def warm_up(self) -> int:
        """Do now what would make a first step of its kind slow, while nothing is in flight. Returns for how many kinds
        of steps there was something to do."""
        ...

    def shutdown(self) -> None:
        """Free what the executor holds. Nothing may be submitted afterwards."""
        ...


class MaskedExecutor(Executor, Protocol):
    """An executor whose requests can be guided; see `headway.executor.guided`."""

    def forward(self, output: SchedulerOutput) -> UnsampledStep:
        """Start to compute the scheduled tokens, up to the logits. Tokens are chosen when the masks are there; nothing
        may be submitted before."""
        ...


class FailedStep:
    """Takes the place of a step that could not be submitted, sampled or waited for, until it is its turn to fail."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def result(self) -> ModelRunnerOutput:
        """Raise what went wrong; an interruption as an error of the step."""
        if isinstance(self._error, Exception):
            raise self._error
        raise InterruptedError(f"the step was interrupted by {type(self._error).__name__}")
