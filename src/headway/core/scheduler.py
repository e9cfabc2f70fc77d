"""The scheduler: decides which requests compute how many tokens in the next step.

There is no prefill phase and no decode phase. A request has `num_tokens` tokens, of which `num_computed_tokens` are in
the KV cache. Each step lets `num_computed_tokens` catch up with `num_tokens`, within the step's token budget. This one
rule covers a whole prompt, a prefill chunk, a decode token and a preempted request that is readmitted.

A step may be planned while earlier ones are in flight. Planning advances the requests as if the step had run, and the
tokens that it will sample already count as theirs (see `Request`). The result only adds their values.

    live_requests   the state of each request: waiting, fetching or running
    fetching        requests that wait for remote blocks
    shares          how a request gets its share of a step, and which request is preempted for it
    long_prompts    how short prompts pass a long one
    admission       which waiting requests enter the batch, and which running ones are displaced for them
    landing         steps in flight, and what their results change
    speculation     which requests verify drafts, and how many tokens of them
    forecast        how long a request will wait for its first token
    eras            schedulers without continuous batching or chunked prefill, for comparisons

The schedule depends only on the calls: arrivals, aborts, results, and how long steps took. There is no clock and no
randomness here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import ClassVar

from headway.core.admission import Admission
from headway.core.forecast.forecaster import Forecaster
from headway.core.kv.manager import KVCacheManager
from headway.core.landing import Landing, LaunchedStep
from headway.core.live_requests import LiveRequests
from headway.core.long_prompts import LongPrompts
from headway.core.policy import PolicyView, SchedulingPolicy, create_policy
from headway.core.queue import GuardedQueue, WaitingQueue
from headway.core.request import Request, RequestStatus
from headway.core.scheduler_output import (
    ModelRunnerOutput,
    RequestUpdate,
    ScheduledRequest,
    SchedulerOutput,
    advance_requests,
    make_tuple,
)
from headway.core.shares import ShareAllocator, StepPlan, TokenBudget
from headway.core.speculation import create_speculation
from headway.core.step_time import DecodePace
from headway.core.token_time import TokenTime
from headway.errors import InvalidRequestError, RequestTooLargeError
from headway.settings import SchedulerSettings

_RUNNING = RequestStatus.RUNNING  # an enum's own attributes are slow to look up


class Scheduler:
    """Owns all live requests. `schedule()` plans a step; `update()` takes in the results, in the order of the steps."""

    admission_kind: ClassVar[type[Admission]] = Admission
    can_foresee: ClassVar[bool] = True
    """Whether steps are planned as forecasts imagine them."""

    def __init__(self, config: SchedulerSettings, kv_cache: KVCacheManager) -> None:
        self.config = config
        self.kv_cache = kv_cache
        self.pace = DecodePace(
            target_s=config.target_itl_ms / 1e3,
            long_step_s=config.long_prompt_step_ms / 1e3,
            max_tokens=config.max_num_batched_tokens,
            full_tokens=config.full_step_tokens,
        )
        self.token_time = TokenTime(self.pace)
        view = PolicyView(kv_cache, self.pace, max_head_skips=config.max_head_skips)
        self.policy: SchedulingPolicy = create_policy(config.scheduling_policy, view)
        self.live = LiveRequests(config, waiting=self._create_queue(), kv_cache=kv_cache, policy=self.policy)
        self.speculation = create_speculation(config, kv_cache=kv_cache, pace=self.pace)
        self.landing = Landing(
            kv_cache=kv_cache,
            policy=self.policy,
            live=self.live,
            verifier=self.speculation,
            finish=self.finish_request,
        )
        self.forecaster = Forecaster(
            config,
            kv_cache=kv_cache,
            live=self.live,
            policy=self.policy,
            pace=self.pace,
            in_flight=self.landing.in_flight,
            can_foresee=self.can_foresee,
        )
        self._shares = ShareAllocator(
            kv_cache=kv_cache, policy=self.policy, live=self.live, landing=self.landing, can_enter=self.can_enter
        )
        self._long_prompts = LongPrompts(config, policy=self.policy, live=self.live, shares=self._shares)
        self._admission = self.admission_kind(
            config, kv_cache=kv_cache, policy=self.policy, live=self.live, shares=self._shares
        )
        self._num_steps = 0

    def _create_queue(self) -> WaitingQueue:
        """Create the policy's queue, with a guard if requests could starve in it."""
        queue = self.policy.create_queue(self.config.skip_window + 1)
        if not self.policy.can_starve or not self.config.starvation_ms:
            return queue
        return GuardedQueue(
            queue,
            grace_s=self.config.starvation_ms / 1e3,
            stretch=self.config.starvation_stretch,
            promise_s=self.policy.promise_s,
        )

    def inherit(self, other: Scheduler) -> None:
        """Replace another scheduler, which is done. The runner still has to forget its last requests."""
        self.live.inherit_departures(other.live)
        self._num_steps = other._num_steps

    def learn_from(self, other: Scheduler) -> None:
        """Know what another scheduler has learned: how long steps take, and what drafts cost and are worth."""
        self.pace.learn_from(other.pace)
        if self.speculation is not None and other.speculation is not None:
            self.speculation.learn_from(other.speculation)

    # ---- one step -------------------------------------------------------------------------------------------------

    def schedule(self, *, now_s: float = 0.0) -> SchedulerOutput:
        """Plan the next step: let `num_computed_tokens` of each request catch up with its `num_tokens`.

        Running requests come first, decodes before prefill chunks so that no decode stalls. Then waiting requests are
        admitted. `now_s` is the current time for policies and pinned blocks.

        An empty plan is not a step: it needs no result, and departed requests are reported with the next plan. It may
        still have transfers to begin. If no step is in flight and requests are live, a plan is empty only if requests
        wait for blocks (`live.fetching`) or for a time (`ready_at_s`), or have ended without a result (`take_ends`).
        """
        self._advance(now_s)
        if self.speculation is not None and self.in_flight and self.speculation.must_await(self.in_flight[-1].output):
            return self.nothing()
        plan = StepPlan(now_s, TokenBudget(self.config.max_num_batched_tokens, self.config.max_chunk_tokens))
        self._fill(plan)
        if self.speculation is not None:
            self.speculation.note_planned()
            if not plan.preempted:
                self.speculation.add_drafts(plan)
        if plan.scheduled:
            return self._launch(plan)
        return SchedulerOutput.empty(self._num_steps, self.kv_cache.take_transfers())

    def update(
        self, output: SchedulerOutput, result: ModelRunnerOutput, *, duration_s: float | None = None
    ) -> list[RequestUpdate]:
        """Append the sampled tokens and finish the requests that they end. Returns an update for each changed request.

        Requests that have ended in the meantime are skipped. From `duration_s`, if it is known, the scheduler learns
        how large later steps may be.
        """
        if output.is_empty:
            return []
        updates = self.landing.land(output, result, duration_s=duration_s)
        if duration_s is not None:
            self.token_time.take(output, duration_s)
        return updates

    def nothing(self) -> SchedulerOutput:
        """Return an empty plan."""
        return SchedulerOutput.empty(self._num_steps)

    # ---- requests -------------------------------------------------------------------------------------------------

    def add_request(self, request: Request, *, now_s: float | None = None) -> None:
        """Queue a request. Raises `InvalidRequestError` if its id is in use, and `RequestTooLargeError` if it could
        never run to its end.

        `now_s` is its arrival time, by the clock of `schedule`. The default is the time of the last planned step.
        """
        if request.request_id in self.live.by_id:
            raise InvalidRequestError(f"Request id '{request.request_id}' is already in use.", param="request_id")
        self.check_fits(request)
        now_s = self.live.now_s if now_s is None else now_s
        self.live.add(request, now_s=now_s)
        self.forecaster.note_arrival(request, now_s=now_s)

    def check_fits(self, request: Request) -> None:
        """Raise `RequestTooLargeError` if a request could never run to its end, however long it waits."""
        if not self.kv_cache.can_ever_fit(request):
            raise RequestTooLargeError(
                f"Request '{request.request_id}' needs up to {request.max_kv_tokens} tokens of KV cache "
                f"({request.num_prompt_tokens} prompt + {request.max_total_tokens - request.num_prompt_tokens} output),"
                f" but the whole cache holds {self.kv_cache.capacity_tokens}. "
                "Shorten the prompt, lower max_tokens, or give the cache more memory."
            )

    def finish_request(self, request_id: str, status: RequestStatus) -> Request:
        """End a request in any state and free its blocks at once.

        If a step with this request is in flight, the step's result for the request is dropped.
        """
        request = self.live.finish(request_id, status)
        self.forecaster.note_end(request, status)
        return request

    def fetch_done(self, digest: bytes, ok: bool, *, seconds: float = 0.0) -> None:
        """Note that a planned fetch has ended after `seconds`. If `ok`, the block is in its slot. Every planned fetch
        must be reported here once."""
        tiers = self.kv_cache.tiers
        assert tiers is not None, "a fetch has ended that was not planned"
        tiers.host.fetch_done(digest, ok, seconds=seconds)
        if self.live.fetching.fetch_done(digest, ok):
            tiers.may_prefetch(digest)

    def take_ends(self) -> list[RequestUpdate]:
        """Return updates for requests that have ended since the last result without a call. Their tokens have been
        delivered before."""
        return []

    def ready_at_s(self) -> float | None:
        """If nothing could be planned although requests wait: the time from which it can; None if waiting is no use."""
        return None if self.in_batch or not self.live.waiting else self.live.now_s

    def can_enter(self, request: Request) -> bool:
        """Whether a waiting request would be admitted now if it were first in the queue."""
        return self.live.can_enter(request)

    # ---- what there is --------------------------------------------------------------------------------------------

    @property
    def requests(self) -> dict[str, Request]:
        """All live requests by their ids."""
        return self.live.by_id

    @property
    def in_batch(self) -> Sequence[Request]:
        """Requests that have a seat and blocks."""
        return self.live.running

    @property
    def num_waiting(self) -> int:
        """How many requests have no seat."""
        return len(self.live.waiting) + len(self.live.fetching.requests)

    @property
    def in_flight(self) -> deque[LaunchedStep]:
        """Launched steps whose results are outstanding, oldest first."""
        return self.landing.in_flight

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether any request is live."""
        return bool(self.live.by_id)

    @property
    def num_used_slots(self) -> int:
        """KV slots that hold a token of a running request; a slot that several requests share counts once."""
        kv_cache = self.kv_cache
        num_empty = kv_cache.num_table_entries * kv_cache.block_size - self.live.num_computed_tokens
        return kv_cache.num_used_blocks * kv_cache.block_size - num_empty

    @property
    def kv_waste(self) -> float | None:
        """The unused fraction of the KV memory reserved for requests in the batch; `None` if none is reserved."""
        reserved = self.kv_cache.num_reserved_blocks * self.kv_cache.block_size
        return 1.0 - self.num_used_slots / reserved if reserved else None

    # ---- the parts of schedule() ----------------------------------------------------------------------------------

    def _advance(self, now_s: float) -> None:
        """Set the time of the step that is being planned."""
        self.policy.view.advance(now_s)
        self.live.advance(now_s)
        self.kv_cache.advance(now_s)

    def _fill(self, plan: StepPlan) -> None:
        """Schedule the decodes first, and then prefill chunks that fit beside them."""
        prompts = [request for request in self._continue_decodes(plan) if request.status is _RUNNING]
        self._limit_prompts(plan, prompts)
        if any(plan.is_long(one, one.num_remaining_tokens) for one in prompts):
            self._long_prompts.let_short_pass(plan, prompts)
        self._shares.compute_each(plan, prompts)
        if not plan.preempted:
            self._admission.admit_waiting(plan)

    def _continue_decodes(self, plan: StepPlan) -> list[Request]:
        """Schedule one token for each running request with one token to compute. Returns those with more to compute.

        The budget always has room for the decodes, since max_num_batched_tokens is at least max_num_seqs. The last
        block of a request nearly always has room too, and then there is nothing to decide.
        """
        longer = []
        scheduled, preempted, block_size = plan.scheduled, plan.preempted, self.kv_cache.block_size
        uncached = self.kv_cache.uncached
        num_taken = 0
        for request in self.live.running.copy():
            if preempted and request.status is not _RUNNING:  # it was preempted for an earlier request of this loop
                continue
            num_computed = request.num_computed_tokens
            num_behind = request.num_tokens - num_computed
            if num_behind != 1:
                longer.append(request)
            elif num_computed == request.max_kv_tokens:  # its last token is pending
                continue
            elif num_computed % block_size:
                share = make_tuple(ScheduledRequest, (request.request_id, 1, num_computed, (), True, ()))
                scheduled[request] = share
                num_taken += 1
                if uncached and num_computed < uncached.get(request, 0):
                    plan.keeps[request] = share
            else:
                self._shares.compute(plan, request)
        plan.budget.take(num_taken)
        return longer

    def _limit_prompts(self, plan: StepPlan, prompts: Sequence[Request]) -> None:
        """Limit the step's prompt tokens so that decoding requests keep their target inter-token time."""
        num_decodes = len(plan.scheduled)
        target_s = self.policy.pace_s(self.pace.target_s)
        num_backlog_tokens = self.live.waiting.num_tokens + sum(one.num_remaining_tokens for one in prompts)
        if num_backlog_tokens:
            num_tokens = self.pace.chunk_tokens(
                target_s=target_s,
                num_decodes=num_decodes,
                num_backlog_tokens=num_backlog_tokens,
                limit_s=self.policy.step_limit_s(prompts),
            )
            plan.budget.cap(num_tokens)
        else:
            self.pace.note_decodes(num_decodes, target_s=target_s)  # most steps
        plan.num_prompt_tokens = plan.budget.left
        self._set_long(plan, num_decodes)

    def _set_long(self, plan: StepPlan, num_decodes: int) -> None:
        """Set the limits above which a prompt is long, so that short ones pass it."""
        num_left = plan.num_prompt_tokens
        plan.max_short_tokens = self.pace.max_short_tokens(num_left)
        plan.max_long_tokens = min(num_left, self.pace.long_tokens(num_decodes))

    def _launch(self, plan: StepPlan) -> SchedulerOutput:
        """Advance the requests as planned, so that the next step can be planned before this one has run. Returns it."""
        num_scheduled_tokens = advance_requests(plan.scheduled)
        self.policy.served(plan.scheduled)
        self.live.count_computed(num_scheduled_tokens)
        departures = self.live.take_departures()
        output = SchedulerOutput(
            step_id=self._num_steps,
            new_requests=tuple(plan.admitted),
            scheduled=tuple(plan.scheduled.values()),
            preempted_request_ids=departures.preempted_request_ids,
            finished_request_ids=departures.finished_request_ids,
            num_scheduled_tokens=num_scheduled_tokens,
            moves=self.kv_cache.take_moves(),
        )
        self._num_steps += 1
        self.landing.launch(LaunchedStep(output, tuple(plan.scheduled), plan.keeps))
        return output
