"""What a rank does with rank 0's commands, and what all ranks agree on, without processes."""

from __future__ import annotations

import pickle
import socket
import threading
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headway.core import SchedulerOutput
from headway.core.kv.moves import NO_MOVES
from headway.errors import ConfigError
from headway.structured.guides import TokenMasks
from headway.worker import rank
from headway.worker.model_worker import Allocated
from headway.worker.rank import Command, Forward, Loaded, Move, Sample, Settle, Signal, Submit
from tests.unit.no_model import nominal_plan

MASKS = TokenMasks((), (), np.empty((0, 1), dtype=np.uint32))


class FakeRunner:
    """Writes down what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        slots = SimpleNamespace(settle=lambda slots: self.calls.append(f"settle {slots}"))
        self.transfers: Any = SimpleNamespace(slots=slots)

    def _step(self, name: str) -> Any:
        self.calls.append(name)
        result = SimpleNamespace(result=lambda: self.calls.append(f"result of {name}"))
        return SimpleNamespace(result=result.result, sample=lambda masks: self._step(f"sample after {name}"))

    def submit(self, output: SchedulerOutput) -> Any:
        return self._step(f"submit {output.step_id}")

    def forward(self, output: SchedulerOutput) -> Any:
        return self._step(f"forward {output.step_id}")

    def move(self, moves: object) -> None:
        self.calls.append("move")

    def warm_up(self) -> None:
        self.calls.append("warm up")


def calls(*commands: Command, max_in_flight: int = 2) -> tuple[list[str], list[object]]:
    """What a runner is asked for, and the answers."""
    left, right = socket.socketpair()
    ours, theirs, runner = Connection(left.detach()), Connection(right.detach()), FakeRunner()
    ready = Allocated(nominal_plan(num_blocks=1, block_size=4, max_model_len=64), runner, runner.transfers)
    run = threading.Thread(target=rank._run_steps, args=(ready, theirs), kwargs={"max_in_flight": max_in_flight})
    with ours, theirs:
        run.start()
        for command in (*commands, Signal.END):
            ours.send_bytes(pickle.dumps(command))
        run.join(10)
        assert not run.is_alive()
        answers = []
        while ours.poll():
            answers.append(ours.recv())
    return runner.calls, answers


def test_a_rank_runs_the_commands_in_their_order() -> None:
    done, answers = calls(
        Signal.WARM_UP,
        Submit(SchedulerOutput.empty(0)),
        Move(NO_MOVES),
        Forward(SchedulerOutput.empty(1)),
        Sample(MASKS),
        Settle((3, 4)),
    )
    assert done == ["warm up", "submit 0", "move", "forward 1", "sample after forward 1", "settle (3, 4)"]
    assert answers == [Signal.SETTLED], "nothing else is answered"


def test_no_more_steps_are_in_flight_than_on_rank_zero() -> None:
    done, _ = calls(*(Submit(SchedulerOutput.empty(number)) for number in range(3)), max_in_flight=1)
    assert done == ["submit 0", "result of submit 0", "submit 1", "result of submit 1", "submit 2"]


def loaded(num_blocks: int, kernels: str = "native") -> Loaded:
    return Loaded(nominal_plan(num_blocks=num_blocks, block_size=4, max_model_len=64), kernels)


def test_ranks_agree_on_what_the_smallest_has_room_for() -> None:
    layout = rank.agree([loaded(9), loaded(7), loaded(8)], num_ranks=3)
    assert (layout.plan.num_blocks, layout.plan.num_ranks, layout.part_bytes) == (7, 3, (1, 1, 1))
    with pytest.raises(ConfigError, match="rank 1 has torch, and rank 0 native"):
        rank.agree([loaded(9), loaded(9, "torch")], num_ranks=2)
