"""The policy `slo`: requests may have targets for their first token (TTFT) and for the time between tokens (TPOT).

Waiting requests are sorted by the time at which their prompts must be started to meet the target. A request that can no
longer meet its target lets those pass that still can, so that these are not late too. Requests without a target come
after all with one, in order of arrival, so batch work fills the capacity that interactive work leaves.

Prompts are limited so that every step is short enough for the tightest TPOT target in the batch. Requests without
targets are preempted first, and a request that is about to be late may displace one of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter

from headway.core.policy.base import PolicyView, SchedulingPolicy
from headway.core.queue import DeadlineQueue, WaitingQueue
from headway.core.request import Request

URGENT = 0.5
"""After this part of its TTFT target has passed, a waiting request may displace another."""
TOKENS_PER_STEP = 2048.0
"""About how many prompt tokens a step computes. This gives the time at which a prompt must be started."""


class SloPolicy(SchedulingPolicy):
    """The least slack goes first, among the requests that can be in time."""

    name = "slo"
    summary = "the least slack to its targets for first token and pace first; late ones and those without targets after"

    def __init__(self, view: PolicyView) -> None:
        super().__init__(view)
        self._paces: dict[int, float] = {}  # TPOT targets of running requests, by arrival index
        self._tightest_s: float | None = None  # the smallest of these; `None`: to be recomputed

    def create_queue(self, front_size: int) -> WaitingQueue:
        """Create a queue by deadlines. It keeps the order of `key`, which changes when a deadline is missed."""
        return DeadlineQueue(_due_s, self._lead_s, front_size=front_size)

    def key(self, request: Request) -> tuple[int, float]:
        """Return the class of the request (0: can be in time, 1: late, 2: no target) and its order in that class."""
        due_s = _due_s(request)
        if due_s is None:
            return 2, 0.0
        begin_by_s = due_s - self._lead_s(request.num_tokens)
        return (0, begin_by_s) if begin_by_s >= self.view.now_s else (1, request.arrival_s)

    def rank(self, request: Request) -> float:
        """Return 0 for a request with a TTFT target and 1 for one without. Earlier arrivals with a target usually have
        earlier deadlines too."""
        return 0.0 if _due_s(request) is not None else 1.0

    def promise_s(self, request: Request) -> float:
        """Return the TTFT target, or 0 if there is none."""
        return request.options.ttft_target_s or 0.0

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Return the latest request without targets, or the latest of all if each has a target."""
        without = [one for one in running if one.options.ttft_target_s is None and one.options.tpot_target_s is None]
        return max(without or running, key=attrgetter("arrival_index"))

    def choose_displaced(self, request: Request, running: Sequence[Request]) -> Request | None:
        """Return a request without targets, if the waiting one can only just be in time."""
        if not self._is_urgent(request):
            return None
        victim = self.choose_victim(running)
        return None if _has_targets(victim) else victim

    def pace_s(self, default_s: float) -> float:
        """Return the tightest TPOT target of running requests, or the default if that is tighter."""
        if not self._paces:
            return default_s
        if self._tightest_s is None:
            self._tightest_s = min(self._paces.values())
        return min(self._tightest_s, default_s or math.inf)

    def entered(self, request: Request) -> None:
        """Take the request's TPOT target into account from now on."""
        if request.options.tpot_target_s is not None:
            self._paces[request.arrival_index] = request.options.tpot_target_s
            self._tightest_s = None

    def left(self, request: Request) -> None:
        """Forget the request's TPOT target."""
        self._paces.pop(request.arrival_index, None)
        self._tightest_s = None

    def _lead_s(self, num_tokens: int) -> float:
        """Return how long before its first token a prompt with this many tokens must be started."""
        return (1.0 + num_tokens / TOKENS_PER_STEP) * self.view.step_s

    def _is_urgent(self, request: Request) -> bool:
        if request.options.ttft_target_s is None:
            return False
        half_time_s = request.arrival_s + URGENT * request.options.ttft_target_s
        due_s = request.arrival_s + request.options.ttft_target_s
        return half_time_s <= self.view.now_s <= due_s - self._lead_s(request.num_tokens)


def _due_s(request: Request) -> float | None:
    """Return the time at which a request should have its first token; None without a target."""
    return None if request.options.ttft_target_s is None else request.arrival_s + request.options.ttft_target_s


def _has_targets(request: Request) -> bool:
    return request.options.ttft_target_s is not None or request.options.tpot_target_s is not None
