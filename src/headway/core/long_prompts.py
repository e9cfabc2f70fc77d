"""Lets short prompts pass a long one, and shortens the steps of a long prompt.

Prompts are computed in the order of the policy. A prompt that takes many steps would make all later ones wait until it
is complete. So prompts that fit into one step pass it, within a limit: the tokens that they take stay below a fixed
share of the tokens that the long prompt computes.

    budget      ████████ ████████ ████████ ████████
    long        ████████ ███████░ ███████░ ██████░░          share 0.15
    passing            ·        a        b       cc          the long prompt takes what these leave
"""

from __future__ import annotations

from headway.core.live_requests import LiveRequests
from headway.core.policy import SchedulingPolicy
from headway.core.request import Request
from headway.core.shares import ShareAllocator, StepPlan
from headway.settings import SchedulerSettings

QUIET_STEPS = 100
"""If no request has arrived for the time of this many steps with a long prompt, none is expected."""

_ROUNDING = 1e-9


class PassingAccount:
    """Counts the tokens that the present long prompt has lost to passing ones. With a share of 0 none may pass."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._long: Request | None = None
        self._num_before = 0  # tokens that the long prompt had computed when its account was opened
        self._num_passed = 0

    def allowance(self, long: Request, num_left_tokens: int) -> int:
        """Return how many of the tokens that a step has left for a long prompt may go to prompts that pass it. These
        are at most half, so that the long prompt makes progress in every step."""
        num_own = long.num_computed_tokens - self._num_before
        if long is not self._long or num_own < 0:  # another long prompt, or this one was preempted
            self._long, self._num_before, self._num_passed, num_own = long, long.num_computed_tokens, 0, 0
        # The limit is where passed = share × own, counting the tokens that both compute in this step.
        num_due = (self._share * (num_own + num_left_tokens) - self._num_passed) / (1.0 + self._share)
        return max(0, min(int(num_due + _ROUNDING), num_left_tokens // 2))

    def charge(self, num_tokens: int) -> None:
        """Count tokens of a step that went to passing prompts."""
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
        """Compute short prompts before the first long one, within that one's allowance. `prompts` are the running
        requests whose prompts are not complete; at least one is long."""
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
        """Return the first waiting request that may pass a long prompt: it fits into a step, and the policy does not
        order it after the long one. The last free seat is left to the first in the queue, and overdue requests are not
        passed."""
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
    """Shorten the step if the request that is about to be admitted has a long prompt to compute."""
    if plan.is_long(request, _num_uncached(plan, request, policy)):
        shorten(plan, policy=policy, live=live)


def shorten(plan: StepPlan, *, policy: SchedulingPolicy, live: LiveRequests) -> None:
    """Limit a step with a long prompt, so that requests that arrive during it do not wait long for its end. If no
    request has arrived for long while others ran, the work is a closed batch and is computed at full speed."""
    quiet_s = plan.now_s - live.last_joined_s
    if len(live.by_id) == 1 or quiet_s < QUIET_STEPS * policy.view.pace.long_step_s:
        num_taken = plan.num_prompt_tokens - plan.budget.left
        plan.budget.cap(max(0, plan.max_long_tokens - num_taken))


def _num_uncached(plan: StepPlan, request: Request, policy: SchedulingPolicy) -> int:
    """How many tokens of a waiting request would have to be computed. The cache is looked up only for long prompts."""
    if request.num_tokens <= plan.max_short_tokens:
        return request.num_tokens
    return request.num_tokens - policy.view.num_cached_tokens(request)
