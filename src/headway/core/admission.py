"""Which waiting requests enter the batch in a step: in the policy's order, past a request that does not fit, in the
seat of a running one, or past a long prompt.

    Entry        whether a request would find a seat and memory
    Admission    lets requests enter
    Passing      how far short prompts may pass a long one that is being computed
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.batching import ContinuousBatching, Entrants
from headway.core.kv_cache_manager import KVCacheManager
from headway.core.live_requests import LiveRequests
from headway.core.policy import PolicyView, SchedulingPolicy
from headway.core.request import Request
from headway.core.step_plan import ShareAllocator, StepPlan
from headway.core.step_time import DecodePace
from headway.settings import SchedulerSettings

MAX_DISPLACED = 4
"""At most this many running requests are preempted in one step for others that wait."""
QUIET_STEPS = 100
"""If no request has arrived for this many steps with a long prompt, none is expected."""

_ROUNDING = 1e-9


class Entry:
    """Whether a waiting request would find a seat and memory now, and whether the era lets it in."""

    def __init__(
        self, *, kv_cache: KVCacheManager, live: LiveRequests, batching: ContinuousBatching, view: PolicyView
    ) -> None:
        self._kv_cache = kv_cache
        self._live = live
        self._batching = batching
        self._view = view

    def is_possible(self, request: Request) -> bool:
        """Whether the request could enter now, if it were the first."""
        entrants = self._batching.entrants(self._live, now_s=self._view.now_s)
        may_enter = self._batching.may_enter(request, entrants) and self._live.num_free_seats > 0
        return may_enter and not self._kv_cache.should_wait(request) and self.fits(request)

    def fits(self, request: Request, *, leaving: Sequence[Request] = ()) -> bool:
        """Whether there is memory, or would be without the `leaving` requests, and the runner can be told all of the
        request's tokens: one that was preempted while a step sampled for it has to wait for that result."""
        if request.num_pending_tokens:
            return False
        # One spare block per running request: enough for each to grow a while before one must be preempted.
        num_spare_blocks = len(self._live.running) - len(leaving)
        return self._kv_cache.can_admit(request, num_spare_blocks=num_spare_blocks, leaving=leaving)


class Passing:
    """The account of the long prompt that short ones pass now. A share of 0: it is not passed.

    Prompts are computed in the order of the policy, and one that takes many steps would keep all behind it waiting for
    its end. So prompts that fit into one step pass it, but not for free: what they take of the steps is counted against
    the long one's own progress, and stays below a fixed share of it.

        budget      ████████ ████████ ████████ ████████
        long        ████████ ███████░ ███████░ ██████░░          share 0.15
        passing            ·        a        b       cc          what they leave is the long one's, and theirs later
    """

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


class Admission:
    """Lets waiting requests enter. They get their first share of the step at once."""

    def __init__(
        self,
        config: SchedulerSettings,
        *,
        kv_cache: KVCacheManager,
        policy: SchedulingPolicy,
        live: LiveRequests,
        batching: ContinuousBatching,
        pace: DecodePace,
        entry: Entry,
        shares: ShareAllocator,
    ) -> None:
        self._is_chunked = config.prefill_mode == "chunked"
        self._skip_window = config.skip_window
        self._max_head_skips = config.max_head_skips
        self._preemption_mode = config.preemption_mode
        self._passing = Passing(config.short_prompt_share)
        self._kv_cache = kv_cache
        self._policy = policy
        self._live = live
        self._waiting = live.waiting
        self._batching = batching
        self._pace = pace
        self._entry = entry
        self._shares = shares

    def admit_waiting(self, plan: StepPlan) -> None:
        """Admit waiting requests in policy order; past one that does not fit, but only so far and so often."""
        entrants = self._batching.entrants(self._live, now_s=plan.now_s)
        if entrants is Entrants.NONE:
            return
        index, num_displaced, has_time = 0, 0, True
        while plan.budget.left and index <= self._skip_window:
            has_seat = self._live.num_free_seats > 0
            if not has_seat and not self._policy.displaces:
                break  # most steps: no request has left, and the queue need not be looked at
            request = self._waiting.peek(index)
            if request is None or not self._batching.may_enter(request, entrants):
                break
            if has_seat and self._kv_cache.should_wait(request):
                index += 1  # not for long, and not for want of room: requests that pass it take nothing from it
            elif has_seat and self._entry.fits(request):
                self._shorten_for(plan, request)
                has_time = self._has_time_for(plan, request)
                if not has_time:
                    break
                self._count_skips(index)
                self._admit(plan, request)
                index = 0
            elif index == 0 and (victims := self._choose_displaced(plan, request, most=MAX_DISPLACED - num_displaced)):
                num_displaced += len(victims)
                for victim in victims:
                    self._shares.preempt(plan, victim)
            elif not has_seat or self._live.num_skips(request) >= self._max_head_skips:
                break
            else:
                index += 1
        self._batching.note_admitted(self._live, entrants, is_step_full=not plan.budget.left or not has_time)

    def let_short_pass(self, plan: StepPlan, prompts: list[Request]) -> None:
        """Compute prompts that fit into one step before the first that does not, as far as it may be slowed by it.
        `prompts`: the running requests whose prompts are not complete."""
        index = next((i for i, one in enumerate(prompts) if self._is_long(plan, one, one.num_remaining_tokens)), None)
        if index is None:
            return  # most steps
        self._shorten(plan)
        long, before, behind = prompts[index], prompts[:index], prompts[index + 1 :]
        num_left = plan.budget.left - sum(one.num_remaining_tokens for one in before)
        if num_left <= 0 or plan.preempted or self._policy.divides_steps:
            return
        num_tokens = self._passing.allowance(long, num_left)
        num_reserved = plan.budget.left - num_tokens
        plan.budget.take(num_reserved)
        short = [one for one in behind if not self._is_long(plan, one, one.num_remaining_tokens)]
        self._shares.compute_each(plan, short)
        while plan.budget.left and not plan.preempted:
            request = self._find_passing(plan, long)
            if request is None or self._kv_cache.should_wait(request) or not self._entry.fits(request):
                break
            self._admit(plan, request)
        self._passing.charge(num_tokens - plan.budget.left)
        plan.budget.refund(num_reserved)

    # ---- steps of admission ---------------------------------------------------------------------------------------

    def _admit(self, plan: StepPlan, request: Request) -> None:
        new = self._live.admit(
            request,
            restore_mode=self._preemption_mode if request.num_preemptions else "auto",
            token_s=self._pace.step_time.per_token_s,
        )
        plan.admitted.append(new)
        self._shares.compute(plan, request)

    def _count_skips(self, num_passed: int) -> None:
        """Count that a request is admitted past the first ones."""
        for index in range(num_passed):
            passed = self._waiting.peek(index)
            assert passed is not None
            self._live.skip(passed)

    def _has_time_for(self, plan: StepPlan, request: Request) -> bool:
        """Whether the step has tokens left for a prompt. Where prompts are not cut, it must fit as a whole, unless it
        is the first: one that fits into no step is cut all the same."""
        if self._is_chunked or not plan.scheduled:
            return plan.budget.left > 0
        return request.num_tokens - self._kv_cache.num_cached_tokens(request) <= plan.budget.left

    def _choose_displaced(self, plan: StepPlan, request: Request, *, most: int) -> list[Request]:
        """Running requests to preempt so that a waiting one can enter, as the policy chooses them. None, if it could
        not enter after `most` of them: no request is preempted for nothing."""
        live = self._live
        if request.num_pending_tokens or not live.running or live.held or self._kv_cache.should_wait(request):
            return []
        if plan.displaceable is None:  # requests that enter after this are not among them
            new_ids = {new.request_id for new in plan.admitted}
            plan.displaceable = [one for one in self._shares.preemptible() if one.request_id not in new_ids]
        candidates = [one for one in plan.displaceable if one not in plan.preempted]
        victims: list[Request] = []
        while candidates and len(victims) < most:
            victim = self._policy.choose_displaced(request, candidates)
            if victim is None:
                break
            candidates.remove(victim)
            victims.append(victim)
            if self._entry.fits(request, leaving=victims):
                return victims
        return []

    # ---- long prompts ---------------------------------------------------------------------------------------------

    def _find_passing(self, plan: StepPlan, long: Request) -> Request | None:
        """The first waiting request that may pass a long prompt: it fits into a step, and the policy does not put it
        behind. The last seat is left to the first in the queue, and requests that are overdue are not passed."""
        num_seats, num_overdue = self._live.num_free_seats, self._waiting.num_overdue
        if not num_seats:
            return None
        entry_key, num_first = self._live.entry_key(long), self._skip_window + 1
        for index in range(min(num_overdue, num_first) if num_overdue else num_first):
            request = self._waiting.peek(index)
            if request is None or (index and num_seats == 1):
                return None
            is_short = self._num_uncached(plan, request) <= plan.max_short_tokens
            if is_short and self._policy.key(request) <= entry_key:
                return request
        request = None if num_overdue else self._waiting.first_short(plan.max_short_tokens)
        return None if request is None or self._policy.key(request) > entry_key else request

    def _is_long(self, plan: StepPlan, request: Request, num_tokens: int) -> bool:
        """Whether these tokens of a prompt take more than one step, so that shorter ones pass it. Those at the end of a
        long prompt count for more than they are, since they look back at all before."""
        is_long = request.num_tokens > plan.max_short_tokens and num_tokens > plan.max_long_tokens
        return is_long and not self._batching.seals

    def _num_uncached(self, plan: StepPlan, request: Request) -> int:
        """How many tokens of a waiting request would have to be computed; the cache is asked only if it matters."""
        if request.num_tokens <= plan.max_short_tokens:
            return request.num_tokens
        return request.num_tokens - self._kv_cache.num_cached_tokens(request)

    def _shorten_for(self, plan: StepPlan, request: Request) -> None:
        """Shorten the step if the request that enters it has a long prompt."""
        if self._is_chunked and self._is_long(plan, request, self._num_uncached(plan, request)):
            self._shorten(plan)

    def _shorten(self, plan: StepPlan) -> None:
        """Limit a step with a long prompt: requests that arrive meanwhile must not wait long for its end. A batch of
        work that was there from its start, while no other request has arrived for long, is computed at full speed."""
        quiet_s = plan.now_s - self._live.last_joined_s
        if len(self._live.by_id) == 1 or quiet_s < QUIET_STEPS * self._pace.long_step_s:
            num_taken = plan.num_prompt_tokens - plan.budget.left
            plan.budget.cap(max(0, plan.max_long_tokens - num_taken))
