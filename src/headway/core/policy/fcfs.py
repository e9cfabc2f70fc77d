"""First come, first served: the earliest arrival goes first, the latest gives way."""

from __future__ import annotations

from headway.core.policy.base import SchedulingPolicy
from headway.core.request import Request


class FcfsPolicy(SchedulingPolicy):
    """Order of arrival, which is what ties are broken by; so every key is the same."""

    name = "fcfs"
    summary = "order of arrival"
    can_starve = False

    def key(self, request: Request) -> int:
        """The same for all."""
        return 0
