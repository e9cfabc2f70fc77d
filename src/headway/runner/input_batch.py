"""The runner's memory of every request in the batch: permanent rows, so that only changes travel.

A request gets a row when it enters the batch and keeps it until it leaves. Its tokens and its block table live in that
row; a step's flat batch is gathered from the rows with a handful of vectorised operations, however many requests run:

    scheduled      A: 3 tokens from position 5    B: 1 token from position 9
    token_ids      [ A5 A6 A7 B9 ]        positions [ 5 6 7 9 ]        query_start [ 0 3 4 ]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headway.attention.base import AttentionBatch
from headway.core.scheduler_output import NewRequest, ScheduledRequest, SchedulerOutput

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the model needs for one step, on its device."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch
    query_start: Int64Array
    """Where each scheduled request's tokens begin, on the host."""


class InputBatch:
    """Rows of tokens and block tables. `row_of` says who sits where."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.row_of: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        # Pages of these arrays are touched only as far as requests really reach, so long limits cost no memory.
        self._token_ids: Int32Array = np.empty((max_num_seqs, max_model_len), dtype=np.int32)
        self._num_tokens: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        self._block_table: Int32Array = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self._num_blocks: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)

    def add(self, request: NewRequest) -> int:
        """Seat a request, with the blocks it begins with. Returns its row. If anything is wrong with it, the row stays
        free."""
        row = self._free_rows[-1]
        num_prompt_tokens = len(request.prompt_token_ids)
        num_tokens = num_prompt_tokens + len(request.output_token_ids)
        self._token_ids[row, :num_prompt_tokens] = request.prompt_token_ids
        self._token_ids[row, num_prompt_tokens:num_tokens] = request.output_token_ids
        self._num_tokens[row] = num_tokens
        self._num_blocks[row] = 0
        self.append_blocks(row, request.block_ids)
        self.row_of[request.request_id] = self._free_rows.pop()
        return row

    def remove(self, request_id: str) -> int | None:
        """Free a request's row and return it; `None` if it has none."""
        row = self.row_of.pop(request_id, None)
        if row is not None:
            self._free_rows.append(row)
        return row

    def append_blocks(self, row: int, block_ids: Sequence[int]) -> None:
        """Extend a request's block table."""
        start = self._num_blocks[row]
        self._block_table[row, start : start + len(block_ids)] = block_ids
        self._num_blocks[row] = start + len(block_ids)

    def append_token(self, row: int, token_id: int) -> None:
        """Add a sampled token. The last one a request may have need not fit: it is never computed."""
        position = self._num_tokens[row]
        if position < self._token_ids.shape[1]:
            self._token_ids[row, position] = token_id
        self._num_tokens[row] = position + 1

    def token_ids_of(self, row: int, start: int, end: int) -> Int64Array:
        """A request's tokens at positions `start .. end - 1`."""
        return self._token_ids[row, start:end].astype(np.int64)

    def gather(self, output: SchedulerOutput, device: torch.device) -> StepInputs:
        """The flat batch of a step. All scheduled requests must be seated and have their blocks."""
        rows, num_new, num_computed = _columns(output.scheduled, self.row_of)
        query_start = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(num_new, out=query_start[1:])
        num_tokens = int(query_start[-1])
        seq_lens = num_computed + num_new

        row_of_token = np.repeat(rows, num_new)
        positions = np.arange(num_tokens) + np.repeat(num_computed - query_start[:-1], num_new)
        token_ids = self._token_ids[row_of_token, positions].astype(np.int64)
        blocks = self._block_table[row_of_token, positions // self.block_size].astype(np.int64)
        slots = blocks * self.block_size + positions % self.block_size
        max_seq_len = int(seq_lens.max())
        block_table = self._block_table[rows, : -(-max_seq_len // self.block_size)]

        return StepInputs(
            token_ids=torch.from_numpy(token_ids).to(device),
            positions=torch.from_numpy(positions).to(device),
            attention=AttentionBatch(
                num_tokens=num_tokens,
                num_requests=len(rows),
                max_query_len=int(num_new.max()),
                max_seq_len=max_seq_len,
                query_start=torch.from_numpy(query_start.astype(np.int32)).to(device),
                seq_lens=torch.from_numpy(seq_lens.astype(np.int32)).to(device),
                block_table=torch.from_numpy(block_table).to(device),
                slot_mapping=torch.from_numpy(slots).to(device),
            ),
            query_start=query_start,
        )


def _columns(
    scheduled: Sequence[ScheduledRequest], row_of: dict[str, int]
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Rows, tokens to compute, and tokens already computed, one entry per scheduled request."""
    table = np.array([(row_of[s.request_id], s.num_tokens, s.num_computed_tokens) for s in scheduled], dtype=np.int64)
    return table[:, 0], table[:, 1], table[:, 2]
