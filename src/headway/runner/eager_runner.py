"""The eager runner: a step runs when it is submitted, with rows in host memory and any device or kernels.

The CPU uses it, and so does a GPU without Triton's kernels. A step's flat batch is gathered from the rows with a
handful of vectorised operations, however many requests run.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headway import native
from headway.attention.base import AttentionBatch
from headway.runner.base import PagedModel, RunnerSettings
from headway.runner.cpu_sampling import CpuSampling
from headway.runner.draft_model import DraftModel
from headway.runner.rows import RowTable, StepRows
from headway.runner.sampler import Int32Array, Sampler, Seat
from headway.runner.step_runner import StepRunner
from headway.transfer.host_blocks import HostBlocks


def create_eager_runner(
    model: PagedModel,
    settings: RunnerSettings,
    *,
    draft: PagedModel | None = None,
    host_blocks: HostBlocks | None = None,
) -> StepRunner[EagerStep]:
    """Build a runner without overlap. If the decoder uses the native kernels, sampling uses them too."""
    rows = RowTable(settings, model.decoder.config.vocab_size)
    stage = EagerStage(model, rows, device=settings.device, block_size=settings.block_size)
    library = native.load() if model.decoder.ops.name == "native" else None
    sampler = Sampler(rows.sampling, CpuSampling(rows.sampling, stage.token_rows, library))
    drafter = None if draft is None else DraftModel(draft, settings, stage=stage.sharing(draft), sampler=sampler)
    return StepRunner(
        model, settings, rows=rows, stage=stage, sampler=sampler, drafter=drafter, host_blocks=host_blocks
    )


@dataclass(frozen=True, slots=True)
class EagerStep:
    """A step's inputs, on the model's device."""

    rows: StepRows
    token_ids: Tensor
    positions: Tensor
    attention: AttentionBatch


class EagerStage:
    """Rows of tokens and block tables in host memory: a `Stage`."""

    num_prepared = 0  # a step prepares nothing for later steps

    def __init__(self, model: PagedModel, rows: RowTable, *, device: torch.device, block_size: int) -> None:
        self._model = model
        self._device = device
        self._block_size = block_size
        # Memory pages are touched only up to the tokens that requests really have, so long limits cost no memory.
        self.token_rows: Int32Array = np.empty((rows.max_num_seqs, rows.max_model_len), dtype=np.int32)
        self.block_table: Int32Array = np.zeros((rows.max_num_seqs, rows.max_num_blocks), dtype=np.int32)

    def sharing(self, model: PagedModel) -> EagerStage:
        """The same rows for another model."""
        other = copy.copy(self)
        other._model = model
        return other

    def seat(self, seats: Sequence[Seat], blocks: Int32Array) -> None:
        """Write the tokens of requests that enter, and their first blocks."""
        for seat in seats:
            prompt, output = seat.request.prompt_token_ids, seat.request.output_token_ids
            self.token_rows[seat.row, : len(prompt)] = prompt
            self.token_rows[seat.row, len(prompt) : len(prompt) + len(output)] = output
        self._append_blocks(blocks)

    def stage(self, step: StepRows, blocks: Int32Array, *, exact: bool) -> EagerStep:
        """Gather the flat batch of a step; there is never any padding."""
        self._append_blocks(blocks)
        if step.drafts is not None:
            given = step.drafts.token_ids >= 0
            rows, positions = step.drafts.rows[given], step.drafts.positions[given]
            self.token_rows[rows, positions] = step.drafts.token_ids[given]
        block_size, device = self._block_size, self._device
        row_of_token = np.repeat(step.rows, step.num_new)
        # A request's tokens end at position seq_lens, and in the flat batch where those of the next request begin.
        positions = np.arange(step.num_tokens) + np.repeat(step.seq_lens - step.query_start[1:], step.num_new)
        token_ids = self.token_rows[row_of_token, positions].astype(np.int64)
        slots = self.block_table[row_of_token, positions // block_size].astype(np.int64) * block_size
        slots += positions % block_size
        return EagerStep(
            rows=step,
            token_ids=torch.from_numpy(token_ids).to(device),
            positions=torch.from_numpy(positions).to(device),
            attention=AttentionBatch(
                num_tokens=step.num_tokens,
                num_requests=step.num_requests,
                max_query_len=step.max_query_len,
                max_seq_len=step.max_seq_len,
                query_start=torch.from_numpy(step.query_start.astype(np.int32)).to(device),
                seq_lens=torch.from_numpy(step.seq_lens.astype(np.int32)).to(device),
                block_table=torch.from_numpy(self.block_table[step.rows, : -(-step.max_seq_len // block_size)]).to(
                    device
                ),
                slot_mapping=torch.from_numpy(slots).to(device),
            ),
        )

    def forward(self, staged: EagerStep) -> Tensor:
        """Logits of the requests that sample."""
        step = staged.rows
        wanted = None if step.all_sample_in_order else torch.from_numpy(step.sample_index).to(self._device)
        hidden = self._run(staged, wanted)
        return self._model.decoder.logits(hidden) if step.sampled else hidden

    def num_padding_tokens(self, staged: EagerStep) -> int:
        """Return 0: there are no graphs."""
        return 0

    def hidden(self, staged: EagerStep) -> Tensor:
        """Hidden states of all tokens."""
        return self._run(staged, None)

    def warm_up(self) -> int:
        """Return 0: no kind of step is slower the first time."""
        return 0

    def _run(self, staged: EagerStep, wanted_rows: Tensor | None) -> Tensor:
        decoder, attention = self._model
        attention.plan(staged.attention)
        return decoder.forward(staged.token_ids, staged.positions, attention, wanted_rows)

    def _append_blocks(self, blocks: Int32Array) -> None:
        self.block_table[blocks[:, 0], blocks[:, 1]] = blocks[:, 2]
