"""Policies by order of arrival: first come first served, by priority, and by what is in the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.policy.base import SchedulingPolicy
from headway.core.queue import WaitingQueue, WindowQueue
from headway.core.request import Request

WINDOW = 32
"""How many waiting requests the policy `prefix` compares."""


class FcfsPolicy(SchedulingPolicy):
    """First come, first served: the earliest arrival goes first, the latest is preempted.

    All keys are the same, and ties are broken by arrival.
    """

    name = "fcfs"
    summary = "order of arrival"
    can_starve = False

    def key(self, request: Request) -> int:
        """Return the same key for all requests."""
        return 0


class PriorityPolicy(SchedulingPolicy):
    """By priority: the smallest number goes first, as in vLLM and in Unix; equal ones go in order of arrival.

    The latest arrival of the lowest priority is preempted. Waiting requests do not displace running ones. There is no
    guard against starvation, since it would override the priorities.
    """

    name = "priority"
    summary = "the smallest priority number first"
    can_starve = False

    def key(self, request: Request) -> int:
        """Return the request's priority number."""
        return request.options.priority

    rank = key


class PrefixPolicy(SchedulingPolicy):
    """Cache-aware: of the earliest arrivals, the one with the most prompt tokens in the prefix cache goes first.

    Its blocks are cached now and may be evicted later. Requests with the same beginning are admitted one after the
    other, so that the cache serves them all before their blocks are evicted. Only the first requests of the queue are
    compared, and none is passed more than `max_head_skips` times. Without a prefix cache the order is that of fcfs.
    """

    name = "prefix"
    summary = (
        "among the earliest, the request with most of its prompt in the cache; the cheapest to restore is preempted"
    )
    can_starve = False  # the window bounds how often a request is passed

    def key(self, request: Request) -> int:
        """Return the same key for all requests: the order is that of arrival, except in the queue's window."""
        return 0

    def create_queue(self, front_size: int) -> WaitingQueue:
        """Create a queue whose first requests are sorted by their cached tokens."""
        max_passes = max(self.view.max_head_skips, 1)
        return WindowQueue(self.view.num_cached_tokens, window=max(WINDOW, front_size), max_passes=max_passes)

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Return the request with the fewest tokens to compute again, the latest among equals. Blocks that others use
        too stay. The first of several requests is never chosen, so that it can finish."""
        candidates = running[1:] or running
        return min(candidates, key=lambda one: (self.view.num_tokens_to_recompute(one), -one.arrival_index))
