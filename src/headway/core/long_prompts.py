"""What a long prompt changes: steps are shortened, and short prompts pass it.

Prompts are computed in the order of the policy, and one that takes many steps would keep all behind it waiting for its
end. So prompts that fit into one step pass it, but not for free: what they take of the steps is counted against the
long one's own progress, and stays below a fixed share of it.

    budget      ████████ ████████ ████████ ████████
    long        ████████ ███████░ ███████░ ██████░░          share 0.15
    passing            ·        a        b       cc          what they leave is the long one's, and theirs later
"""

from __future__ import annotations

from headway.core.live_requests import LiveRequests
from headway.core.policy import SchedulingPolicy
from headway.core.request import Request
from headway.core.shares import ShareAllocator, StepPlan
from headway.settings import SchedulerSettings

QUIET_STEPS = 100
"""If no request has arrived for this many steps with a long prompt, none is expected."""

_ROUNDING = 1e-9


class PassingAccount:
    """What the long prompt that short ones pass now has lost to them. A share of 0: it is not passed."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._long: Request | None = None
        self._num_before = 0  # tokens it had computed when its account was opened
        self._num_passed = 0

    def allowance(self, long: Request, num_left_tokens: int) -> int:
        """How many of the tokens that a step has left for a long prompt may go to prompts that pass it; at most half of
        them, so that it makes progress in every step."""
        num_own = long.num_computed_tokens - self._num_before
        if long is not self._long or num_own < 0:  # another one, or this one starts over
            self._long, self._num_before, self._num_passed, num_own = long, long.num_computed_tokens, 0, 0
        # Most is as many as make passed = share × own, with what it computes in this very step.
        num_due = (self._share * (num_own + num_left_tokens) - self._num_passed) / (1.0 + self._share)
        return max(0, min(int(num_due + _ROUNDING), num_left_tokens // 2))

    def charge(self, num_tokens: int) -> None:
        """Count tokens of the step that went to prompts that passed."""
        self._num_passed += num_tokens


class LongPrompts:
    """Lets short prompts pass a long one."""

    def __init__(
        self,
        config: SchedulerSettings,
        *,
        policy: SchedulingPolicy,
        live: LiveRequests,
        shares: ShareAllocator,
    ) -> None:
        self._policy = policy
        self._live = live
        self._shares = shares
        self._account = PassingAccount(config.short_prompt_share)
        self._skip_window = config.skip_window

    def let_short_pass(self, plan: StepPlan, prompts: list[Request]) -> None:
        """Compute prompts that fit into one step before the first that does not, as far as it may be slowed by it.
        `prompts`: the running requests whose prompts are not complete; at least one is long."""
        shorten(plan, policy=self._policy, live=self._live)
        index = next(i for i, one in enumerate(prompts) if plan.is_long(one, one.num_remaining_tokens))
        long, before, behind = prompts[index], prompts[:index], prompts[index + 1 :]
        num_left = plan.budget.left - sum(one.num_remaining_tokens for one in before)
        if num_left <= 0 or plan.preempted or self._policy.divides_steps:
            return
        num_tokens = self._account.allowance(long, num_left)
        num_reserved = plan.budget.left - num_tokens
        plan.budget.take(num_reserved)
        self._shares.compute_each(plan, [one for one in behind if not plan.is_long(one, one.num_remaining_tokens)])
        while plan.budget.left and not plan.preempted:
            request = self._find_passing(plan, long)
            if request is None or not self._live.can_enter(request):
                break
            self._shares.admit(plan, request)
        self._account.charge(num_tokens - plan.budget.left)
        plan.budget.refund(num_reserved)

    def _find_passing(self, plan: StepPlan, long: Request) -> Request | None:
        """The first waiting request that may pass a long prompt: it fits into a step, and the policy does not put it
        behind. The last seat is left to the first in the queue, and requests that are overdue are not passed."""
        waiting = self._live.waiting
        num_seats, num_overdue = self._live.num_free_seats, waiting.num_overdue
        if not num_seats:
            return None
        entry_key, num_first = self._live.entry_key(long), self._skip_window + 1
        for index in range(min(num_overdue, num_first) if num_overdue else num_first):
            request = waiting.peek(index)
            if request is None or (index and num_seats == 1):
                return None
            is_short = _num_uncached(plan, request, self._policy) <= plan.max_short_tokens
            if is_short and self._policy.key(request) <= entry_key:
                return request
        request = None if num_overdue else waiting.first_short(plan.max_short_tokens)
        return None if request is None or self._policy.key(request) > entry_key else request


def shorten_for(plan: StepPlan, request: Request, *, policy: SchedulingPolicy, live: LiveRequests) -> None:
    """Shorten the step if the request that enters it has a long prompt to compute."""
    if plan.is_long(request, _num_uncached(plan, request, policy)):
        shorten(plan, policy=policy, live=live)


def shorten(plan: StepPlan, *, policy: SchedulingPolicy, live: LiveRequests) -> None:
    """Limit a step with a long prompt: requests that arrive meanwhile must not wait long for its end. A batch of work
    that was there from its start, while no other request has arrived for long, is computed at full speed."""
    quiet_s = plan.now_s - live.last_joined_s
    if len(live.by_id) == 1 or quiet_s < QUIET_STEPS * policy.view.pace.long_step_s:
        num_taken = plan.num_prompt_tokens - plan.budget.left
        plan.budget.cap(max(0, plan.max_long_tokens - num_taken))


def _num_uncached(plan: StepPlan, request: Request, policy: SchedulingPolicy) -> int:
    """How many tokens of a waiting request would have to be computed; the cache is asked only if it matters."""
    if request.num_tokens <= plan.max_short_tokens:
        return request.num_tokens
    return request.num_tokens - policy.view.num_cached_tokens(request)
