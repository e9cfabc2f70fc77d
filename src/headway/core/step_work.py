"""The size of one step, counted from its plan: what the time, the bytes and the arithmetic of a step depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headway.core.scheduler_output import SchedulerOutput

StepKind = Literal["decode", "mixed", "prefill"]
STEP_KINDS: tuple[StepKind, ...] = ("decode", "mixed", "prefill")
"""decode: one token for each request; mixed: prompt chunks beside those; prefill: prompt chunks only."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """The size of a step."""

    num_tokens: int
    num_rows: int
    """Requests in the step; one that verifies drafted tokens counts once for each of its tokens."""
    num_sampled: int
    """Requests for which the step samples a token."""
    num_context_tokens: int
    """Keys and values that single tokens read: one for each token of their contexts."""
    num_chunks: int = 0
    """Requests that compute more than one token."""
    num_chunk_pairs: float = 0.0
    """Pairs of tokens that chunks compare: the own tokens count half of their square."""
    num_moved_blocks: int = 0
    num_shared_reads: int = 0
    """What reading each request's keys and values once adds to `num_context_tokens`: the contexts of chunks, less what
    drafted tokens of one request share."""

    @staticmethod
    def of(output: SchedulerOutput) -> StepWork:
        scheduled, moves = output.scheduled, output.moves
        num_rows, num_tokens = len(scheduled), output.num_scheduled_tokens
        num_moved = len(moves.moved_out) + len(moves.copied) + len(moves.moved_in)
        if num_tokens == num_rows:  # nearly always
            context = sum([share.num_computed_tokens for share in scheduled]) + num_rows
            return StepWork(num_tokens, num_rows, num_rows, context, num_moved_blocks=num_moved)
        context = num_chunks = num_sampled = num_cached = 0
        pairs = 0.0
        for share in scheduled:
            own_tokens = share.num_tokens
            num_sampled += share.samples
            num_cached += share.num_computed_tokens + own_tokens
            if own_tokens == 1:
                context += share.num_computed_tokens + 1
            elif share.drafts:  # each of its tokens is like that of a request of its own
                num_drafts = own_tokens - 1
                num_rows += num_drafts
                num_sampled += num_drafts
                context += own_tokens * (share.num_computed_tokens + 1) + num_drafts * own_tokens // 2
            else:
                num_chunks += 1
                pairs += own_tokens * (share.num_computed_tokens + 0.5 * own_tokens)
        return StepWork(num_tokens, num_rows, num_sampled, context, num_chunks, pairs, num_moved, num_cached - context)

    @property
    def kind(self) -> StepKind:
        if not self.num_chunks:
            return "decode"
        return "mixed" if self.num_chunks < self.num_rows else "prefill"

    @property
    def num_cached_tokens(self) -> int:
        """Tokens whose keys and values the step reads, each once for its request. A prefix that requests share counts
        once for each of them."""
        return self.num_context_tokens + self.num_shared_reads

    @property
    def num_pairs(self) -> float:
        """Pairs of a query and a key that attention computes: each token with itself and with all before it."""
        num_chunk_tokens = self.num_tokens - self.num_rows + self.num_chunks
        return self.num_context_tokens + self.num_chunk_pairs + 0.5 * num_chunk_tokens
