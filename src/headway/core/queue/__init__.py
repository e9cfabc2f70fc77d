"""Waiting queues. What they have in common is in `base`; a policy chooses the one that fits its order."""

from headway.core.queue.base import KeyedQueue, WaitingQueue
from headway.core.queue.deadline import DeadlineQueue
from headway.core.queue.grouped import GroupedQueue, TenantQueue
from headway.core.queue.guarded import GuardedQueue
from headway.core.queue.window import WindowQueue

__all__ = [
    "DeadlineQueue",
    "GroupedQueue",
    "GuardedQueue",
    "KeyedQueue",
    "TenantQueue",
    "WaitingQueue",
    "WindowQueue",
]
