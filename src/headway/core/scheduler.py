"""The scheduler: which requests compute how many tokens in the next step.

There is no prefill phase and no decode phase. A request has `num_tokens` tokens, of which `num_computed_tokens` are in
the KV cache, and a step lets computed catch up with tokens, within the step's token budget. A whole prompt, a chunk of
one, a decode token, a preempted request coming back: all are the same rule.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

from headway.config import SchedulerConfig
from headway.core.kv_cache_manager import KVCacheManager
from headway.core.policy import SchedulingPolicy, create_policy
from headway.core.request import Request, RequestStatus
from headway.core.request_queue import RequestQueue
from headway.core.scheduler_output import ModelRunnerOutput, NewRequest, ScheduledRequest, SchedulerOutput
from headway.core.token_budget import TokenBudget
from headway.errors import InvalidRequestError, RequestNotFoundError, RequestTooLargeError


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """What a step changed for one request."""

    request_id: str
    new_token_ids: tuple[int, ...]
    logprobs: tuple[object, ...]
    finish_status: RequestStatus | None
    error: str | None = None


@dataclass(slots=True)
class _StepPlan:
    """A step while it is being put together."""

    budget: TokenBudget
    scheduled: dict[str, ScheduledRequest] = field(default_factory=dict)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)


class Scheduler:
    """Owns all live requests. `schedule()` plans a step, `update()` takes its result, in turn."""

    def __init__(self, config: SchedulerConfig, kv_cache: KVCacheManager) -> None:
        self.config = config
        self.kv_cache = kv_cache
        self.policy: SchedulingPolicy = create_policy(config.scheduling_policy)
        self.requests: dict[str, Request] = {}
        self.waiting = RequestQueue(self.policy.key, front_size=config.skip_window + 1)
        self.running: list[Request] = []  # in policy order
        self._finished_request_ids: list[str] = []  # since the last step, for the runner to forget
        self._num_arrivals = 0
        self._num_steps = 0

    # ---- requests come and go -------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request. One that could never run to its end is refused here, with the reason."""
        if request.request_id in self.requests:
            raise InvalidRequestError(f"Request id '{request.request_id}' is already in use.", param="request_id")
        self.check_fits(request)
        request.arrival_index = self._num_arrivals
        self._num_arrivals += 1
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

    def finish_request(self, request_id: str, status: RequestStatus) -> Request:
        """End a request from outside (abort, stop string, error) in any state; its blocks are free at once."""
        request = self.requests.get(request_id)
        if request is None:
            raise RequestNotFoundError(f"No live request has the id '{request_id}'.")
        was_running = request.status is RequestStatus.RUNNING
        request.move_to(status)
        del self.requests[request_id]
        if was_running:
            self.running.remove(request)
            self.kv_cache.free(request)
            self._finished_request_ids.append(request_id)
        else:
            self.waiting.remove(request)
        return request

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.requests)

    # ---- one step -------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Plan the next step: running requests first, decodes before chunks so that none stalls; then admissions."""
        plan = _StepPlan(TokenBudget(self.config.max_num_batched_tokens, self.config.max_chunk_tokens))
        self._continue_running(plan, [r for r in self.running if r.num_remaining_tokens == 1])
        self._continue_running(plan, [r for r in self.running if r.num_remaining_tokens > 1])
        if not plan.preempted:
            self._admit_waiting(plan)
        return self._commit(plan)

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestUpdate]:
        """Append the sampled tokens and finish the requests they end. Requests aborted meanwhile are passed over."""
        updates = []
        for scheduled in output.scheduled:
            request = self.requests.get(scheduled.request_id)
            sampled = result.sampled.get(scheduled.request_id)
            if request is None or sampled is None:
                continue
            finish_status = RequestStatus.FINISHED_ERROR if sampled.error is not None else None
            new_token_ids: list[int] = []
            for token_id in sampled.token_ids:
                if finish_status is not None:
                    break
                new_token_ids.append(token_id)
                finish_status = request.append_output_token(token_id)
            if finish_status is not None:
                self.finish_request(request.request_id, finish_status)
            updates.append(
                RequestUpdate(
                    request.request_id,
                    tuple(new_token_ids),
                    sampled.logprobs[: len(new_token_ids)],
                    finish_status,
                    sampled.error,
                )
            )
        return updates

    # ---- the parts of schedule() ----------------------------------------------------------------------------------

    def _continue_running(self, plan: _StepPlan, requests: Iterable[Request]) -> None:
        for request in requests:
            if plan.budget.left == 0:
                return
            if request.status is RequestStatus.RUNNING:  # it may have been preempted for one before it
                self._compute_more(plan, request)

    def _compute_more(self, plan: _StepPlan, request: Request) -> None:
        """Give a running request its share of the step; take blocks back from others, or from itself, if it must be."""
        num_tokens = self.policy.chunk_size(request, plan.budget.offer(request.num_remaining_tokens))
        while (num_fitting := self.kv_cache.num_tokens_that_fit(request)) <= 0:
            victim = self.policy.choose_victim(self.running)
            self._preempt(plan, victim)
            if victim is request:
                return
        num_tokens = min(num_tokens, num_fitting)
        new_block_ids = self.kv_cache.allocate(request, num_tokens)
        assert new_block_ids is not None
        plan.budget.take(num_tokens)
        plan.scheduled[request.request_id] = ScheduledRequest(
            request_id=request.request_id,
            num_tokens=num_tokens,
            num_computed_tokens=request.num_computed_tokens,
            new_block_ids=tuple(new_block_ids),
            samples=num_tokens == request.num_remaining_tokens,
        )

    def _admit_waiting(self, plan: _StepPlan) -> None:
        """Let waiting requests in, in policy order; past one that does not fit, but only so far and so often."""
        place = 0
        while plan.budget.left and len(self.running) < self.config.max_num_seqs and place <= self.config.skip_window:
            request = self.waiting.peek(place)
            if request is None:
                return
            # One spare block per running request: enough for each to grow a while before anyone must be preempted.
            if self.kv_cache.can_admit(request, num_spare_blocks=len(self.running)):
                for passed_place in range(place):
                    passed = self.waiting.peek(passed_place)
                    assert passed is not None
                    passed.num_skips += 1
                self._admit(plan, request)
                place = 0
            elif request.num_skips >= self.config.max_head_skips:
                return
            else:
                place += 1

    def _admit(self, plan: _StepPlan, request: Request) -> None:
        self.waiting.remove(request)
        request.move_to(RequestStatus.RUNNING)
        request.num_skips = 0
        bisect.insort(self.running, request, key=self._running_key)
        self.kv_cache.admit(request)
        plan.admitted.append(request)
        self._compute_more(plan, request)

    def _preempt(self, plan: _StepPlan, request: Request) -> None:
        """Take a running request's blocks; it goes back to the place it had in the queue, and starts over."""
        request.move_to(RequestStatus.PREEMPTED)
        self.running.remove(request)
        self.kv_cache.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        already_scheduled = plan.scheduled.pop(request.request_id, None)
        if already_scheduled is not None:
            plan.budget.refund(already_scheduled.num_tokens)
        plan.preempted.append(request)
        self.waiting.push(request)

    def _commit(self, plan: _StepPlan) -> SchedulerOutput:
        """Advance the requests as planned, so that the next step could be planned before this one has run."""
        for scheduled in plan.scheduled.values():
            self.requests[scheduled.request_id].num_computed_tokens += scheduled.num_tokens
        output = SchedulerOutput(
            step_id=self._num_steps,
            new_requests=tuple(
                NewRequest(
                    request_id=request.request_id,
                    prompt_token_ids=request.prompt_token_ids,
                    output_token_ids=tuple(request.output_token_ids),
                    sampling_params=request.sampling_params,
                )
                for request in plan.admitted
            ),
            scheduled=tuple(plan.scheduled.values()),
            preempted_request_ids=tuple(request.request_id for request in plan.preempted),
            finished_request_ids=tuple(self._finished_request_ids),
            num_scheduled_tokens=plan.budget.limit - plan.budget.left,
        )
        self._finished_request_ids.clear()
        self._num_steps += 1
        return output

    def _running_key(self, request: Request) -> tuple[object, int]:
        return (self.policy.key(request), request.arrival_index)
