"""Which waiting requests enter the batch in a step: in the policy's order, and past a request that does not fit."""

from __future__ import annotations

from headway.core.kv.manager import KVCacheManager
from headway.core.kv.tiered_cache import FetchDecision
from headway.core.live_requests import LiveRequests
from headway.core.overtaking import Displacement, LongPrompts
from headway.core.policy import SchedulingPolicy
from headway.core.request import Request
from headway.core.step_time import DecodePace
from headway.core.steps import ShareAllocator, StepPlan
from headway.settings import SchedulerSettings

MAX_DISPLACED = 4
"""At most this many running requests are preempted in one step for others that wait."""


class Admission:
    """Lets waiting requests enter. They get their first share of the step at once."""

    def __init__(
        self,
        config: SchedulerSettings,
        *,
        kv_cache: KVCacheManager,
        policy: SchedulingPolicy,
        live: LiveRequests,
        pace: DecodePace,
        shares: ShareAllocator,
        long_prompts: LongPrompts,
    ) -> None:
        self._skip_window = config.skip_window
        self._max_head_skips = config.max_head_skips
        self._kv_cache = kv_cache
        self._live = live
        self._pace = pace
        self._waiting = live.waiting
        self._shares = shares
        self._long_prompts = long_prompts
        self._displacement = (
            Displacement(kv_cache=kv_cache, policy=policy, live=live, shares=shares) if policy.displaces else None
        )

    def admit_waiting(self, plan: StepPlan) -> None:
        """Admit waiting requests in policy order; past one that does not fit, but only so far and so often."""
        live = self._live
        live.retry_fetches(self._fetch)
        index, num_displaced = 0, 0
        while plan.budget.left and index <= self._skip_window:
            has_seat = live.num_free_seats > 0
            if not has_seat and self._displacement is None:
                break  # most steps: no request has left, and the queue need not be looked at
            request = self._peek(index)
            if request is None:
                break
            if has_seat and self._kv_cache.should_wait(request):
                index += 1  # not for long, and not for want of room: requests that pass it take nothing from it
            elif self._fetches(request):
                continue  # it has left the queue
            elif has_seat and live.fits(request):
                if request.num_tokens > plan.max_short_tokens:
                    self._long_prompts.shorten_for(plan, request)
                if not self._has_time_for(plan, request):
                    break
                self._count_skips(index)
                self._shares.admit(plan, request)
                index = 0
            elif index == 0 and (victims := self._choose_displaced(plan, request, MAX_DISPLACED - num_displaced)):
                num_displaced += len(victims)
                for victim in victims:
                    self._shares.preempt(plan, victim)
            elif not has_seat or live.num_skips.get(request, 0) >= self._max_head_skips:
                break
            else:
                index += 1

    def _peek(self, index: int) -> Request | None:
        """The waiting request at this index from the front, if it may enter."""
        return self._waiting.peek(index)

    def _fetches(self, request: Request) -> bool:
        """Whether the request waits for blocks that are elsewhere, from now on."""
        if self._kv_cache.tiers is None or not self._live.may_fetch(request):
            return False
        return self._live.fetch(request, self._fetch(request))

    def _fetch(self, request: Request) -> FetchDecision:
        assert self._kv_cache.tiers is not None
        return self._kv_cache.tiers.fetch(request, token_s=self._pace.step_time.per_token_s)

    def _has_time_for(self, plan: StepPlan, request: Request) -> bool:
        """Whether the step has tokens left for a prompt."""
        return plan.budget.left > 0

    def _count_skips(self, num_passed: int) -> None:
        """Count that a request is admitted past the first ones."""
        for index in range(num_passed):
            passed = self._peek(index)
            assert passed is not None
            self._live.skip(passed)

    def _choose_displaced(self, plan: StepPlan, request: Request, most: int) -> list[Request]:
        return [] if self._displacement is None else self._displacement.choose(plan, request, most=most)
