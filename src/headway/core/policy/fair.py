"""Fair shares: whichever tenant has been served least goes first, so that one who sends more only delays itself.

Served are tokens, those that are generated counting double since they take a step each (virtual token counters). A
tenant that was away is not owed what it did not ask for: when it comes back, its counter is raised to that of the
tenant who would be next.

Counters of tenants that are away are kept, but not for ever: when there are too many, those that have had least are
forgotten, which are the ones that would be raised. Who is not remembered begins where the last ones were forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway.core.policy.base import SchedulingPolicy
from headway.core.policy.view import PolicyView
from headway.core.queue import SharedQueue, WaitingQueue
from headway.core.request import Request, RequestStatus

GENERATED_WEIGHT = 2.0
"""What a generated token counts, where one of a prompt counts 1."""
MAX_AWAY = 1_000
"""So many tenants are remembered that have nothing waiting or running; up to twice as many before any is forgotten."""


class FairPolicy(SchedulingPolicy):
    """Requests say who their tenant is; those that do not say are one tenant."""

    name = "fair"
    summary = "the tenant that has been served least first"
    can_starve = False
    counts_service = True

    def __init__(self, view: PolicyView) -> None:
        super().__init__(view)
        self._served: dict[str, float] = {}
        self._floor = 0.0  # the counter of a tenant that is not remembered
        self._num_live: dict[str, int] = {}  # requests of each tenant in the batch
        self._most_tenants = 2 * MAX_AWAY
        self._queue = _RaisingQueue(self)

    def key(self, request: Request) -> float:
        """What its tenant has had. Changes while a request waits, which the queue knows."""
        return self.served_to(request.tenant)

    def create_queue(self, front_size: int) -> WaitingQueue:
        """A line for each tenant."""
        return self._queue

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Of the tenant that has had most, the latest."""
        return max(running, key=lambda request: (self.key(request), request.arrival_index))

    def entered(self, request: Request) -> None:
        """Its tenant is active."""
        self._num_live[request.tenant] = self._num_live.get(request.tenant, 0) + 1

    def left(self, request: Request) -> None:
        """Perhaps its tenant is not any more."""
        self._num_live[request.tenant] -= 1
        if not self._num_live[request.tenant]:
            del self._num_live[request.tenant]

    def served(self, request: Request, num_tokens: int) -> None:
        """Charge the tenant."""
        cost = GENERATED_WEIGHT * num_tokens
        num_prompt = request.num_prompt_tokens - request.num_computed_tokens
        if num_prompt > 0:
            cost -= (GENERATED_WEIGHT - 1.0) * min(num_prompt, num_tokens)
        self._served[request.tenant] += cost

    def served_to(self, tenant: str) -> float:
        """What a tenant has had."""
        return self._served.get(tenant, self._floor)

    @property
    def num_remembered(self) -> int:
        """Tenants that have a counter."""
        return len(self._served)

    def raise_counter(self, tenant: str, least: float) -> None:
        """A tenant comes that had nothing waiting. If nothing of it runs either, it was away: it starts with what the
        next one has had."""
        if tenant not in self._num_live:
            if len(self._served) >= self._most_tenants:
                self._forget_some(least)
            self._served[tenant] = max(self.served_to(tenant), least)

    def _forget_some(self, least: float) -> None:
        """Of the tenants that are away, those that have had least. What they begin with when they come back is not
        less than they had, unless that is more than the next one has had."""
        away = [one for one in self._served if one not in self._num_live and not self._queue.is_waiting(one)]
        away.sort(key=self.served_to)
        for tenant in away[: max(len(away) - MAX_AWAY, 0)]:
            self._floor = max(self._floor, min(self._served.pop(tenant), least or math.inf))
        self._most_tenants = 2 * max(MAX_AWAY, len(self._served))


class _RaisingQueue(SharedQueue):
    """Tells the policy when a tenant comes that had nothing waiting."""

    def __init__(self, policy: FairPolicy) -> None:
        super().__init__(policy.served_to)
        self._policy = policy

    def push(self, request: Request) -> None:
        if request.status is RequestStatus.WAITING and not self.is_waiting(request.tenant):
            first = self.first_tenant()
            self._policy.raise_counter(request.tenant, 0.0 if first is None else self._policy.served_to(first))
        super().push(request)
