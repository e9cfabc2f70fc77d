"""What counts about a step: how many tokens of which kind, how much of the cache they read, what is copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headway.core import SchedulerOutput

StepKind = Literal["decode", "mixed", "prefill"]
STEP_KINDS: tuple[StepKind, ...] = ("decode", "mixed", "prefill")
"""One token each; chunks of prompts beside those; chunks only."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """The size of a step."""

    num_tokens: int
    num_rows: int
    """Requests in the step."""
    num_sampled: int
    """Requests that get a token out of it."""
    num_context_tokens: int
    """Keys and values that single tokens read: one for each token of their contexts."""
    num_chunks: int = 0
    """Requests with more than one token."""
    num_chunk_pairs: float = 0.0
    """Pairs of tokens that chunks compare."""
    num_moved_blocks: int = 0

    @staticmethod
    def of(output: SchedulerOutput) -> StepWork:
        """Of a planned step."""
        scheduled, moves = output.scheduled, output.moves
        num_rows, num_tokens = len(scheduled), output.num_scheduled_tokens
        num_moved = len(moves.moved_out) + len(moves.copied) + len(moves.moved_in)
        if num_tokens == num_rows:  # nearly always
            context = sum([share.num_computed_tokens for share in scheduled]) + num_rows
            return StepWork(num_tokens, num_rows, num_rows, context, num_moved_blocks=num_moved)
        context = num_chunks = num_sampled = 0
        pairs = 0.0
        for share in scheduled:
            own_tokens, num_computed = share.num_tokens, share.num_computed_tokens
            num_sampled += share.samples
            if own_tokens == 1:
                context += num_computed + 1
            else:
                num_chunks += 1
                pairs += own_tokens * (num_computed + 0.5 * own_tokens)
        return StepWork(num_tokens, num_rows, num_sampled, context, num_chunks, pairs, num_moved)

    @property
    def kind(self) -> StepKind:
        """By what is in it."""
        if not self.num_chunks:
            return "decode"
        return "mixed" if self.num_chunks < self.num_rows else "prefill"
