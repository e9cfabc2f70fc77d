"""Fair shares: whichever tenant has been served least goes first, so that one who sends more only delays itself.

Served are tokens, those that are generated counting double since they take a step each (virtual token counters). A
tenant that was away is not owed what it did not ask for: when it comes back, its counter is raised to that of the
tenant who would be next.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.policy.base import SchedulingPolicy
from headway.core.queue import SharedQueue, WaitingQueue
from headway.core.request import Request, RequestStatus

GENERATED_WEIGHT = 2.0
"""What a generated token counts, where one of a prompt counts 1."""


class FairPolicy(SchedulingPolicy):
    """Requests say who their tenant is; those that do not say are one tenant."""

    name = "fair"
    summary = "the tenant that has been served least first"
    can_starve = False
    counts_service = True

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._served: dict[str, float] = {}
        self._num_live: dict[str, int] = {}  # requests of each tenant in the batch
        self._queue = _RaisingQueue(self)

    def key(self, request: Request) -> float:
        """What its tenant has had. Changes while a request waits, which the queue knows."""
        return self._served.get(request.tenant, 0.0)

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
        """Perhaps its tenant is not any more; what it has had is forgotten with its last request."""
        self._num_live[request.tenant] -= 1
        if not self._num_live[request.tenant]:
            del self._num_live[request.tenant]

    def served(self, request: Request, num_tokens: int) -> None:
        """Charge the tenant."""
        num_prompt = min(max(request.num_prompt_tokens - request.num_computed_tokens, 0), num_tokens)
        cost = num_prompt + GENERATED_WEIGHT * (num_tokens - num_prompt)
        self._served[request.tenant] = self._served.get(request.tenant, 0.0) + cost

    def served_to(self, tenant: str) -> float:
        """What a tenant has had."""
        return self._served.get(tenant, 0.0)

    def raise_counter(self, tenant: str, least: float) -> None:
        """A tenant comes back: it starts with what the next one has had."""
        if tenant not in self._num_live:
            self._served[tenant] = max(self._served.get(tenant, 0.0), least)


class _RaisingQueue(SharedQueue):
    """Tells the policy when a tenant comes that had nothing waiting."""

    def __init__(self, policy: FairPolicy) -> None:
        super().__init__(policy.served_to)
        self._policy = policy

    def push(self, request: Request) -> None:
        if request.status is RequestStatus.WAITING and not self.is_waiting(request.tenant):
            first = self.first_tenant()
            if first is not None:
                self._policy.raise_counter(request.tenant, self._policy.served_to(first))
        super().push(request)
