"""Policies in order of arrival: plain, by priority, and by what is in the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.policy.base import SchedulingPolicy
from headway.core.queue import WaitingQueue, WindowQueue
from headway.core.request import Request

WINDOW = 32
"""How many waiting requests `prefix` compares."""


class FcfsPolicy(SchedulingPolicy):
    """First come, first served: the earliest arrival goes first, the latest is preempted.

    Ties are broken by arrival, so every key is the same.
    """

    name = "fcfs"
    summary = "order of arrival"
    can_starve = False

    def key(self, request: Request) -> int:
        """The same for all."""
        return 0


class PriorityPolicy(SchedulingPolicy):
    """By priority: the smallest number goes first, as in vLLM and in Unix; equals in order of arrival.

    The least important, latest arrival is preempted. Waiting requests do not displace running ones. There is no guard
    against starvation: priorities are meant.
    """

    name = "priority"
    summary = "the smallest priority number first"
    can_starve = False

    def key(self, request: Request) -> int:
        """The request's own number."""
        return request.options.priority


class PrefixPolicy(SchedulingPolicy):
    """Cache-aware: of the earliest arrivals, the one with most of its prompt in the prefix cache goes first.

    Its blocks are there now; later they may have been evicted for others. Requests with the same beginning enter one
    after the other, and the cache serves them all before it turns over. Only the first requests of the queue are
    compared, and none is passed more often than requests may be passed for want of room. Without a prefix cache it is
    fcfs.
    """

    name = "prefix"
    summary = (
        "among the earliest, the request with most of its prompt in the cache; the cheapest to restore is preempted"
    )
    can_starve = False  # the window bounds how often a request is passed

    def key(self, request: Request) -> int:
        """Order of arrival, but for the window."""
        return 0

    def create_queue(self, front_size: int) -> WaitingQueue:
        """The first ones by what is cached of them."""
        max_passes = max(self.view.max_head_skips, 1)
        return WindowQueue(self.view.num_cached_tokens, window=max(WINDOW, front_size), max_passes=max_passes)

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Fewest tokens to compute again, the latest among equals: blocks that others use too stay. The first request
        is never chosen among several, so that it comes to its end."""
        candidates = running[1:] or running
        return min(candidates, key=lambda one: (self.view.num_tokens_to_recompute(one), -one.arrival_index))
