"""Shortest job first: whoever is predicted to generate fewest tokens goes first.

A request that holds its place for a second delays all behind it by a second, so short ones first is the order with the
least mean wait, as far as the predictions are right. Long ones pay; the guard against starvation says how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from headway.core.policy.base import SchedulingPolicy
from headway.core.policy.view import predicted_rest, predicted_tokens
from headway.core.request import Request


class SjfPolicy(SchedulingPolicy):
    """Does not push running requests out; who gives way is whoever has most still to come."""

    name = "sjf"
    summary = "the shortest predicted answer first"

    def key(self, request: Request) -> float:
        """Predicted length of the whole answer."""
        return predicted_tokens(request)

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """The longest rest; among equals the latest."""
        rests = list(map(predicted_rest, running))
        longest = max(rests)
        candidates = [request for request, rest in zip(running, rests) if rest == longest]
        return max(candidates, key=attrgetter("arrival_index"))
