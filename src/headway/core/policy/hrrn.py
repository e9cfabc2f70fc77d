"""Highest response ratio next: (wait + service) / service, with the service predicted.

A short request gains urgency fast, a long one slowly, but everyone gains: the order is between sjf and fcfs, and nobody
starves. Ratios change all the time, and differently for each length, so requests are kept in classes of about the same
predicted length: in a class the earliest arrival always has the highest ratio.
"""

from __future__ import annotations

import math

from headway.core.policy.base import SchedulingPolicy
from headway.core.policy.view import predicted_tokens
from headway.core.queue import GroupedQueue, WaitingQueue
from headway.core.request import Request

CLASSES_PER_DOUBLING = 2
"""Two lengths of a class differ by less than 42%."""


class HrrnPolicy(SchedulingPolicy):
    """Service is counted in steps of the usual time, one for each token."""

    name = "hrrn"
    summary = "the highest ratio of time in the system to predicted service time first"
    can_starve = False

    def create_queue(self, front_size: int) -> WaitingQueue:
        """A group for each class of lengths."""
        return GroupedQueue(self._length_class, self.key)

    def key(self, request: Request) -> float:
        """The ratio, negative since smaller goes first. Changes while a request waits, which the queue knows."""
        service_s: float = self.view.step_s * 2.0 ** (self._length_class(request) / CLASSES_PER_DOUBLING)
        return -(self.view.now_s - request.arrival_s + service_s) / service_s

    def _length_class(self, request: Request) -> int:
        return round(CLASSES_PER_DOUBLING * math.log2(max(predicted_tokens(request), 1.0)))
