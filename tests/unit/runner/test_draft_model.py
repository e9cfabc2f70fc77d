"""Which tokens a draft model computes, beside a stage that only notes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from headway.core.scheduler_output import NewRequest, ScheduledRequest, SchedulerOutput
from headway.runner.base import RunnerSettings
from headway.runner.draft_model import DraftModel
from headway.runner.rows import RowTable, StepRows
from headway.sampling_params import SamplingParams


class NotingStage:
    def __init__(self) -> None:
        self.computed: list[tuple[int, int]] = []

    def stage(self, step: StepRows, blocks: Any, *, exact: bool) -> StepRows:
        self.computed += zip((step.seq_lens - step.num_new).tolist(), step.seq_lens.tolist(), strict=True)
        return step

    def forward(self, step: StepRows) -> torch.Tensor:
        return torch.zeros(len(step.sample_index), 4)


class NoSampler:
    def guess(self, *_: object) -> None:
        pass


def test_wrong_guesses_are_computed_again() -> None:
    """Also after steps without guesses, in which the request went on past them."""
    settings = RunnerSettings(torch.device("cpu"), 2, 64, 64, 4)
    rows, stage = RowTable(settings, 100), NotingStage()
    model: DraftModel[Any] = DraftModel(None, settings, stage=stage, sampler=NoSampler())  # type: ignore[arg-type]
    model.seat(rows.seat([NewRequest("r", tuple(range(10)), (), SamplingParams())]))

    def run(num_computed: int, num_tokens: int, num_guesses: int) -> list[tuple[int, int]]:
        share = ScheduledRequest("r", num_tokens, num_computed, (), True, (-1,) * num_guesses)
        stage.computed.clear()
        model.run(rows.step(SchedulerOutput(0, (), (share,), (), (), num_tokens)), np.zeros((0, 3), dtype=np.int32))
        return stage.computed.copy()

    assert run(0, 10, 0) == [(0, 10)]  # the prompt; token 10 is sampled
    assert run(10, 5, 4) == [(10, 11), (11, 12), (12, 13), (13, 14)]  # all right: 15 is sampled
    assert run(15, 5, 4) == [(14, 16), (16, 17), (17, 18), (18, 19)]  # none right: 16 is another
    for place in range(16, 20):
        assert run(place, 1, 0) == []
    assert run(20, 2, 1) == [(16, 21)]
