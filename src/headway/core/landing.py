"""Steps in flight, and what their results change: tokens are appended, blocks become findable, requests end.

A step is planned as if those before it had run, so several may be in flight. Their results come in the order of the
steps; requests that have ended meanwhile are passed over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from headway.core.batching import ContinuousBatching
from headway.core.kv_cache_manager import KVCacheManager
from headway.core.live_requests import LiveRequests
from headway.core.policy import PolicyView
from headway.core.request import Request, RequestStatus
from headway.core.scheduler_output import (
    ModelRunnerOutput,
    RequestUpdate,
    SampledTokens,
    ScheduledRequest,
    SchedulerOutput,
    make_tuple,
)

_RUNNING, _PREEMPTED = RequestStatus.RUNNING, RequestStatus.PREEMPTED  # an enum's own attributes are slow to look up
_NO_TOKEN = SampledTokens((), error="the executor returned no token for it")


class LaunchedStep(NamedTuple):
    """A step whose result has not come. It holds requests, not ids: an id may belong to another request by then."""

    output: SchedulerOutput
    requests: tuple[Request, ...]
    """One for each of `output.scheduled`, in the same order."""
    keeps: dict[Request, ScheduledRequest]
    """Shares whose tokens other requests may find if the step succeeds: of the tokens that their requests were admitted
    with, and they fill a block or are the last. A request that is preempted meanwhile is taken out, since it has lost
    its blocks."""


class Landing:
    """Takes in results, oldest step first."""

    def __init__(
        self, *, kv_cache: KVCacheManager, live: LiveRequests, batching: ContinuousBatching, view: PolicyView
    ) -> None:
        self.in_flight: deque[LaunchedStep] = deque()
        self._kv_cache = kv_cache
        self._live = live
        self._batching = batching
        self._view = view

    def launch(self, step: LaunchedStep) -> None:
        """Expect the result of this step, after those of the steps before."""
        self.in_flight.append(step)

    def forget_keeps(self, request: Request) -> None:
        """Let no step in flight keep what it computes for a request, which has lost its blocks."""
        for step in self.in_flight:
            step.keeps.pop(request, None)

    def land(
        self, output: SchedulerOutput, result: ModelRunnerOutput, *, duration_s: float | None
    ) -> list[RequestUpdate]:
        """Take in the result of the oldest step in flight, which must be this one."""
        if not self.in_flight or self.in_flight[0].output.step_id != output.step_id:
            raise RuntimeError(f"the result of step {output.step_id} came out of order or twice")
        step = self.in_flight.popleft()
        if duration_s is not None:
            self._observe(output, duration_s)
        if output.moves.moved_out and _all_failed(output, result):
            self._kv_cache.distrust(output.moves)
        self._keep_computed(step, result)
        updates = _prompt_logprobs(step.requests, result) if result.prompt_logprobs else []
        # Bound methods: this loop is most of what an update costs.
        find_sampled, append, add_update = result.sampled.get, self._append, updates.append
        for request, share in zip(step.requests, output.scheduled):
            sampled = find_sampled(request.request_id)
            if sampled is None:
                if not share.samples:
                    continue
                sampled = _NO_TOKEN
            status = request.status
            if status is _RUNNING or status is _PREEMPTED:
                add_update(append(request, sampled))
        updates += self._batching.release_after(step.requests, self._live)
        return updates

    def _observe(self, output: SchedulerOutput, duration_s: float) -> None:
        # Each request takes part with one token at least; the others are what makes a step with prompts.
        num_decodes = len(output.scheduled)
        num_chunk_tokens = output.num_scheduled_tokens - num_decodes
        self._view.observe_step(num_chunk_tokens=num_chunk_tokens, num_decodes=num_decodes, duration_s=duration_s)

    def _keep_computed(self, step: LaunchedStep, result: ModelRunnerOutput) -> None:
        """Let other requests find what this step has computed, where it has not failed."""
        for request, share in step.keeps.items():
            sampled = result.sampled.get(share.request_id)
            has_failed = share.samples if sampled is None else sampled.error is not None
            if not has_failed and request.status is _RUNNING:
                self._kv_cache.land(request, share.num_computed_tokens + share.num_tokens)

    def _append(self, request: Request, sampled: SampledTokens) -> RequestUpdate:
        """Append new tokens to a live request, up to one that ends it."""
        token_ids, logprobs, error = sampled  # by name it would cost three times as much, for every token
        finish_status, num_taken = None, 0
        if error is not None:
            finish_status = RequestStatus.FINISHED_ERROR
        else:
            for token_id in token_ids:
                num_taken += 1
                finish_status = request.append_output_token(token_id)
                if finish_status is not None:
                    break
        if finish_status is not None:
            token_ids, logprobs = token_ids[:num_taken], logprobs[:num_taken]
            if error is None and request.status is _RUNNING:
                self._kv_cache.complete(request)
            if not self._batching.end(request, finish_status, self._live):
                return RequestUpdate(request.request_id, token_ids, logprobs, None, held_status=finish_status)
        return make_tuple(RequestUpdate, (request.request_id, token_ids, logprobs, finish_status, error, None, None))

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless every pending token of a running or waiting request has a step in flight that
        samples it, and only requests that still have their blocks are kept."""
        num_pending: dict[Request, int] = {}
        for step in self.in_flight:
            assert step.keeps.keys() <= set(step.requests), "a request is kept that is not in the step"
            for request, share in zip(step.requests, step.output.scheduled, strict=True):
                if share.samples:
                    num_pending[request] = num_pending.get(request, 0) + 1
            for request in step.keeps:
                has_blocks = request.status is RequestStatus.RUNNING or request.status is RequestStatus.HELD
                assert has_blocks or request.status.is_finished, f"{request} has lost its blocks, and they are kept"
        for request in self._live.by_id.values():
            if request in self._live.held:
                continue  # its pending tokens are dropped
            expected = num_pending.get(request, 0)
            assert request.num_pending_tokens == expected, f"{request}: steps in flight sample {expected} tokens"
            num_known = request.num_prompt_tokens + request.num_output_tokens
            assert request.num_tokens == num_known + request.num_pending_tokens, f"{request}: wrong number of tokens"
            assert request.num_tokens <= request.max_total_tokens, f"{request} will have more tokens than it may"
            assert num_known < request.max_total_tokens, f"{request} should have finished"


def _all_failed(output: SchedulerOutput, result: ModelRunnerOutput) -> bool:
    """Whether no request got anything out of a step, so that nothing of it may have run."""
    sampled = (result.sampled.get(share.request_id) for share in output.scheduled)
    return all(one is not None and one.error is not None for one in sampled)


def _prompt_logprobs(requests: Iterable[Request], result: ModelRunnerOutput) -> list[RequestUpdate]:
    """Logprobs of the prompts of live requests; their new tokens are another update."""
    return [
        RequestUpdate(request.request_id, (), (), None, prompt_logprobs=result.prompt_logprobs[request.request_id])
        for request in requests
        if request.request_id in result.prompt_logprobs and not request.status.is_finished
    ]
