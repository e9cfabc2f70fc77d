"""The policy `fair`: the least served tenant goes first, so that a tenant that sends more only delays itself.

Order alone is not enough: a step computes something for all requests in the batch, and more work makes it longer for
all. So a step takes at most slightly longer than it would for any tenant in the batch that was alone on a machine with
that tenant's share of the speed.

    tenant a   ▇▇                        one of two: alone on a machine half as fast its step would take ▇▇▇▇
    tenant b   ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒         what it has to compute
    step       ▇▇▒▒▒ ▇▇▒▒▒ ▇▇▒▒▒         the step includes this much of it

Prompts are cut into chunks to keep that limit. The batch becomes smaller as a result, since requests are admitted only
as their prompts are computed.

Service is counted in tokens. Generated tokens count double, since they take a step each (virtual token counters). An
absent tenant does not save up service: when it comes back, its counter is raised to that of the next tenant in order.

Counters of absent tenants are kept up to a limit. Beyond it the lowest ones are forgotten, since these would be raised
anyway. A tenant without a counter begins with the highest value that was forgotten.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from headway.core.forecast.waiting_totals import Waiting, WaitingTotals
from headway.core.policy.base import PolicyView, SchedulingPolicy
from headway.core.queue import TenantQueue, WaitingQueue
from headway.core.request import Request, RequestStatus
from headway.core.scheduler_output import ScheduledRequest

GENERATED_WEIGHT = 2.0
"""The weight of a generated token; a prompt token has weight 1."""
SLACK = 1.3
"""How many times as long a step may take as it would for a tenant alone at its share. Shorter steps would read the
weights more often, at the cost of all tenants, and the tenant's prompts are computed sooner in return."""
MAX_AWAY = 1_000
"""How many absent tenants keep a counter when some are forgotten. That happens when twice as many have one."""


class FairPolicy(SchedulingPolicy):
    """Shares service fairly between tenants. Requests without a tenant belong to one tenant together."""

    name = "fair"
    summary = "the tenant that has been served least first"
    can_starve = False

    def __init__(self, view: PolicyView) -> None:
        super().__init__(view)
        self._served: dict[str, float] = {}
        self._floor = 0.0  # the value at which a tenant without a counter begins
        self._num_live: dict[str, int] = {}  # how many requests of each tenant are in the batch
        self._num_present: dict[str, int] = {}  # how many of each are in the batch or waiting
        self._most_tenants = 2 * MAX_AWAY
        self._queue = _NotingQueue(self)

    def key(self, request: Request) -> float:
        """Return the service of the request's tenant. The queue allows that it changes while a request waits."""
        return self.served_to(request.options.tenant)

    def create_queue(self, front_size: int) -> WaitingQueue:
        """Return the policy's queue, which is grouped by tenant."""
        return self._queue

    def ahead_of(self, request: Request, totals: WaitingTotals) -> Waiting:
        """Return the requests that go first if tenants take turns: of each tenant as much as of the request's own, so
        that a tenant that sends little does not wait for those that send much."""
        queue, tenant = self._queue, request.options.tenant
        whole = Waiting(len(totals), totals.num_tokens)
        if not whole.num_requests:
            return whole
        num_tenants = queue.num_tenants + (not queue.is_waiting(tenant))
        num_tokens = queue.num_tokens_of(tenant) * num_tenants + request.num_tokens * (num_tenants - 1)
        share = min(1.0, num_tokens / whole.num_tokens)
        return Waiting(round(share * whole.num_requests), round(share * whole.num_tokens))

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Return the latest request of the most served tenant."""
        return max(running, key=lambda request: (self.key(request), request.arrival_index))

    def chunk_size(
        self,
        request: Request,
        *,
        num_offered_tokens: int,
        num_left_tokens: int,
        can_enter: Callable[[Request], bool],
    ) -> int:
        """Leave room in the step for the first waiting request, if its tenant has been served less."""
        first = self._queue.peek(0)
        if first is None or self.key(first) >= self.key(request) or not can_enter(first):
            return num_offered_tokens
        return max(1, min(num_offered_tokens, num_left_tokens - first.num_tokens))

    def step_limit_s(self, prompts: Sequence[Request]) -> float:
        """Return about how long the step would take for the tenant with the least to compute, alone at its share."""
        num_tenants, pace = len(self._num_present), self.view.pace
        if num_tenants == 1 or num_tenants * pace.decode_s(1) >= pace.longest_s:
            return math.inf  # usually there is one tenant, or there are so many that no step is too long
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
        """Count an admitted request for its tenant."""
        _add_one(self._num_live, request.options.tenant)
        _add_one(self._num_present, request.options.tenant)

    def left(self, request: Request) -> None:
        """Stop counting a request that has left the batch."""
        _take_one(self._num_live, request.options.tenant)
        _take_one(self._num_present, request.options.tenant)

    def served(self, shares: Mapping[Request, ScheduledRequest]) -> None:
        """Add the tokens of a planned step to the counters of the tenants."""
        served = self._served
        for request, share in shares.items():
            num_tokens = share.num_tokens
            cost = GENERATED_WEIGHT * num_tokens
            num_prompt_tokens = request.num_prompt_tokens - share.num_computed_tokens
            if num_prompt_tokens > 0:
                cost -= (GENERATED_WEIGHT - 1.0) * min(num_prompt_tokens, num_tokens)
            served[request.options.tenant] += cost

    def taken_back(self, request: Request, num_tokens: int) -> None:
        """Subtract wrong drafts from the tenant's counter, since it did not ask for them."""
        self._served[request.options.tenant] -= GENERATED_WEIGHT * num_tokens

    def served_to(self, tenant: str) -> float:
        """Return the service that a tenant has received, in weighted tokens."""
        return self._served.get(tenant, self._floor)

    @property
    def num_remembered(self) -> int:
        """How many tenants have a counter."""
        return len(self._served)

    def note_waiting(self, request: Request) -> None:
        """Note that a request is about to be queued. If its tenant was absent, the tenant's counter is raised to that
        of the next tenant in order."""
        tenant = request.options.tenant
        if request.status is RequestStatus.WAITING and tenant not in self._num_present:
            first = self._queue.first_tenant()
            least = 0.0 if first is None else self.served_to(first)
            if len(self._served) >= self._most_tenants:
                self._forget_some(least)
            self._served[tenant] = max(self.served_to(tenant), least)
        _add_one(self._num_present, tenant)

    def note_gone(self, request: Request) -> None:
        """Note that a request has left the queue: it has ended, or is being admitted."""
        _take_one(self._num_present, request.options.tenant)

    def _forget_some(self, least: float) -> None:
        """Forget the least served of the absent tenants. When they come back, they begin with no less than they had,
        unless they had more than the next tenant in order (`least`)."""
        away = [one for one in self._served if one not in self._num_present]
        away.sort(key=self.served_to)
        for tenant in away[: max(len(away) - MAX_AWAY, 0)]:
            self._floor = max(self._floor, min(self._served.pop(tenant), least or math.inf))
        self._most_tenants = 2 * max(MAX_AWAY, len(self._served))


class _NotingQueue(TenantQueue):
    """Notifies the policy of requests that are queued or removed."""

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
