"""Shortest remaining processing time: as sjf, but by what is left, and a short one may push a long one out.

A displaced request loses its place in the batch, not its tokens; what was computed for it may have to be computed
again. So it takes a clear case: the newcomer must have much less to go.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.policy.sjf import SjfPolicy
from headway.core.policy.view import predicted_rest
from headway.core.request import Request

CLEAR_CASE = 6.0
"""How many times longer the rest of a request must be than a newcomer's to be displaced by it."""


class SrptPolicy(SjfPolicy):
    """The longest rest is displaced."""

    name = "srpt"
    summary = "the shortest predicted rest first, and a much shorter one displaces a running one"

    def key(self, request: Request) -> float:
        """Predicted rest. It does not change while a request waits."""
        return predicted_rest(request)

    def choose_displaced(self, request: Request, running: Sequence[Request]) -> Request | None:
        """The longest rest, if that is so much longer that it pays."""
        victim = self.choose_victim(running)
        cost = self.view.num_tokens_to_bring_back(victim) / PROMPT_TOKENS_PER_STEP
        return victim if predicted_rest(victim) > CLEAR_CASE * (predicted_rest(request) + cost) else None


PROMPT_TOKENS_PER_STEP = 32.0
"""So many tokens that have to be computed again count as one that is generated: they delay everybody in the batch."""
