"""Runs a rank: one of several workers that each have a part of a model and run the same steps.

    start      every rank loads its part and says what it has room for (`Loaded`); rank 0 says what all lay out
    then       rank 0 sends each `Command` to all others and runs it itself; `serve` is what the others do

No result is sent: all ranks choose the same tokens, and rank 0 reads its own.
"""

from __future__ import annotations

import dataclasses
import enum
import pickle
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

from headway.core.kv.moves import BlockMoves
from headway.core.scheduler_output import PendingStep, SchedulerOutput
from headway.errors import ConfigError, HeadwayError
from headway.layers.collectives import Collectives, Meeting
from headway.loader.chosen_model import open_draft, open_model
from headway.models.assembly import Progress
from headway.models.checkpoint import Checkpoint
from headway.runner import UnsampledStep
from headway.structured.guides import TokenMasks
from headway.transfer.host_blocks import SharedSlots
from headway.worker.memory_plan import MemoryPlan
from headway.worker.model_worker import Allocated, ModelWorker
from headway.worker.rank_start import RankStart

# ---- what rank 0 says, and what the others answer -------------------------------------------------------------------


class Submit(NamedTuple):
    """Run a step, or start it."""

    output: SchedulerOutput


class Forward(NamedTuple):
    """Run a step up to the logits."""

    output: SchedulerOutput


class Sample(NamedTuple):
    """Choose the tokens of the last `Forward`."""

    masks: TokenMasks


class Move(NamedTuple):
    """Copy blocks without a step."""

    moves: BlockMoves


class Settle(NamedTuple):
    """Answer when no copy uses these slots any more."""

    slots: tuple[int, ...]


class Signal(enum.Enum):
    """Messages without further content."""

    WARM_UP = enum.auto()
    END = enum.auto()
    # Answers.
    STARTED = enum.auto()
    READY = enum.auto()
    SETTLED = enum.auto()


Command = Submit | Forward | Sample | Move | Settle | Signal


class Loaded(NamedTuple):
    """The message of a rank that has loaded its part."""

    plan: MemoryPlan
    kernels: str


class Layout(NamedTuple):
    """The memory layout of all ranks."""

    plan: MemoryPlan
    part_bytes: tuple[int, ...]
    """The size of each rank's part of a block."""


def agree(ready: Sequence[Loaded], *, num_ranks: int) -> Layout:
    """Return a layout with as many blocks as every rank has room for. Raises `ConfigError` if ranks have different
    kernels, since all choose tokens and must agree."""
    for rank, each in enumerate(ready):
        if each.kernels != ready[0].kernels:
            raise ConfigError(f"rank {rank} has {each.kernels}, and rank 0 {ready[0].kernels}: they would not agree.")
    plans = [each.plan for each in ready]
    plan = dataclasses.replace(
        plans[0],
        num_blocks=min(plan.num_blocks for plan in plans),
        num_host_slots=min(plan.num_host_slots for plan in plans),
        max_model_len=min(plan.max_model_len for plan in plans),
        num_ranks=num_ranks,
    )
    return Layout(plan, tuple(plan.bytes_per_block for plan in plans))


# ---- what every rank does -------------------------------------------------------------------------------------------


class RankWorker:
    """A rank's part of the model."""

    def __init__(
        self,
        start: RankStart,
        collectives: Collectives,
        checkpoint: Checkpoint,
        draft: Checkpoint | None,
        progress: Progress | None = None,
    ) -> None:
        self._start = start
        self._worker = ModelWorker(
            start.config, checkpoint.config, eos_token_ids=start.eos_token_ids, ranks=collectives
        )
        self._worker.load(checkpoint, progress, draft=draft)

    def loaded(self) -> Loaded:
        """Return the plan of the memory left beside the weights, and a description of the kernels."""
        formats = self._worker.formats
        kernels = (
            f"{formats}, {formats.kernels} kernels, {formats.attention_backend} attention, "
            f"{formats.kv_format.name} cache"
        )
        return Loaded(self._worker.plan(self._worker.profile()), kernels)

    def allocate(self, layout: Layout) -> Allocated:
        """Lay out the KV cache as all ranks do."""
        start = self._start
        shared = None if start.slots < 0 else SharedSlots(start.slots, layout.part_bytes, start.rank)
        return self._worker.allocate(layout.plan, shared)


def serve(start: RankStart, connection: Connection, meeting: Meeting | None) -> None:
    """Load the rank's part, then run rank 0's commands until it ends."""
    try:
        start.choose_device()
        collectives = start.join(meeting)
        checkpoint, draft = open_model(start.config.model), open_draft(start.config.model)
        worker = RankWorker(start, collectives, checkpoint, draft)
        connection.send(worker.loaded())
        ready = worker.allocate(connection.recv())
        connection.send(Signal.READY)
    except HeadwayError as error:
        connection.send(error)
        raise
    _run_steps(ready, connection, max_in_flight=start.max_in_flight)
    ready.runner.shutdown()
    collectives.close()


def _run_steps(ready: Allocated, connection: Connection, *, max_in_flight: int) -> None:
    runner, transfers = ready.runner, ready.transfers
    pending: deque[PendingStep] = deque()
    forwarded: UnsampledStep | None = None

    def make_room() -> None:
        """No more steps may be in flight than on rank 0."""
        while len(pending) >= max_in_flight:
            pending.popleft().result()

    while True:
        command: Command = pickle.loads(connection.recv_bytes())
        match command:
            case Submit(output):
                make_room()
                pending.append(runner.submit(output))
            case Forward(output):
                make_room()
                forwarded = runner.forward(output)
            case Sample(masks):
                assert forwarded is not None
                pending.append(forwarded.sample(masks))
                forwarded = None
            case Move(moves):
                runner.move(moves)
            case Settle(slots):
                assert transfers is not None
                transfers.slots.settle(slots)
                connection.send(Signal.SETTLED)
            case Signal.WARM_UP:
                runner.warm_up()
            case Signal.END:
                return
