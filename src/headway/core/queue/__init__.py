"""Waiting queues. Their interface is in `base`; each policy chooses the queue that fits its order."""

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
