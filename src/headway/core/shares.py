"""The shares of a step: how many of its tokens each request computes, and in which blocks.

    StepPlan         what has been decided about a step so far
    TokenBudget      the tokens that the step may still compute
    ShareAllocator   gives requests their shares: tokens from the budget, blocks from the KV cache

If blocks run out, other requests are preempted, and the tokens of their shares go back to the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from headway.core.kv.manager import KVCacheManager
from headway.core.landing import Landing
from headway.core.live_requests import LiveRequests
from headway.core.policy import SchedulingPolicy
from headway.core.request import Request, RequestStatus
from headway.core.scheduler_output import NewRequest, ScheduledRequest

_RUNNING = RequestStatus.RUNNING  # an enum's own attributes are slow to look up
_NO_LIMIT = 2**62  # tokens; no prompt has as many


class TokenBudget:
    """How many tokens a step may still compute, and how many of them one request may take at most."""

    __slots__ = ("left", "max_chunk_tokens")

    def __init__(self, limit: int, max_chunk_tokens: int | None = None) -> None:
        self.left = limit
        self.max_chunk_tokens = limit if max_chunk_tokens is None else max_chunk_tokens

    def offer(self, num_remaining_tokens: int) -> int:
        """Return how many tokens a request may take now if it has `num_remaining_tokens` to compute."""
        return min(num_remaining_tokens, self.left, self.max_chunk_tokens)

    def cap(self, num_tokens: int) -> None:
        """Limit the tokens that are left to `num_tokens`."""
        self.left = min(self.left, num_tokens)

    def take(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= self.left:
            raise RuntimeError(f"cannot take {num_tokens} tokens from a budget of {self.left}")
        self.left -= num_tokens

    def refund(self, num_tokens: int) -> None:
        self.left += num_tokens


@dataclass(slots=True)
class StepPlan:
    """What has been decided about a step so far."""

    now_s: float
    budget: TokenBudget
    num_prompt_tokens: int = 0  # the tokens that decodes leave to prompts
    max_short_tokens: int = _NO_LIMIT  # a prompt with more tokens may be long: it may take several steps
    max_long_tokens: int = _NO_LIMIT  # the limit of all prompts together in a step with a long one
    scheduled: dict[Request, ScheduledRequest] = field(default_factory=dict)
    keeps: dict[Request, ScheduledRequest] = field(default_factory=dict)  # as in `LaunchedStep`
    admitted: list[NewRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    displaceable: list[Request] | None = None  # requests that may be preempted for a waiting one; None: not determined

    def is_long(self, request: Request, num_tokens: int) -> bool:
        """Whether the next `num_tokens` tokens of a prompt are too many for one step, so that shorter prompts pass it.
        The length of the whole prompt counts too: tokens at its end cost more, since they attend to all before them."""
        return request.num_tokens > self.max_short_tokens and num_tokens > self.max_long_tokens


class ShareAllocator:
    """Gives requests their shares of a step, and preempts others if blocks run out."""

    def __init__(
        self,
        *,
        kv_cache: KVCacheManager,
        policy: SchedulingPolicy,
        live: LiveRequests,
        landing: Landing,
        can_enter: Callable[[Request], bool],
    ) -> None:
        """Create it. `can_enter` says whether a waiting request would be admitted now if it were first in the queue."""
        self._kv_cache = kv_cache
        self._policy = policy
        self._live = live
        self._landing = landing
        self._can_enter = can_enter

    def admit(self, plan: StepPlan, request: Request) -> None:
        """Admit a waiting request and give it its first share at once. A seat and memory must be free."""
        plan.admitted.append(self._live.admit(request))
        self.compute(plan, request)

    def compute_each(self, plan: StepPlan, requests: Iterable[Request]) -> None:
        """Give these requests their shares in turn, until the budget is spent. Requests with a share are skipped."""
        for request in requests:
            if plan.budget.left == 0:
                return
            if request.status is _RUNNING and request not in plan.scheduled:
                self.compute(plan, request)

    def compute(self, plan: StepPlan, request: Request) -> None:
        """Give a running request its share of the step. If blocks run out, others are preempted, or it is itself."""
        kv_cache, budget, num_computed = self._kv_cache, plan.budget, request.num_computed_tokens
        num_remaining, num_tokens = request.num_remaining_tokens, 1
        if num_remaining > 1:
            num_tokens = self._policy.chunk_size(
                request,
                num_offered_tokens=budget.offer(num_remaining),
                num_left_tokens=budget.left,
                can_enter=self._can_enter,
            )
        new_block_ids = kv_cache.allocate(request, num_tokens)
        if new_block_ids is None:
            num_tokens = min(num_tokens, self._make_room(plan, request))
            if num_tokens == 0:
                return
            new_block_ids = kv_cache.allocate(request, num_tokens)
            assert new_block_ids is not None
        budget.take(num_tokens)
        share = ScheduledRequest(
            request.request_id, num_tokens, num_computed, tuple(new_block_ids), num_tokens == num_remaining
        )
        plan.scheduled[request] = share
        num_admitted = kv_cache.uncached.get(request, 0)
        if num_computed < num_admitted:
            end = num_computed + num_tokens
            fills_block = end % kv_cache.block_size < num_tokens
            if fills_block or end == request.num_prompt_tokens or end == num_admitted:
                plan.keeps[request] = share

    def _make_room(self, plan: StepPlan, request: Request) -> int:
        """Preempt requests until another token of this one fits. Returns how many fit; 0 if it was preempted itself."""
        while (num_fitting := self._kv_cache.num_tokens_that_fit(request)) <= 0:
            victim = self._policy.choose_victim(self._live.preemptible() or self._live.running)
            self.preempt(plan, victim)
            if victim is request:
                return 0
        return num_fitting

    def preempt(self, plan: StepPlan, request: Request) -> None:
        """Preempt a running request: it loses its blocks, and its share of the step if it has one."""
        self._landing.drop(request)
        self._live.preempt(request)
        plan.keeps.pop(request, None)
        share = plan.scheduled.pop(request, None)
        if share is not None:
            plan.budget.refund(share.num_tokens)
        plan.preempted.append(request)
