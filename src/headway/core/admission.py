"""Admits waiting requests to the batch, in the policy's order. A request that does not fit may be passed, and the
policy may preempt running requests for one that finds no seat or memory."""

from __future__ import annotations

from headway.core.kv.manager import KVCacheManager
from headway.core.live_requests import LiveRequests
from headway.core.long_prompts import shorten_for
from headway.core.policy import SchedulingPolicy
from headway.core.request import Request
from headway.core.shares import ShareAllocator, StepPlan
from headway.settings import SchedulerSettings

MAX_DISPLACED = 4
"""At most this many running requests are preempted in one step for waiting ones."""


class Admission:
    """Admits waiting requests. They get their first share of the step at once."""

    def __init__(
        self,
        config: SchedulerSettings,
        *,
        kv_cache: KVCacheManager,
        policy: SchedulingPolicy,
        live: LiveRequests,
        shares: ShareAllocator,
    ) -> None:
        self._config = config
        self._kv_cache = kv_cache
        self._policy = policy
        self._live = live
        self._shares = shares
        self._skip_window = config.skip_window
        self._displaces = policy.displaces

    def admit_waiting(self, plan: StepPlan) -> None:
        """Admit waiting requests in policy order. A request that does not fit may be passed, at most `max_head_skips`
        times, and only by the `skip_window` requests after it."""
        live = self._live
        if live.fetching.blocked:
            live.fetching.retry()
        index, num_displaced = 0, 0
        while plan.budget.left and index <= self._skip_window:
            has_seat = live.num_free_seats > 0
            if not has_seat and not self._displaces:
                break  # most steps: no request has left, so the queue is not inspected
            request = self._peek(index)
            if request is None:
                break
            if has_seat and self._kv_cache.should_wait(request):
                index += 1  # it waits for a short time for a block, not for room: passing it takes nothing from it
            elif live.fetch(request):
                continue  # it has left the queue
            elif has_seat and live.fits(request):
                if request.num_tokens > plan.max_short_tokens:
                    shorten_for(plan, request, policy=self._policy, live=live)
                if not self._has_time_for(plan, request):
                    break
                self._count_skips(index)
                self._shares.admit(plan, request)
                index = 0
            elif index == 0 and (victims := self._choose_displaced(plan, request, MAX_DISPLACED - num_displaced)):
                num_displaced += len(victims)
                for victim in victims:
                    self._shares.preempt(plan, victim)
            elif not has_seat or live.num_skips.get(request, 0) >= self._config.max_head_skips:
                break
            else:
                index += 1

    def _peek(self, index: int) -> Request | None:
        """Return the waiting request at this index from the front, if it may be admitted."""
        return self._live.waiting.peek(index)

    def _has_time_for(self, plan: StepPlan, request: Request) -> bool:
        """Whether the step has tokens left for a prompt."""
        return plan.budget.left > 0

    def _count_skips(self, num_passed: int) -> None:
        """Count that a request is admitted past the first `num_passed` ones."""
        for index in range(num_passed):
            passed = self._peek(index)
            assert passed is not None
            self._live.skip(passed)

    def _choose_displaced(self, plan: StepPlan, request: Request, most: int) -> list[Request]:
        """Return the running requests to preempt so that a waiting one can be admitted, as the policy chooses them. The
        list is empty if `most` of them would not make enough room, so that none is preempted in vain."""
        live = self._live
        if not self._displaces or request.num_pending_tokens or not live.running or self._kv_cache.should_wait(request):
            return []
        if plan.displaceable is None:  # requests admitted in this step are not among them
            new_ids = {new.request_id for new in plan.admitted}
            plan.displaceable = [one for one in live.preemptible() if one.request_id not in new_ids]
        candidates = [one for one in plan.displaceable if one not in plan.preempted]
        victims: list[Request] = []
        while candidates and len(victims) < most:
            victim = self._policy.choose_displaced(request, candidates)
            if victim is None:
                break
            candidates.remove(victim)
            victims.append(victim)
            if live.fits(request, leaving=victims):
                return victims
        return []
