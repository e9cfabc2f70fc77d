"""The draft model: a second, smaller model that reads the same rows and keeps its KV cache in the same blocks.

    block table of a row     [ 7 3 12 ]   block 3 has the tokens' keys and values in the layers of both models

So whatever happens to blocks (a prefix is shared, a request is moved to the host or copied) happens for both models.
Before each step of the main model, this model computes

    the same prefill chunks                 so that it has the context that it will continue
    tokens added since its last step        for requests that will verify drafts: usually one token or two
    the drafts, one after the other         with the noise that will be used to sample that position, so that two
                                            models which agree draw the same token

and writes the drafts after the tokens of their rows, where the main model's step verifies them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from headway.runner.base import PagedModel, RunnerSettings
from headway.runner.rows import Stage, StagedStep, StepRows
from headway.runner.sampler import Int32Array, Int64Array, Sampler, Seat

NO_BLOCKS: Int32Array = np.zeros((0, 3), dtype=np.int32)


class DraftModel(Generic[StagedStep]):
    """The draft model, the stage its steps run on, and how many tokens it has computed in each row."""

    def __init__(
        self, model: PagedModel, settings: RunnerSettings, *, stage: Stage[StagedStep], sampler: Sampler
    ) -> None:
        """`stage` and `sampler` share their rows with those of the main model."""
        max_num_seqs = settings.max_num_seqs
        self.model = model
        self.stage = stage
        self._sampler = sampler
        self._max_num_tokens = settings.max_num_batched_tokens
        self._num_computed: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_admitted: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)  # tokens that requests entered with

    def seat(self, seats: Sequence[Seat]) -> None:
        """Admit requests. The draft model has also computed a cached prompt, but perhaps not a cached answer."""
        for seat in seats:
            num_prompt_tokens = len(seat.request.prompt_token_ids)
            self._num_computed[seat.row] = min(seat.request.num_computed_tokens, num_prompt_tokens)
            self._num_admitted[seat.row] = num_prompt_tokens + len(seat.request.output_token_ids)

    def run(self, step: StepRows, blocks: Int32Array) -> Int32Array:
        """Compute and draft what the step needs. Returns the blocks that must still be added to the block tables."""
        rows, ends, num_guesses = self._guessing(step)
        begins = step.seq_lens - step.num_new
        np.minimum.at(self._num_computed, step.rows, begins)  # later tokens may be rejected drafts
        is_prompt = begins < self._num_admitted[step.rows]
        all_rows = np.concatenate([step.rows[is_prompt], rows])
        if not len(all_rows):
            return blocks
        all_ends = np.concatenate([step.seq_lens[is_prompt], ends])
        first = np.minimum(self._num_computed[all_rows], all_ends - 1)
        guesses = np.arange(len(all_rows)) >= len(all_rows) - len(rows)
        self._num_computed[all_rows] = all_ends
        for part in self._parts(all_ends - first):
            self._step(all_rows[part], first[part], all_ends[part], guesses[part], 0, blocks)
            blocks = NO_BLOCKS
        for offset in range(1, int(num_guesses.max(initial=0))):
            more = num_guesses > offset
            self._step(rows[more], ends[more] + offset - 1, ends[more] + offset, more[more], offset, NO_BLOCKS)
            self._num_computed[rows[more]] = ends[more] + offset
        return NO_BLOCKS

    def _parts(self, num_new: Int64Array) -> list[Int64Array]:
        """Group requests into steps, single tokens first: all together, or one each if there are too many tokens."""
        order = np.argsort(num_new > 1, kind="stable")
        return [order] if num_new.sum() <= self._max_num_tokens else list(order[:, None])

    def _guessing(self, step: StepRows) -> tuple[Int64Array, Int64Array, Int64Array]:
        """The rows whose drafts are not given, how many tokens they have, and how many tokens to draft for each."""
        drafts = step.drafts
        if drafts is None:
            return (np.zeros(0, dtype=np.int64),) * 3
        is_first = (drafts.places == 0) & (drafts.token_ids < 0)
        num_drafts = drafts.num_lines - 1
        counts = np.repeat(num_drafts, num_drafts)[is_first]
        return drafts.rows[is_first], drafts.positions[is_first], counts

    def _step(
        self,
        rows: Int64Array,
        begins: Int64Array,
        ends: Int64Array,
        guesses: NDArray[np.bool_],
        offset: int,
        blocks: Int32Array,
    ) -> None:
        """Compute tokens of rows. Those with `guesses` also draft the next token, after the ones drafted before."""
        while len(rows) == 1 and ends[0] - begins[0] > self._max_num_tokens:
            self._step(rows, begins, begins + self._max_num_tokens, np.zeros(1, dtype=np.bool_), 0, blocks)
            begins, blocks = begins + self._max_num_tokens, NO_BLOCKS
        step = StepRows.flat(rows, ends - begins, begins, sampled=np.flatnonzero(guesses))
        logits = self.stage.forward(self.stage.stage(step, blocks, exact=False))
        if step.sampled:
            self._sampler.guess(logits, step.sample_rows, step.sample_positions, offset)
