"""Multi-level feedback queue: without any prediction, whoever has had little goes before who has had much.

A request begins on the top level, or lower if its prompt is long, and sinks as it generates: 32 tokens on the first
level, twice as many on each after it. Requests of a higher level displace running ones of a lower level, so a short
answer is through before a long one gets far, although nobody knew which is which.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter

from headway.core.policy.base import SchedulingPolicy
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
        attained = list(map(attained_service, running))
        least = _least_on_level(_level_after(max(attained)))
        lowest = [request for request, one in zip(running, attained) if one >= least]
        return max(lowest, key=attrgetter("arrival_index"))

    def choose_displaced(self, request: Request, running: Sequence[Request]) -> Request | None:
        """One of a lower level, if there is any: most are not, and to find that out must be quick."""
        least = _least_on_level(level(request) + 1) if level(request) < NUM_LEVELS - 1 else math.inf
        lower = [
            one
            for one in running
            if one.num_tokens - one.num_prompt_tokens + one.num_prompt_tokens // PROMPT_TOKENS_PER_STEP >= least
        ]
        return self.choose_victim(lower) if lower else None


def level(request: Request) -> int:
    """0 is the top."""
    return _level_after(attained_service(request))


def attained_service(request: Request) -> int:
    """What a request has had, in generated tokens. Those on their way count, so that nothing changes when they come
    while it waits."""
    num_prompt_tokens = request.num_prompt_tokens
    return request.num_tokens - num_prompt_tokens + num_prompt_tokens // PROMPT_TOKENS_PER_STEP


def _level_after(attained: int) -> int:
    return min((attained // FIRST_QUANTUM + 1).bit_length() - 1, NUM_LEVELS - 1)


def _least_on_level(number: int) -> int:
    return FIRST_QUANTUM * ((1 << number) - 1)
