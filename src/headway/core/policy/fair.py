"""Fair shares: whichever tenant has been served least goes first, so that one who sends more only delays itself.

Going first is not enough: a step computes something for everybody in the batch, and it takes longer the more that is.
So a step does not take longer, but for a little, than it would for any tenant in the batch if that were alone on a
machine of its share's speed.

    tenant a   ▇▇                        one of two: alone on a machine half as fast its step would take ▇▇▇▇
    tenant b   ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒         what it has to compute
    step       ▇▇▒▒▒ ▇▇▒▒▒ ▇▇▒▒▒         so much of it goes along

Prompts give way to that. The batch itself becomes smaller in consequence: requests enter as their prompts are computed.

Served are tokens, those that are generated counting double since they take a step each (virtual token counters). A
tenant that was away is not owed what it did not ask for: when it comes back, its counter is raised to that of the
tenant who would be next.

Counters of tenants that are away are kept, but not for ever: when there are too many, those that have had least are
forgotten, which are the ones that would be raised. Who is not remembered begins where the last ones were forgotten.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from headway.core.policy.base import SchedulingPolicy
from headway.core.policy.view import PolicyView
from headway.core.queue import SharedQueue, WaitingQueue
from headway.core.request import Request, RequestStatus
from headway.core.scheduler_output import ScheduledRequest

GENERATED_WEIGHT = 2.0
"""What a generated token counts, where one of a prompt counts 1."""
SLACK = 1.3
"""How many times as long as at its share a tenant's step may take. Its prompts are computed sooner, which pays for
some of it; short steps read the weights more often, which everybody pays for."""
MAX_AWAY = 1_000
"""So many tenants are remembered that have nothing waiting or running; up to twice as many before any is forgotten."""


class FairPolicy(SchedulingPolicy):
    """Requests say who their tenant is; those that do not say are one tenant."""

    name = "fair"
    summary = "the tenant that has been served least first"
    can_starve = False

    def __init__(self, view: PolicyView) -> None:
        super().__init__(view)
        self._served: dict[str, float] = {}
        self._floor = 0.0  # the counter of a tenant that is not remembered
        self._num_live: dict[str, int] = {}  # requests of each tenant in the batch
        self._num_present: dict[str, int] = {}  # likewise, in the batch or waiting
        self._most_tenants = 2 * MAX_AWAY
        self._queue = _NotingQueue(self)

    def key(self, request: Request) -> float:
        """What its tenant has had. Changes while a request waits, which the queue knows."""
        return self.served_to(request.options.tenant)

    def create_queue(self, front_size: int) -> WaitingQueue:
        """A line for each tenant."""
        return self._queue

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Of the tenant that has had most, the latest."""
        return max(running, key=lambda request: (self.key(request), request.arrival_index))

    def chunk_size(self, request: Request, num_offered_tokens: int, num_left_tokens: int) -> int:
        """A prompt under way leaves room in the step for the next one of a tenant that has had less."""
        first = self._queue.peek(0)
        if first is None or self.key(first) >= self.key(request) or not self.view.can_enter(first):
            return num_offered_tokens
        return max(1, min(num_offered_tokens, num_left_tokens - first.num_tokens))

    def step_limit_s(self, prompts: Sequence[Request]) -> float:
        """About what the step would take for the tenant that has least to compute in it, alone at its share."""
        num_tenants, pace = len(self._num_present), self.view.pace
        if num_tenants == 1 or num_tenants * pace.decode_s(1) >= pace.longest_s:
            return math.inf  # most engines: nobody else is there, or so many that no step is too long
        prompt_tokens = Counter[str]()
        for request in prompts:
            prompt_tokens[request.options.tenant] += request.num_remaining_tokens
        alone_s = [
            pace.planned_s(
                num_decodes=num_requests,
                num_backlog_tokens=prompt_tokens[tenant] + self._queue.num_tokens_of(tenant),
                slowdown=num_tenants,
            )
            for tenant, num_requests in self._num_live.items()
        ]
        return SLACK * min(alone_s, default=math.inf)

    def entered(self, request: Request) -> None:
        """One more of its tenant's."""
        _add_one(self._num_live, request.options.tenant)
        _add_one(self._num_present, request.options.tenant)

    def left(self, request: Request) -> None:
        """One less."""
        _take_one(self._num_live, request.options.tenant)
        _take_one(self._num_present, request.options.tenant)

    def served(self, shares: Mapping[Request, ScheduledRequest]) -> None:
        """Charge the tenants."""
        served = self._served
        for request, (_, num_tokens, num_computed_tokens, _, _) in shares.items():
            cost = GENERATED_WEIGHT * num_tokens
            num_prompt_tokens = request.num_prompt_tokens - num_computed_tokens
            if num_prompt_tokens > 0:
                cost -= (GENERATED_WEIGHT - 1.0) * min(num_prompt_tokens, num_tokens)
            served[request.options.tenant] += cost

    def served_to(self, tenant: str) -> float:
        """What a tenant has had."""
        return self._served.get(tenant, self._floor)

    @property
    def num_remembered(self) -> int:
        """Tenants that have a counter."""
        return len(self._served)

    def begins_to_wait(self, request: Request) -> None:
        """Before it is in the line. If its tenant was away, it starts with what the next one has had."""
        tenant = request.options.tenant
        if request.status is RequestStatus.WAITING and tenant not in self._num_present:
            first = self._queue.first_tenant()
            least = 0.0 if first is None else self.served_to(first)
            if len(self._served) >= self._most_tenants:
                self._forget_some(least)
            self._served[tenant] = max(self.served_to(tenant), least)
        _add_one(self._num_present, tenant)

    def waits_no_more(self, request: Request) -> None:
        """It has ended, or enters."""
        _take_one(self._num_present, request.options.tenant)

    def _forget_some(self, least: float) -> None:
        """Of the tenants that are away, those that have had least. What they begin with when they come back is not
        less than they had, unless that is more than the next one has had."""
        away = [one for one in self._served if one not in self._num_present]
        away.sort(key=self.served_to)
        for tenant in away[: max(len(away) - MAX_AWAY, 0)]:
            self._floor = max(self._floor, min(self._served.pop(tenant), least or math.inf))
        self._most_tenants = 2 * max(MAX_AWAY, len(self._served))


class _NotingQueue(SharedQueue):
    """Tells the policy who comes and goes."""

    def __init__(self, policy: FairPolicy) -> None:
        super().__init__(policy.served_to)
        self._policy = policy

    def push(self, request: Request) -> None:
        self._policy.begins_to_wait(request)
        super().push(request)

    def remove(self, request: Request) -> None:
        super().remove(request)
        self._policy.waits_no_more(request)


def _add_one(counts: dict[str, int], tenant: str) -> None:
    counts[tenant] = counts.get(tenant, 0) + 1


def _take_one(counts: dict[str, int], tenant: str) -> None:
    counts[tenant] -= 1
    if not counts[tenant]:
        del counts[tenant]
