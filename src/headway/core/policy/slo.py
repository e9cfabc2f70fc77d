"""By deadline: each request may have targets for its first token (TTFT) and for the time between tokens (TPOT).

Waiting requests go in the order of the time by which their prompt must be begun to be in time. One that cannot be in
time any more lets those pass that still can: one late request more is better than two. Requests without a target come
after all with one, in order of arrival, so batch work fills what interactive work leaves.

Running requests have their pace: prompts leave every step short enough for the tightest target in the batch. Requests
without targets are preempted first; a request that is about to be late may displace one of these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter

from headway.core.policy.base import PolicyView, SchedulingPolicy
from headway.core.queue import DeadlineQueue, WaitingQueue
from headway.core.request import Request

URGENT = 0.5
"""Of the time to the first token, how much may pass before a waiting request displaces another."""
TOKENS_PER_STEP = 2048.0
"""Prompt tokens that are computed in a step, roughly: from this follows when a prompt must be begun."""


class SloPolicy(SchedulingPolicy):
    """Least slack first, among those that can be in time."""

    name = "slo"
    summary = "the least slack to its targets for first token and pace first; late ones and those without targets after"

    def __init__(self, view: PolicyView) -> None:
        super().__init__(view)
        self._paces: dict[int, float] = {}  # targets of running requests, by arrival index
        self._tightest_s: float | None = None  # of these; `None`: to be looked up

    def create_queue(self, front_size: int) -> WaitingQueue:
        """By deadlines; it has the order of `key`, which changes when a deadline is missed."""
        return DeadlineQueue(_due_s, self._lead_s, front_size=front_size)

    def key(self, request: Request) -> tuple[int, float]:
        """(0: can be in time, 1: late, 2: no target; when its prompt must be begun)"""
        due_s = _due_s(request)
        if due_s is None:
            return 2, 0.0
        begin_by_s = due_s - self._lead_s(request.num_tokens)
        return (0, begin_by_s) if begin_by_s >= self.view.now_s else (1, request.arrival_s)

    def promise_s(self, request: Request) -> float:
        """The target, if there is one."""
        return request.options.ttft_target_s or 0.0

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Without targets before with them, the latest first."""
        without = [one for one in running if one.options.ttft_target_s is None and one.options.tpot_target_s is None]
        return max(without or running, key=attrgetter("arrival_index"))

    def choose_displaced(self, request: Request, running: Sequence[Request]) -> Request | None:
        """For a request that could still be in time, but not much longer: one without targets."""
        if not self._is_urgent(request):
            return None
        victim = self.choose_victim(running)
        return None if _has_targets(victim) else victim

    def pace_s(self, default_s: float) -> float:
        """The tightest target among running requests."""
        if not self._paces:
            return default_s
        if self._tightest_s is None:
            self._tightest_s = min(self._paces.values())
        return min(self._tightest_s, default_s or math.inf)

    def entered(self, request: Request) -> None:
        """Count its pace from now on."""
        if request.options.tpot_target_s is not None:
            self._paces[request.arrival_index] = request.options.tpot_target_s
            self._tightest_s = None

    def left(self, request: Request) -> None:
        """Count its pace no more."""
        self._paces.pop(request.arrival_index, None)
        self._tightest_s = None

    def _lead_s(self, num_tokens: int) -> float:
        """How long before its first token a prompt must be begun."""
        return (1.0 + num_tokens / TOKENS_PER_STEP) * self.view.step_s

    def _is_urgent(self, request: Request) -> bool:
        if request.options.ttft_target_s is None:
            return False
        half_time_s = request.arrival_s + URGENT * request.options.ttft_target_s
        due_s = request.arrival_s + request.options.ttft_target_s
        return half_time_s <= self.view.now_s <= due_s - self._lead_s(request.num_tokens)


def _due_s(request: Request) -> float | None:
    """When it should have its first token."""
    return None if request.options.ttft_target_s is None else request.arrival_s + request.options.ttft_target_s


def _has_targets(request: Request) -> bool:
    return request.options.ttft_target_s is not None or request.options.tpot_target_s is not None
