"""Runs one model over several workers, each with a part of every layer (tensor parallel).

    rank 0        this process: the engine's own thread
    rank 1 ...    separate processes, or threads in tests (`rank_peers`); `headway.worker.rank` is what they do

Each step's plan is sent to all ranks once; they compute and sum (`layers/collectives.py`), and all of them choose the
same tokens, so no token is ever sent. Only rank 0's are read. Ranks have the same rows and the same blocks, each with
its own heads in them. What is outside the engine (a folder of blocks) is rank 0's affair: the others only say when
none of their copies has to do with a slot any more.

A rank that fails in any way ends, and a silent one is killed (`headway.worker.rank_life`). The others would wait for
it, so the whole engine has then failed: `EngineDeadError` names the rank, and the front end restarts the engine.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

import torch

from headway.core.kv.moves import BlockMoves
from headway.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from headway.errors import EngineDeadError, HeadwayError
from headway.executor import PendingStep, UnsampledStep
from headway.executor.rank_peers import Peers, start_peers
from headway.models.assembly import Progress
from headway.models.checkpoint import Checkpoint
from headway.models.decoder_config import Shard
from headway.runner import Runner
from headway.structured.guides import TokenMasks
from headway.transfer.block_store import BlockTransfers, Slots
from headway.worker.rank import Command, Forward, Move, RankWorker, Sample, Settle, Signal, Submit, agree
from headway.worker.rank_start import RankStart

if TYPE_CHECKING:
    from headway.transfer.block_store import Slot

logger = logging.getLogger(__name__)

_NAME_S = 2.0  # that a dead rank gets to be noticed, when a sum has failed
_Result = TypeVar("_Result")


class RanksExecutor:
    """The `Executor` of rank 0, which also commands the other ranks."""

    def __init__(self, start: RankStart, checkpoint: Checkpoint, draft: Checkpoint | None, progress: Progress | None):
        Shard.of(checkpoint.config, 0, start.size)  # refuses before a process is started
        self._lost: str | None = None
        self._is_shut_down = False
        memory = start.join(None) if start.collectives == "shared-memory" else None  # there before others look for it
        self._peers = start_peers(start, self._note_lost)
        try:
            self._collectives = memory or start.join(self._peers.meeting)
            worker = RankWorker(start, self._collectives, checkpoint, draft, progress)
            layout = agree([worker.loaded(), *self._peers.receive()], num_ranks=start.size)
            self._peers.send(layout)
            ready = worker.allocate(layout)
            self.plan, self._runner = ready.plan, ready.runner
            self._peers.receive()
            self._peers.note_ready()
        except BaseException as error:
            self._peers.kill()
            if isinstance(error, Exception) and not isinstance(error, HeadwayError):
                raise EngineDeadError(
                    f"{start.size} ranks could not be made ready: {error!r}. {self._lost or ''}"
                ) from error
            raise
        self.max_in_flight = start.max_in_flight
        self.transfers: BlockTransfers | None = None
        if ready.transfers is not None and ready.transfers.disk is not None:
            slots = _RankedSlots(ready.transfers.slots, self._peers)
            self.transfers = BlockTransfers(slots, disk=ready.transfers.disk)
        self.verifies_ahead = self._runner.verifies_ahead
        # Each thread has a current device of its own; steps belong to that of the thread that loads the model.
        self._cuda_device = torch.cuda.current_device() if start.config.device.kind == "cuda" else None

    def submit(self, output: SchedulerOutput) -> PendingStep:
        """Run a step on all ranks, or start it."""
        return _RankedStep(self, self._run(Submit(output), lambda runner: runner.submit(output)))

    def forward(self, output: SchedulerOutput) -> UnsampledStep:
        """Run a step on all ranks, or start it, up to the logits."""
        return _RankedForward(self, self._run(Forward(output), lambda runner: runner.forward(output)))

    def move(self, moves: BlockMoves) -> None:
        """Copy blocks without a step, on all ranks."""
        self._run(Move(moves), lambda runner: runner.move(moves))

    def warm_up(self) -> int:
        """Prepare, on all ranks, what would slow down the first steps."""
        if self._is_shut_down:
            return 0
        return self._run(Signal.WARM_UP, lambda runner: runner.warm_up())

    def shutdown(self) -> None:
        """End the other ranks, and drop the model and its cache."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        if self.transfers is not None:
            self.transfers.close()
            self.transfers = None
        self._peers.end()
        self._runner.shutdown()
        with contextlib.suppress(Exception):
            self._collectives.close()

    def sample(self, step: UnsampledStep, masks: TokenMasks) -> PendingStep:
        """Choose the tokens of the last `forward`, on all ranks."""
        return _RankedStep(self, self._run(Sample(masks), lambda _: step.sample(masks)))

    def result(self, pending: PendingStep) -> ModelRunnerOutput:
        """Wait for rank 0's result, which includes the other ranks' parts."""
        try:
            result = pending.result()
            if self._lost is not None:  # what it was to add is missing
                raise EngineDeadError(self._lost)
            return result
        except Exception as error:
            dead = self._failed(error)
            raise dead from dead.__cause__

    def _run(self, command: Command, run: Callable[[Runner], _Result]) -> _Result:
        """Run a command on the other ranks and on this one. Raises `EngineDeadError` if a rank is lost."""
        if self._is_shut_down:
            raise RuntimeError("the executor is shut down")
        if self._lost is not None:
            raise EngineDeadError(self._lost)
        if self._cuda_device is not None and torch.cuda.current_device() != self._cuda_device:
            torch.cuda.set_device(self._cuda_device)
        try:
            self._peers.send(command)
            return run(self._runner)
        except Exception as error:
            dead = self._failed(error)
            raise dead from dead.__cause__

    def _failed(self, error: Exception) -> EngineDeadError:
        """End all ranks after a failure and return the error to raise. It names the rank that died first, if one did;
        the error of rank 0, which waited for that one, is then of no interest."""
        self._peers.await_deaths(_NAME_S)
        self._peers.kill()
        cause = None if self._lost is not None else error
        if self._lost is None:
            self._lost = f"rank 0 failed: {type(error).__name__}: {error}"
        dead = EngineDeadError(f"A step over {self._peers.size} ranks failed, and the engine with it: {self._lost}.")
        dead.__cause__ = cause
        return dead

    def _note_lost(self, what: str) -> None:
        """Note that a rank has ended unexpectedly. Called by the thread that watches it."""
        if self._lost is None and not self._is_shut_down:
            self._lost = what
            logger.error("%s; the engine ends", what)
        if hasattr(self, "_collectives"):
            self._collectives.abort()


class _RankedStep:
    def __init__(self, executor: RanksExecutor, pending: PendingStep) -> None:
        self._executor = executor
        self._pending = pending

    def result(self) -> ModelRunnerOutput:
        return self._executor.result(self._pending)


class _RankedForward:
    def __init__(self, executor: RanksExecutor, step: UnsampledStep) -> None:
        self._executor = executor
        self._step = step

    def sample(self, masks: TokenMasks) -> PendingStep:
        return self._executor.sample(self._step, masks)


class _RankedSlots:
    """The slots of all ranks: `Slots`."""

    def __init__(self, own: Slots, peers: Peers) -> None:
        self._own = own
        self._peers = peers

    def bytes_of(self, slot: int) -> Slot:
        return self._own.bytes_of(slot)

    def settle(self, slots: Iterable[int]) -> None:
        """Wait for the copies on all ranks, after all earlier commands."""
        settled = tuple(slots)
        self._peers.send(Settle(settled))
        self._own.settle(settled)
        self._peers.receive()
