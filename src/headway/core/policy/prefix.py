"""Cache-aware: of the requests that came first, whoever has most of its prompt in the prefix cache goes first.

Its blocks are there now; later they may have been given up for somebody else's. Requests with the same beginning come
one after the other, and the cache serves them all before it turns over. Only the front of the line is looked at, and
nobody is passed more often than requests may be passed for want of room.

Who gives way is whoever is cheapest to bring back: blocks that others use too stay, so only the rest counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.policy.base import SchedulingPolicy
from headway.core.queue import WaitingQueue, WindowQueue
from headway.core.request import Request

WINDOW = 32
"""So many waiting requests are compared."""


class PrefixPolicy(SchedulingPolicy):
    """Without a prefix cache it is fcfs."""

    name = "prefix"
    summary = "among the first ones, whoever has most of its prompt in the cache; gives way who is cheapest to restore"
    can_starve = False  # the window bounds how often anybody is passed

    def key(self, request: Request) -> int:
        """Order of arrival, but for the window."""
        return 0

    def create_queue(self, front_size: int) -> WaitingQueue:
        """The first ones by what is cached of them."""
        return WindowQueue(self.view.num_cached_tokens, window=max(WINDOW, front_size), max_passes=self._max_passes)

    @property
    def _max_passes(self) -> int:
        return max(self.view.max_head_skips, 1)

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Fewest tokens to compute again, the latest among equals. The first of all stays, so that somebody always
        comes to an end."""
        candidates = running[1:] or running
        return min(
            candidates, key=lambda request: (self.view.num_tokens_to_bring_back(request), -request.arrival_index)
        )
