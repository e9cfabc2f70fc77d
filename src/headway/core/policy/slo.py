"""By deadline: each request may have targets for its first token (TTFT) and for the time between tokens (TPOT).

Waiting requests go in the order of the time by which their prompt must be begun to be in time. One that cannot make it
any more lets those pass that still can: a late one more is better than two late ones. Requests without a target come
after all with one, in order of arrival, so batch work fills what interactive work leaves.

Running requests have their pace: prompts leave every step short enough for the tightest target in the batch. Who gives
way are requests without targets; a request that is about to be late may displace one of these.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from headway.core.policy.base import SchedulingPolicy
from headway.core.queue import KeyedQueue, WaitingQueue
from headway.core.request import Request

URGENT = 0.5
"""Of the time to the first token, how much may pass before a waiting request displaces another."""
TOKENS_PER_STEP = 2048.0
"""Prompt tokens that are computed in a step, roughly: what tells when a prompt must be begun."""


class SloPolicy(SchedulingPolicy):
    """Least slack first, among those that can be in time."""

    name = "slo"
    summary = "the least slack to its targets for first token and pace first; late ones and those without targets after"

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._paces: list[tuple[float, int]] = []  # (target, arrival index) of running requests, as a heap
        self._running: set[int] = set()

    def create_queue(self, front_size: int) -> WaitingQueue:
        """A key grows once: when a deadline is missed."""
        return KeyedQueue(self.key, front_size=front_size, grows=True)

    def key(self, request: Request) -> tuple[int, float]:
        """(0: can be in time, 1: late, 2: no target; when its prompt must be begun)"""
        if request.ttft_target_s is None:
            return 2, 0.0
        begin_by_s = self._begin_by_s(request)
        return (0, begin_by_s) if begin_by_s >= self.view.now_s else (1, request.arrival_s)

    def promise_s(self, request: Request) -> float:
        """With a target: the target. Without one: nothing beyond what everybody gets."""
        return request.ttft_target_s or 0.0

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Without targets before with them, the latest first."""
        return max(running, key=lambda request: (not _has_targets(request), request.arrival_index))

    def choose_displaced(self, request: Request, running: Sequence[Request]) -> Request | None:
        """For a request that could still be in time, but not much longer: one without targets."""
        if request.ttft_target_s is None or not self._is_urgent(request):
            return None
        victim = self.choose_victim(running)
        return None if _has_targets(victim) else victim

    def pace_s(self, default_s: float) -> float:
        """The tightest target among running requests."""
        while self._paces and self._paces[0][1] not in self._running:
            heapq.heappop(self._paces)
        tightest_s = self._paces[0][0] if self._paces else math.inf
        return min(tightest_s, default_s or math.inf) if math.isfinite(tightest_s) else default_s

    def entered(self, request: Request) -> None:
        """Its pace counts from now on."""
        if request.tpot_target_s is not None:
            self._running.add(request.arrival_index)
            heapq.heappush(self._paces, (request.tpot_target_s, request.arrival_index))

    def left(self, request: Request) -> None:
        """It does not any more."""
        self._running.discard(request.arrival_index)

    def _begin_by_s(self, request: Request) -> float:
        assert request.ttft_target_s is not None
        num_steps = 1.0 + request.num_tokens / TOKENS_PER_STEP
        return request.arrival_s + request.ttft_target_s - num_steps * self.view.step_s

    def _is_urgent(self, request: Request) -> bool:
        assert request.ttft_target_s is not None
        now_s = self.view.now_s
        return request.arrival_s + URGENT * request.ttft_target_s <= now_s <= self._begin_by_s(request)


def _has_targets(request: Request) -> bool:
    return request.ttft_target_s is not None or request.tpot_target_s is not None
