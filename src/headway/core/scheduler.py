"""The scheduler: which requests compute how many tokens in the next step.

There is no prefill phase and no decode phase. A request has `num_tokens` tokens, of which `num_computed_tokens` are in
the KV cache, and a step lets computed catch up with tokens, within the step's token budget. A whole prompt, a chunk of
one, a decode token, a preempted request coming back: all are the same rule.

A step may be planned while earlier ones are still under way: planning advances the requests as if the step had run, and
the tokens it is going to sample count as theirs (see `Request`). The result, when it comes, only says which they are.

The schedule is a function of what was called: arrivals, aborts, results, and how long steps took. There is no clock and
no chance in here.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headway.config import SchedulerConfig
from headway.core.batching import create_batching
from headway.core.decode_pace import DecodePace
from headway.core.kv_cache_manager import KVCacheManager
from headway.core.passing import Passing
from headway.core.policy import PolicyView, SchedulingPolicy, create_policy
from headway.core.queue import GuardedQueue, WaitingQueue
from headway.core.request import Request, RequestStatus
from headway.core.restore_choice import RestoreChoice
from headway.core.scheduler_output import (
    ModelRunnerOutput,
    NewRequest,
    PromptLogprobs,
    SampledTokens,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
    make_tuple,
)
from headway.core.token_budget import TokenBudget
from headway.errors import InvalidRequestError, RequestNotFoundError, RequestTooLargeError

_RUNNING, _PREEMPTED = RequestStatus.RUNNING, RequestStatus.PREEMPTED  # an enum's own attributes are slow to look up
_NO_TOKEN = SampledTokens((), error="the executor returned no token for it")

MAX_DISPLACED = 4
"""So many running requests may be preempted in one step for others that wait."""
QUIET_STEPS = 100
"""For so many steps with a long prompt no request has come, and none is expected."""


class RequestUpdate(NamedTuple):
    """What a step changed for one request: new tokens and perhaps its end, or what was found about its prompt."""

    request_id: str
    new_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_status: RequestStatus | None
    error: str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    held_status: RequestStatus | None = None
    """These are its last tokens, and it is going to end like this: with a later update, when its sealed batch is done.
    """


class LaunchedStep(NamedTuple):
    """A step whose result has not come. It holds requests, not ids: an id may belong to somebody else by then."""

    output: SchedulerOutput
    requests: tuple[Request, ...]
    """One for each of `output.scheduled`, in the same order."""
    keeps: dict[Request, ScheduledRequest]
    """Shares of tokens that requests came with, as far as others may find them if the step succeeds: they fill a block
    or are the last. Who is preempted meanwhile is taken out, since its blocks are not its own any more."""


@dataclass(slots=True)
class _StepPlan:
    """A step while it is being put together."""

    budget: TokenBudget
    num_prompt_tokens: int = 0  # of the budget, what decodes leave to prompts
    max_short_tokens: int = 0  # a prompt with more to compute is long: it takes several steps
    max_long_tokens: int = 0  # of prompts, if there is a long one among them
    scheduled: dict[Request, ScheduledRequest] = field(default_factory=dict)
    keeps: dict[Request, ScheduledRequest] = field(default_factory=dict)  # as in `LaunchedStep`
    admitted: list[NewRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    displaceable: list[Request] | None = None  # who may have to leave for one that waits, once anybody has asked


class Scheduler:
    """Owns all live requests. `schedule()` plans a step, `update()` takes a result, in the order of the steps."""

    def __init__(self, config: SchedulerConfig, kv_cache: KVCacheManager) -> None:
        self.config = config
        self.limits = config.limits
        self.kv_cache = kv_cache
        self.pace = DecodePace(
            target_s=self.limits.target_itl_ms / 1e3,
            long_step_s=self.limits.long_prompt_step_ms / 1e3,
            max_tokens=self.limits.max_num_batched_tokens,
        )
        self.kv_cache.restore_choice = RestoreChoice(
            mode=config.preemption_mode,
            restore_block_s=kv_cache.restore_choice.restore_block_s,
            token_s=lambda: self.pace.step_time.per_token_s,
        )
        self.view = PolicyView(kv_cache, self.pace, self._can_enter, max_head_skips=config.max_head_skips)
        self.policy: SchedulingPolicy = create_policy(config.scheduling_policy, self.view)
        self.batching = create_batching(config.batching, window_s=config.batch_window_ms / 1e3)
        self.passing = Passing(config.short_prompt_share)
        self.requests: dict[str, Request] = {}
        self.waiting = self.batching.create_queue(self._create_queue)
        self.running: list[Request] = []  # in the order they had when they entered
        self.held: dict[Request, RequestStatus] = {}  # of a sealed batch: who is done, and how
        self.in_flight: deque[LaunchedStep] = deque()
        self._num_computed_tokens = 0  # of all running and held requests together
        self._preempted_request_ids: list[str] = []  # since the last step, for the runner to forget
        self._finished_request_ids: list[str] = []  # likewise
        self._num_arrivals = 0
        self._joined_s = -math.inf  # when a request last came while others ran
        self._num_steps = 0

    def inherit(self, other: Scheduler) -> None:
        """Take the place of another scheduler that is done: the runner still has to forget its last requests."""
        self._finished_request_ids += other._finished_request_ids
        self._preempted_request_ids += other._preempted_request_ids
        self._num_steps = other._num_steps

    def _create_queue(self) -> WaitingQueue:
        """The policy's line, guarded where requests could starve in it."""
        queue = self.policy.create_queue(self.config.skip_window + 1)
        if not self.policy.can_starve or not self.config.starvation_ms:
            return queue
        return GuardedQueue(
            queue,
            grace_s=self.config.starvation_ms / 1e3,
            stretch=self.config.starvation_stretch,
            promise_s=self.policy.promise_s,
        )

    # ---- requests come and go -------------------------------------------------------------------------------------

    def add_request(self, request: Request, *, now_s: float | None = None) -> None:
        """Queue a request. One that could never run to its end is refused here, with the reason.

        `now_s`: when it came, by the clock of `schedule`; without it, when the last step was planned.
        """
        if request.request_id in self.requests:
            raise InvalidRequestError(f"Request id '{request.request_id}' is already in use.", param="request_id")
        self.check_fits(request)
        request.arrival_index = self._num_arrivals
        request.arrival_s = self.view.now_s if now_s is None else now_s
        if request.queue_place < 0:
            request.queue_place = request.arrival_index
        self._num_arrivals += 1
        if self.running:
            self._joined_s = request.arrival_s
        self.requests[request.request_id] = request
        self.waiting.push(request)

    def check_fits(self, request: Request) -> None:
        """Raise if a request could never run to its end, however long it waits."""
        if not self.kv_cache.can_ever_fit(request):
            raise RequestTooLargeError(
                f"Request '{request.request_id}' needs up to {request.max_kv_tokens} tokens of KV cache "
                f"({request.num_prompt_tokens} prompt + {request.max_total_tokens - request.num_prompt_tokens} output),"
                f" but the whole cache holds {self.kv_cache.capacity_tokens}. "
                "Shorten the prompt, lower max_tokens, or give the cache more memory."
            )

    def stop_request(self, request_id: str) -> bool:
        """A stop string has been found in what a live request has got: it needs no more tokens. Returns whether it has
        ended; otherwise its end comes with that of its sealed batch, like any other's."""
        request = self.requests.get(request_id)
        if request is not None and request.status is _RUNNING and self._is_kept(request):
            self._hold(request, RequestStatus.FINISHED_STOPPED)
            return False
        self.finish_request(request_id, RequestStatus.FINISHED_STOPPED)
        return True

    def finish_request(self, request_id: str, status: RequestStatus) -> Request:
        """End a request from outside (abort, error) in any state; its blocks are free at once.

        If a step with this request is under way, what comes of it is dropped.
        """
        request = self.requests.get(request_id)
        if request is None:
            raise RequestNotFoundError(f"No live request has the id '{request_id}'.")
        old_status = request.status
        request.move_to(status)
        del self.requests[request_id]
        if old_status is RequestStatus.RUNNING:
            self._stop_running(request)
        elif old_status is RequestStatus.HELD:
            del self.held[request]
            self._free(request)
        else:
            self.waiting.remove(request)
            return request
        self._finished_request_ids.append(request_id)
        return request

    def release_held(self) -> list[RequestUpdate]:
        """If all of a sealed batch are done, let them go; returns their ends. Their tokens have come before."""
        if self.running or not self.held:
            return []
        held = list(self.held.items())
        for request, status in held:
            self.finish_request(request.request_id, status)
        return [RequestUpdate(request.request_id, (), (), status) for request, status in held]

    def opens_at_s(self) -> float | None:
        """If nothing can be planned now although requests wait: when that changes by itself."""
        if self.running or self.held or not self.waiting:
            return None
        seats = self.limits.max_num_seqs
        return self.batching.opens_at_s(self.waiting, num_seats=seats, now_s=self.view.now_s)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.requests)

    @property
    def num_used_slots(self) -> int:
        """KV slots that hold a token of a running request; a slot that several of them share counts once."""
        kv_cache = self.kv_cache
        num_empty = kv_cache.num_table_entries * kv_cache.block_size - self._num_computed_tokens
        return kv_cache.num_used_blocks * kv_cache.block_size - num_empty

    @property
    def kv_waste(self) -> float | None:
        """Which part of the KV memory that is kept for requests in the batch holds nothing; `None` if none is kept."""
        reserved = self.kv_cache.num_reserved_blocks * self.kv_cache.block_size
        return 1.0 - self.num_used_slots / reserved if reserved else None

    # ---- one step -------------------------------------------------------------------------------------------------

    def schedule(self, *, now_s: float = 0.0) -> SchedulerOutput:
        """Plan the next step: running requests first, decodes before chunks so that none stalls; then admissions.

        An empty plan is not a step: it needs no result, and what it would have told the runner comes with the next. If
        no step is in flight and there are live requests, the plan is never empty, but for two cases: a batch is still
        being waited for (`opens_at_s`), or all of a sealed one are done (`release_held`). `now_s`: policies and blocks
        that are kept for a while go by it.
        """
        self.view.now_s = now_s
        self.waiting.advance(now_s)
        if self.kv_cache.prefix_cache is not None:
            self.kv_cache.prefix_cache.now_s = now_s
        plan = _StepPlan(TokenBudget(self.limits.max_num_batched_tokens, self.config.max_chunk_tokens))
        if self.config.prefill_mode == "chunked":
            self._mix(plan)
        elif self.config.prefill_mode == "prefill-first":
            self._compute_prompts(plan)
            if not plan.scheduled:
                self._continue_decodes(plan)
        else:
            self._continue_decodes(plan)
            if not plan.scheduled:
                self._compute_prompts(plan)
        return self._commit(plan)

    def nothing(self) -> SchedulerOutput:
        """A plan with nothing in it."""
        return SchedulerOutput.empty(self._num_steps)

    def _mix(self, plan: _StepPlan) -> None:
        """Decodes, and prompts in chunks that fit beside them."""
        longer = self._continue_decodes(plan)
        prompts = [request for request in longer if request.status is _RUNNING]
        self._spare_decodes(plan, prompts)
        plan.num_prompt_tokens = plan.budget.left
        plan.max_short_tokens = self.pace.max_short_tokens(plan.budget.left)
        plan.max_long_tokens = min(plan.budget.left, self.pace.long_tokens(len(plan.scheduled)))
        self._let_short_pass(plan, prompts)
        self._continue_chunks(plan, prompts)
        if not plan.preempted:
            self._admit_waiting(plan)

    def _compute_prompts(self, plan: _StepPlan) -> None:
        """Prompts only, and each at once if a step can hold it at all."""
        self._continue_chunks(plan, [request for request in self.running if request.num_remaining_tokens > 1])
        if not plan.preempted:
            self._admit_waiting(plan)

    def update(
        self, output: SchedulerOutput, result: ModelRunnerOutput, *, duration_s: float | None = None
    ) -> list[RequestUpdate]:
        """Append the sampled tokens and finish the requests they end. Requests that ended meanwhile are passed over.

        `duration_s`, where it is known, teaches how large later steps may be.
        """
        if output.is_empty:
            return []
        step = self._landed(output)
        requests = step.requests
        if duration_s is not None:
            # Each request takes part with one token at least; what tells a step with prompts are the others.
            num_chunk_tokens = output.num_scheduled_tokens - len(output.scheduled)
            self.pace.observe(
                num_chunk_tokens=num_chunk_tokens, num_decodes=len(output.scheduled), duration_s=duration_s
            )
            self.view.observe_step(duration_s)
        if output.moves.moved_out and _all_failed(output, result):
            self.kv_cache.distrust(output.moves)
        self._keep_computed(step, result)
        updates = _prompt_logprobs(requests, result) if result.prompt_logprobs else []
        sampled_by_id = result.sampled
        for request, share in zip(requests, output.scheduled):
            sampled = sampled_by_id.get(request.request_id)
            if sampled is None:
                if not share.samples:
                    continue
                sampled = _NO_TOKEN
            status = request.status
            if status is _RUNNING or status is _PREEMPTED:
                updates.append(self._append(request, sampled))
        # Behind beams others may follow in the same batch: the engine adds them before it asks for the next plan.
        if self.held and not self.running and not any(request.is_beam for request in requests):
            updates += self.release_held()
        return updates

    # ---- the parts of schedule() ----------------------------------------------------------------------------------

    def _continue_decodes(self, plan: _StepPlan) -> list[Request]:
        """One token for each running request that is one behind. Returns those that are further behind.

        The budget always has room for them (max_num_batched_tokens is at least max_num_seqs), and nearly always the
        last block has too: then there is nothing to decide.
        """
        longer = []
        scheduled, preempted, block_size = plan.scheduled, plan.preempted, self.kv_cache.block_size
        has_cache = self.kv_cache.prefix_cache is not None
        num_taken = 0
        for request in self.running.copy():
            if preempted and request.status is not _RUNNING:  # it had to give way to one before it
                continue
            num_computed = request.num_computed_tokens
            num_behind = request.num_tokens - num_computed
            if num_behind != 1:
                longer.append(request)
            elif num_computed == request.max_kv_tokens:  # its last token is on the way
                continue
            elif num_computed % block_size:
                share = make_tuple(ScheduledRequest, (request.request_id, 1, num_computed, (), True))
                scheduled[request] = share
                num_taken += 1
                if has_cache and num_computed < request.num_admitted_tokens:
                    plan.keeps[request] = share
            else:
                self._compute_more(plan, request)
        plan.budget.take(num_taken)
        return longer

    def _spare_decodes(self, plan: _StepPlan, prompts: Sequence[Request]) -> None:
        """Leave prompts no more of the step than what keeps the requests that generate at their pace."""
        num_backlog_tokens = self.waiting.num_tokens + sum(request.num_remaining_tokens for request in prompts)
        self.pace.target_s = self.policy.pace_s(self.limits.target_itl_ms / 1e3)
        if not num_backlog_tokens:  # most steps
            self.pace.note_decodes(len(plan.scheduled))
            return
        num_tokens = self.pace.chunk_tokens(
            num_decodes=len(plan.scheduled),
            num_backlog_tokens=num_backlog_tokens,
            limit_s=self.policy.step_limit_s(prompts),
        )
        plan.budget.cap(num_tokens)

    def _let_short_pass(self, plan: _StepPlan, prompts: list[Request]) -> None:
        """Compute prompts that fit into one step before the first that does not, as far as it may be slowed by it."""
        place = next((i for i, one in enumerate(prompts) if self._is_long(plan, one, one.num_remaining_tokens)), None)
        if place is None:
            return  # most steps
        self._shorten(plan)
        long, before, behind = prompts[place], prompts[:place], prompts[place + 1 :]
        num_left = plan.budget.left - sum(one.num_remaining_tokens for one in before)
        if num_left <= 0 or plan.preempted or self.policy.divides_steps:
            return
        num_tokens = self.passing.allowance(long, num_left)
        num_held_back = plan.budget.left - num_tokens
        plan.budget.take(num_held_back)
        self._continue_chunks(plan, [one for one in behind if not self._is_long(plan, one, one.num_remaining_tokens)])
        while plan.budget.left and not plan.preempted:
            request = self._find_passing(plan, long)
            if request is None or self.kv_cache.should_wait(request) or not self._can_admit(request):
                break
            self._admit(plan, request)
        self.passing.passed(num_tokens - plan.budget.left)
        plan.budget.refund(num_held_back)

    def _find_passing(self, plan: _StepPlan, long: Request) -> Request | None:
        """The first waiting request that may pass a long prompt: it fits into a step, and the policy does not put it
        behind. The last seat is left to the first in the line, and who has waited too long is not passed."""
        num_seats, num_overdue = self.limits.max_num_seqs - self._num_in_batch(), self.waiting.num_overdue
        if not num_seats:
            return None
        num_places = self.config.skip_window + 1
        for place in range(min(num_overdue, num_places) if num_overdue else num_places):
            request = self.waiting.peek(place)
            if request is None or (place and num_seats == 1):
                return None
            is_short = self._num_uncached(plan, request) <= plan.max_short_tokens
            if is_short and self.policy.key(request) <= long.entry_key:
                return request
        request = None if num_overdue else self.waiting.first_short(plan.max_short_tokens)
        return None if request is None or self.policy.key(request) > long.entry_key else request

    def _is_long(self, plan: _StepPlan, request: Request, num_tokens: int) -> bool:
        """Whether so many tokens of a prompt take more than one step, so that shorter ones pass it. Those at the end of
        a long prompt count for more than they are, since they look back at all before."""
        is_long = request.num_tokens > plan.max_short_tokens and num_tokens > plan.max_long_tokens
        return is_long and not self.batching.seals

    def _num_uncached(self, plan: _StepPlan, request: Request) -> int:
        """How many tokens of a waiting request would have to be computed; the cache is asked only if it matters."""
        if request.num_tokens <= plan.max_short_tokens:
            return request.num_tokens
        return request.num_tokens - self.kv_cache.num_cached_tokens(request)

    def _shorten(self, plan: _StepPlan) -> None:
        """A long prompt is in the step: requests that come meanwhile must not wait long for the step's end. A batch of
        work that was there from its start, beside which none has come for a while, is computed at full speed."""
        if len(self.requests) == 1 or self.view.now_s - self._joined_s < QUIET_STEPS * self.pace.long_step_s:
            num_taken = plan.num_prompt_tokens - plan.budget.left
            plan.budget.cap(max(0, plan.max_long_tokens - num_taken))

    def _continue_chunks(self, plan: _StepPlan, prompts: list[Request]) -> None:
        for request in prompts:
            if plan.budget.left == 0:
                return
            if request.status is _RUNNING and request not in plan.scheduled:
                self._compute_more(plan, request)

    def _compute_more(self, plan: _StepPlan, request: Request) -> None:
        """Give a running request its share of the step; take blocks back from others, or from itself, if it must be."""
        num_remaining, num_tokens = request.num_remaining_tokens, 1
        if num_remaining > 1:
            num_tokens = self.policy.chunk_size(request, plan.budget.offer(num_remaining), plan.budget.left)
        new_block_ids = self.kv_cache.allocate(request, num_tokens)
        if new_block_ids is None:
            num_tokens = min(num_tokens, self._make_room(plan, request))
            if num_tokens == 0:
                return
            new_block_ids = self.kv_cache.allocate(request, num_tokens)
            assert new_block_ids is not None
        plan.budget.take(num_tokens)
        num_computed = request.num_computed_tokens
        samples = num_tokens == num_remaining
        plan.scheduled[request] = share = make_tuple(
            ScheduledRequest, (request.request_id, num_tokens, num_computed, tuple(new_block_ids), samples)
        )
        if self.kv_cache.prefix_cache is not None and num_computed < request.num_admitted_tokens:
            end = num_computed + num_tokens
            fills_block = end % self.kv_cache.block_size < num_tokens
            if fills_block or end == request.num_prompt_tokens or end == request.num_admitted_tokens:
                plan.keeps[request] = share

    def _make_room(self, plan: _StepPlan, request: Request) -> int:
        """How many more tokens fit. Others give way until one does; 0 if the request had to give way itself."""
        while (num_fitting := self.kv_cache.num_tokens_that_fit(request)) <= 0:
            victim = self.policy.choose_victim(self._may_be_preempted() or self.running)
            self._preempt(plan, victim)
            if victim is request:
                return 0
        return num_fitting

    def _may_be_preempted(self) -> list[Request]:
        """Running requests that have not had to give way too often already."""
        most = self.config.max_preemptions
        return [request for request in self.running if request.num_preemptions < most]

    def _admit_waiting(self, plan: _StepPlan) -> None:
        """Let waiting requests in, in policy order; past one that does not fit, but only so far and so often."""
        num_in_batch, num_seats = self._num_in_batch(), self.limits.max_num_seqs
        now_s = self.view.now_s
        if not self.batching.is_open(self.waiting, num_in_batch=num_in_batch, num_seats=num_seats, now_s=now_s):
            return
        is_sealed = self.batching.is_sealed(self.waiting, num_in_batch=num_in_batch)
        place = num_displaced = 0
        has_time = True
        while plan.budget.left and place <= self.config.skip_window:
            has_seat = self._num_in_batch() < num_seats
            if not has_seat and not self.policy.displaces:
                break  # most steps: nobody has left, and the line need not be looked at
            request = self.waiting.peek(place)
            if request is None or not self.batching.may_join(request) or (is_sealed and not request.goes_on):
                break
            if has_seat and self.kv_cache.should_wait(request):
                place += 1  # not for long, and not for want of room: nobody who passes it takes anything from it
            elif has_seat and self._can_admit(request):
                if self.config.prefill_mode == "chunked" and self._is_long(
                    plan, request, self._num_uncached(plan, request)
                ):
                    self._shorten(plan)
                has_time = self._has_time_for(plan, request)
                if not has_time:
                    break
                for passed_place in range(place):
                    passed = self.waiting.peek(passed_place)
                    assert passed is not None
                    passed.num_skips += 1
                self._admit(plan, request)
                place = 0
            elif place == 0 and (victims := self._choose_displaced(plan, request, most=MAX_DISPLACED - num_displaced)):
                num_displaced += len(victims)
                for victim in victims:
                    self._preempt(plan, victim)
            elif not has_seat or request.num_skips >= self.config.max_head_skips:
                break
            else:
                place += 1
        is_full = not plan.budget.left or not has_time
        has_seat = self._num_in_batch() < num_seats
        self.batching.formed(goes_on=not is_sealed and is_full and has_seat and len(self.waiting) > 0)

    def _num_in_batch(self) -> int:
        return len(self.running) + len(self.held)

    def _has_time_for(self, plan: _StepPlan, request: Request) -> bool:
        """Where prompts are not cut, one that does not fit into the rest of the step has to wait for the next; but one
        that fits into no step is cut all the same."""
        if self.config.prefill_mode == "chunked" or not plan.scheduled:
            return plan.budget.left > 0
        return request.num_tokens - self.kv_cache.num_cached_tokens(request) <= plan.budget.left

    def _choose_displaced(self, plan: _StepPlan, request: Request, *, most: int) -> list[Request]:
        """Running requests that the policy would have leave for one that waits, so that it can enter. Nobody, if that
        takes more than the policy says, or than `most`: nobody is to leave for nothing."""
        if request.num_pending_tokens or not self.running or self.held or self.kv_cache.should_wait(request):
            return []
        if plan.displaceable is None:  # whoever enters after this is not among them
            new_ids = {new.request_id for new in plan.admitted}
            plan.displaceable = [one for one in self._may_be_preempted() if one.request_id not in new_ids]
        candidates, victims = plan.displaceable.copy(), list[Request]()
        while candidates and len(victims) < most:
            victim = self.policy.choose_displaced(request, candidates)
            if victim is None:
                break
            candidates.remove(victim)
            victims.append(victim)
            if self._can_admit(request, leaving=victims):
                return victims
        return []

    def _can_enter(self, request: Request) -> bool:
        """Whether a request that waits would find a place in the batch now, if it were the first."""
        num_in_batch, num_seats = self._num_in_batch(), self.limits.max_num_seqs
        is_open = self.batching.is_open(
            self.waiting, num_in_batch=num_in_batch, num_seats=num_seats, now_s=self.view.now_s
        )
        if is_open and self.batching.is_sealed(self.waiting, num_in_batch=num_in_batch):
            is_open = request.goes_on
        has_seat = is_open and num_in_batch < num_seats
        return has_seat and not self.kv_cache.should_wait(request) and self._can_admit(request)

    def _can_admit(self, request: Request, *, leaving: Sequence[Request] = ()) -> bool:
        """Whether there is room, or would be after some have left, and the runner can be told all of the request's
        tokens: one that was preempted while a step sampled for it has to wait for that result."""
        if request.num_pending_tokens:
            return False
        # One spare block per running request: enough for each to grow a while before anyone must be preempted.
        num_spare_blocks = len(self.running) - len(leaving)
        return self.kv_cache.can_admit(request, num_spare_blocks=num_spare_blocks, leaving=leaving)

    def _admit(self, plan: _StepPlan, request: Request) -> None:
        request.entry_key = self.policy.key(request)
        self.waiting.admit(request)
        request.move_to(RequestStatus.RUNNING)
        request.num_skips = 0
        bisect.insort(self.running, request, key=_running_key)
        self.policy.entered(request)
        request.num_admitted_tokens, request.num_landed_tokens = request.num_tokens, 0
        block_ids, request.num_computed_tokens = self.kv_cache.admit(request)
        self._num_computed_tokens += request.num_computed_tokens
        if not request.num_preemptions:
            request.num_cached_tokens = request.num_computed_tokens
        plan.admitted.append(_as_new(request, block_ids))
        self._compute_more(plan, request)

    def _preempt(self, plan: _StepPlan, request: Request) -> None:
        """Take a running request's blocks; it goes back to the place it had in the queue, and starts over."""
        request.move_to(RequestStatus.PREEMPTED)
        self._stop_running(request)
        for step in self.in_flight:
            step.keeps.pop(request, None)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        plan.keeps.pop(request, None)
        already_scheduled = plan.scheduled.pop(request, None)
        if already_scheduled is not None:
            plan.budget.refund(already_scheduled.num_tokens)
        plan.preempted.append(request)
        if plan.displaceable is not None and request in plan.displaceable:
            plan.displaceable.remove(request)
        self._preempted_request_ids.append(request.request_id)
        self.waiting.push(request)

    def _stop_running(self, request: Request) -> None:
        """Out of the batch. Others may find what it has generated from now on, unless it has failed."""
        self.running.remove(request)
        self.policy.left(request)
        self._free(request)

    def _hold(self, request: Request, status: RequestStatus) -> None:
        """It has its last token, but keeps its place and its memory until the batch is done."""
        request.move_to(RequestStatus.HELD)
        self.running.remove(request)
        self.policy.left(request)
        self.held[request] = status

    def _free(self, request: Request) -> None:
        keep = request.status is not RequestStatus.FINISHED_ERROR
        if keep:
            self.kv_cache.keep_computed(request, _num_landed(request))
        self.kv_cache.free(request, keep=keep)
        self._num_computed_tokens -= request.num_computed_tokens

    def _commit(self, plan: _StepPlan) -> SchedulerOutput:
        """Advance the requests as planned, so that the next step can be planned before this one has run."""
        if not plan.scheduled:
            return self.nothing()
        num_scheduled_tokens = 0
        for request, (_, num_tokens, _, _, samples) in plan.scheduled.items():
            num_scheduled_tokens += num_tokens
            request.advance(num_tokens, samples)
        self.policy.served(plan.scheduled)
        self._num_computed_tokens += num_scheduled_tokens
        output = SchedulerOutput(
            step_id=self._num_steps,
            new_requests=tuple(plan.admitted),
            scheduled=tuple(plan.scheduled.values()),
            preempted_request_ids=tuple(self._preempted_request_ids),
            finished_request_ids=tuple(self._finished_request_ids),
            num_scheduled_tokens=num_scheduled_tokens,
            moves=self.kv_cache.take_moves(),
        )
        self._preempted_request_ids.clear()
        self._finished_request_ids.clear()
        self._num_steps += 1
        self.in_flight.append(LaunchedStep(output, tuple(plan.scheduled), plan.keeps))
        return output

    # ---- the parts of update() ------------------------------------------------------------------------------------

    def _landed(self, output: SchedulerOutput) -> LaunchedStep:
        """The oldest step in flight, which must be the one whose result has come."""
        if not self.in_flight or self.in_flight[0].output.step_id != output.step_id:
            raise RuntimeError(f"the result of step {output.step_id} came out of order or twice")
        return self.in_flight.popleft()

    def _keep_computed(self, step: LaunchedStep, result: ModelRunnerOutput) -> None:
        """Others may find what this step has computed, from now on: it is there for sure, and it was no failure."""
        for request, share in step.keeps.items():
            sampled = result.sampled.get(share.request_id)
            has_failed = share.samples if sampled is None else sampled.error is not None
            if not has_failed and request.status is _RUNNING:
                request.num_landed_tokens = share.num_computed_tokens + share.num_tokens
                self.kv_cache.keep_computed(request, request.num_landed_tokens)
                if request.num_landed_tokens == request.num_prompt_tokens:
                    self.kv_cache.keep_tail(request, request.num_landed_tokens)

    def _append(self, request: Request, sampled: SampledTokens) -> RequestUpdate:
        """Give a live request its new tokens, up to one that ends it."""
        token_ids, logprobs, error = sampled
        finish_status, num_before = None, len(request.output_token_ids)
        if error is not None:
            finish_status = RequestStatus.FINISHED_ERROR
        else:
            for token_id in token_ids:
                finish_status = request.append_output_token(token_id)
                if finish_status is not None:
                    break
        if finish_status is not None:
            num_taken = len(request.output_token_ids) - num_before
            token_ids, logprobs = token_ids[:num_taken], logprobs[:num_taken]
            if not self._end(request, finish_status):
                return RequestUpdate(request.request_id, token_ids, logprobs, None, held_status=finish_status)
        return make_tuple(RequestUpdate, (request.request_id, token_ids, logprobs, finish_status, error, None, None))

    def _end(self, request: Request, status: RequestStatus) -> bool:
        """A request has its last token, or has failed. Returns whether it has ended; otherwise that comes with its
        batch's end."""
        if status is not RequestStatus.FINISHED_ERROR and request.status is _RUNNING:
            self.kv_cache.keep_computed(request, _num_landed(request))
            self.kv_cache.keep_tail(request, _num_landed(request))
            if self._is_kept(request):
                self._hold(request, status)
                return False
        self.finish_request(request.request_id, status)
        return True

    def _is_kept(self, request: Request) -> bool:
        """Whether a request that is done stays in the batch until all are."""
        return self.batching.seals and not request.is_beam


def _running_key(request: Request) -> tuple[object, int, int]:
    return (request.entry_key, request.queue_place, request.arrival_index)


def _num_landed(request: Request) -> int:
    """Tokens of a running request that are in the cache for sure: no step that computes them is under way still.

    Once it has got a token that is all but the last one, whose step has yet to come or has not yet landed.
    """
    if request.num_landed_tokens < request.num_admitted_tokens:
        return request.num_landed_tokens
    return request.num_known_tokens - 1


def _all_failed(output: SchedulerOutput, result: ModelRunnerOutput) -> bool:
    """Whether no request got anything out of a step, so that nothing of it may have run."""
    sampled = (result.sampled.get(share.request_id) for share in output.scheduled)
    return all(one is not None and one.error is not None for one in sampled)


def _prompt_logprobs(requests: Iterable[Request], result: ModelRunnerOutput) -> list[RequestUpdate]:
    """What the step found about the prompts of live requests; their tokens, if they got any, are another update."""
    return [
        RequestUpdate(request.request_id, (), (), None, prompt_logprobs=result.prompt_logprobs[request.request_id])
        for request in requests
        if request.request_id in result.prompt_logprobs and not request.status.is_finished
    ]


def _as_new(request: Request, block_ids: tuple[int, ...]) -> NewRequest:
    """A request as the runner has to know it when it enters the batch. All its tokens until now are known."""
    return NewRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=tuple(request.output_token_ids),
        sampling_params=request.sampling_params,
        num_computed_tokens=request.num_computed_tokens,
        block_ids=block_ids,
    )
