"""Prompts given as ids of blocks, as in Mooncake's traces: each id becomes one block of random tokens, always the same.

    hash_ids [0, 1, 2] and [0, 1, 7]  →  two prompts with two blocks in common

With blocks smaller than the trace's own, everything shrinks alike, and what is shared stays the same share.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

from headway.errors import ConfigError
from headway.lab.workload.content import rows_in
from headway.lab.workload.drawing import Draft, Drawing
from headway.lab.workload.options_table import OptionsTable
from headway.lab.workload.trace_rows import MOONCAKE_BLOCK_TOKENS, Trace, TraceRow


@dataclass(frozen=True)
class BlockContent:
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    scales_output: bool = True
    """Answers shrink like prompts; only where their length comes from the trace."""

    has_text: ClassVar[bool] = False

    def draw(self, drawing: Drawing, count: int) -> list[Draft]:
        rows = drawing.rows(count)
        wanted = {block_id for row in rows for block_id in self._ids(row)}
        blocks = {number: drawing.ids(drawing.rng(f"block {number}"), self.block_tokens) for number in wanted}
        drafts = []
        for row, length in zip(rows, drawing.output_lengths(count)):
            num_out = drawing.limits.output(self._scaled(length, drawing))
            prompt = list(itertools.chain.from_iterable(blocks[number] for number in self._ids(row)))
            drafts.append(Draft(drawing.limits.cut(prompt, num_out), num_out))
        return drafts

    def num_available(self, trace: Trace | None) -> int | None:
        return rows_in(trace)

    def _ids(self, row: TraceRow) -> tuple[int, ...]:
        if row.block_ids is None:
            raise ConfigError("The trace has no block ids (hash_ids): content of kind 'blocks' needs them.")
        return row.block_ids

    def _scaled(self, length: int, drawing: Drawing) -> int:
        if not self.scales_output or drawing.lengths.output is not None:
            return length
        return max(1, round(length * self.block_tokens / MOONCAKE_BLOCK_TOKENS))


def read_block_content(table: OptionsTable) -> BlockContent:
    """From the table `[content]`."""
    table.only("kind", "block_tokens", "scale_output")
    return BlockContent(table.whole("block_tokens", MOONCAKE_BLOCK_TOKENS), table.switch("scale_output", True))
