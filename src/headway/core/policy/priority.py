"""By priority: the smallest number goes first, as in vLLM and in Unix; equals in order of arrival."""

from __future__ import annotations

from headway.core.policy.base import SchedulingPolicy
from headway.core.request import Request


class PriorityPolicy(SchedulingPolicy):
    """The least important, latest arrival gives way. Waiting requests do not push running ones out.

    Nobody is guarded against starvation: whoever gives priorities means them.
    """

    name = "priority"
    summary = "the smallest priority number first"
    can_starve = False

    def key(self, request: Request) -> int:
        """The request's own number."""
        return request.options.priority
