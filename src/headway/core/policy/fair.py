"""Fair shares: the tenant that has been served least goes first, so that one that sends more only delays itself.

Going first is not enough: a step computes something for all requests in the batch, and it takes longer the more that
is. So a step does not take longer, but for a little, than it would for any tenant in the batch if that were alone on a
machine of its share's speed.

    tenant a   ▇▇                        one of two: alone on a machine half as fast its step would take ▇▇▇▇
    tenant b   ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒         what it has to compute
    step       ▇▇▒▒▒ ▇▇▒▒▒ ▇▇▒▒▒         so much of it goes along

Prompts are cut to keep that limit. The batch itself becomes smaller in consequence: requests enter as their prompts are
computed.

Tokens are what is served, generated ones counting double since they take a step each (virtual token counters). A tenant
that was away is not owed what it did not ask for: when it comes back, its counter is raised to that of the tenant that
would be next.

Counters of tenants that are away are kept, but not for ever: when there are too many, those that have had least are
forgotten, which are the ones that would be raised. A tenant without a counter begins where the last were forgotten.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from headway.core.policy.base import PolicyView, SchedulingPolicy
from headway.core.queue import TenantQueue, WaitingQueue
from headway.core.request import Request, RequestStatus
from headway.core.scheduler_output import ScheduledRequest

GENERATED_WEIGHT = 2.0
"""What a generated token counts, where a prompt token counts 1."""
SLACK = 1.3
"""How many times as long as at its share a tenant's step may take. Its prompts are computed sooner, which pays for
some of it; short steps read the weights more often, which all tenants pay for."""
MAX_AWAY = 1_000
"""How many tenants with nothing waiting or running keep a counter; up to twice as many before any is forgotten."""


class FairPolicy(SchedulingPolicy):
    """Requests name their tenant; those that do not are one tenant."""

    name = "fair"
    summary = "the tenant that has been served least first"
    can_starve = False

    def __init__(self, view: PolicyView) -> None:
        super().__init__(view)
        self._served: dict[str, float] = {}
        self._floor = 0.0  # what a tenant without a counter begins with
        self._num_live: dict[str, int] = {}  # requests of each tenant in the batch
        self._num_present: dict[str, int] = {}  # likewise, in the batch or waiting
        self._most_tenants = 2 * MAX_AWAY
        self._queue = _NotingQueue(self)

    def key(self, request: Request) -> float:
        """What its tenant has had. It changes while a request waits, which the queue allows."""
        return self.served_to(request.options.tenant)

    def create_queue(self, front_size: int) -> WaitingQueue:
        """Grouped by tenant."""
        return self._queue

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Of the tenant that has had most, the latest."""
        return max(running, key=lambda request: (self.key(request), request.arrival_index))

    def chunk_size(
        self,
        request: Request,
        *,
        num_offered_tokens: int,
        num_left_tokens: int,
        can_enter: Callable[[Request], bool],
    ) -> int:
        """Leave room in the step for the first waiting request, if its tenant has had less."""
        first = self._queue.peek(0)
        if first is None or self.key(first) >= self.key(request) or not can_enter(first):
            return num_offered_tokens
        return max(1, min(num_offered_tokens, num_left_tokens - first.num_tokens))

    def step_limit_s(self, prompts: Sequence[Request]) -> float:
        """About what the step would take for the tenant that has least to compute in it, alone at its share."""
        num_tenants, pace = len(self._num_present), self.view.pace
        if num_tenants == 1 or num_tenants * pace.decode_s(1) >= pace.longest_s:
            return math.inf  # most engines: there is one tenant, or so many that no step is too long
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
        """Count it for its tenant."""
        _add_one(self._num_live, request.options.tenant)
        _add_one(self._num_present, request.options.tenant)

    def left(self, request: Request) -> None:
        """Count it no more."""
        _take_one(self._num_live, request.options.tenant)
        _take_one(self._num_present, request.options.tenant)

    def served(self, shares: Mapping[Request, ScheduledRequest]) -> None:
        """Charge the tenants."""
        served = self._served
        for request, share in shares.items():
            num_tokens = share.num_tokens
            cost = GENERATED_WEIGHT * num_tokens
            num_prompt_tokens = request.num_prompt_tokens - share.num_computed_tokens
            if num_prompt_tokens > 0:
                cost -= (GENERATED_WEIGHT - 1.0) * min(num_prompt_tokens, num_tokens)
            served[request.options.tenant] += cost

    def taken_back(self, request: Request, num_tokens: int) -> None:
        """Guessing was not the tenant's idea."""
        self._served[request.options.tenant] -= GENERATED_WEIGHT * num_tokens

    def served_to(self, tenant: str) -> float:
        """What a tenant has had."""
        return self._served.get(tenant, self._floor)

    @property
    def num_remembered(self) -> int:
        """Tenants that have a counter."""
        return len(self._served)

    def note_waiting(self, request: Request) -> None:
        """Note a request that is about to be queued. If its tenant was away, that begins with what the next one has
        had."""
        tenant = request.options.tenant
        if request.status is RequestStatus.WAITING and tenant not in self._num_present:
            first = self._queue.first_tenant()
            least = 0.0 if first is None else self.served_to(first)
            if len(self._served) >= self._most_tenants:
                self._forget_some(least)
            self._served[tenant] = max(self.served_to(tenant), least)
        _add_one(self._num_present, tenant)

    def note_gone(self, request: Request) -> None:
        """Note that a request does not wait any more: it has ended, or enters the batch."""
        _take_one(self._num_present, request.options.tenant)

    def _forget_some(self, least: float) -> None:
        """Forget the tenants that are away and have had least. What they begin with when they come back is not less
        than they had, unless that is more than the next one has had."""
        away = [one for one in self._served if one not in self._num_present]
        away.sort(key=self.served_to)
        for tenant in away[: max(len(away) - MAX_AWAY, 0)]:
            self._floor = max(self._floor, min(self._served.pop(tenant), least or math.inf))
        self._most_tenants = 2 * max(MAX_AWAY, len(self._served))


class _NotingQueue(TenantQueue):
    """Tells the policy which requests come and go."""

    def __init__(self, policy: FairPolicy) -> None:
        super().__init__(policy.served_to)
        self._policy = policy

    def push(self, request: Request) -> None:
        self._policy.note_waiting(request)
        super().push(request)

    def remove(self, request: Request) -> None:
        super().remove(request)
        self._policy.note_gone(request)


def _add_one(counts: dict[str, int], tenant: str) -> None:
    counts[tenant] = counts.get(tenant, 0) + 1


def _take_one(counts: dict[str, int], tenant: str) -> None:
    counts[tenant] -= 1
    if not counts[tenant]:
        del counts[tenant]
