"""Multi-level feedback queue: without any prediction, whoever has had little goes before who has had much.

A request begins on the top level, or lower if its prompt is long, and sinks as it generates: 32 tokens on the first
level, twice as many on each after it. Requests of a higher level displace running ones of a lower level, so a short
answer is through before a long one gets far, although nobody knew which is which.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.policy.base import SchedulingPolicy
from headway.core.policy.view import num_generated_tokens
from headway.core.request import Request

FIRST_QUANTUM = 32
NUM_LEVELS = 6
PROMPT_TOKENS_PER_STEP = 256
"""So many prompt tokens count as one that is generated."""


class MlfqPolicy(SchedulingPolicy):
    """Level first, then arrival."""

    name = "mlfq"
    summary = "whoever has generated least first, in levels; a higher level displaces a running request of a lower one"

    def key(self, request: Request) -> int:
        """The level. It does not change while a request waits."""
        return level(request)

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Of the lowest level, the latest."""
        return max(running, key=lambda request: (level(request), request.arrival_index))

    def choose_displaced(self, request: Request, running: Sequence[Request]) -> Request | None:
        """One of a lower level."""
        victim = self.choose_victim(running)
        return victim if level(victim) > level(request) else None


def level(request: Request) -> int:
    """0 is the top."""
    attained = num_generated_tokens(request) + request.num_prompt_tokens // PROMPT_TOKENS_PER_STEP
    return min((attained // FIRST_QUANTUM + 1).bit_length() - 1, NUM_LEVELS - 1)
