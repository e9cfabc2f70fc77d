"""Takes in the results of steps in flight: appends tokens, makes computed blocks findable, ends requests.

A step is planned as if the earlier ones had run, so several may be in flight. Their results arrive in the order of the
steps. Requests that have ended in the meantime are skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from headway.core.kv.manager import KVCacheManager
from headway.core.live_requests import LiveRequests
from headway.core.policy import SchedulingPolicy
from headway.core.request import Request, RequestStatus
from headway.core.scheduler_output import (
    BatchSnapshot,
    ModelRunnerOutput,
    PendingStep,
    RequestUpdate,
    SampledTokens,
    ScheduledRequest,
    SchedulerOutput,
    make_tuple,
)

_RUNNING, _PREEMPTED = RequestStatus.RUNNING, RequestStatus.PREEMPTED  # an enum's own attributes are slow to look up
_COPIED_PART = 0.1  # if block copies take more than this fraction of a step's time, nothing is learnt from it
_NOTHING = SampledTokens(())
_NO_TOKEN = SampledTokens((), error="the executor returned no token for it")


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A step whose result is outstanding. It holds requests, not ids: an id may belong to another request by then."""

    output: SchedulerOutput
    requests: tuple[Request, ...]
    """One request for each of `output.scheduled`, in the same order."""
    keeps: dict[Request, ScheduledRequest]
    """Shares whose tokens are cached for other requests if the step succeeds. These shares compute tokens that their
    requests were admitted with, and they fill a block or reach the last of these tokens. A request that is preempted
    in the meantime is removed, since it has lost its blocks."""
    dropped: set[Request] = field(default_factory=set)
    """Requests that were preempted before it was known how many tokens they get. They will sample them again."""
    snapshot: BatchSnapshot | None = None
    """The state of the batch when the step was planned, if the engine reports steps."""
    submitted_s: float = 0.0
    launched_s: float = 0.0
    """When it was really launched: its time may be counted from before that (`submitted_s`)."""
    host_wait_s: float = 0.0
    """How long the device had waited for it, while requests were ready."""
    pending: PendingStep | None = None
    """The handle of the submitted step; None: it was not submitted."""


class Verifier(Protocol):
    """Adds drafts to steps, and learns from the outcome."""

    def observe(self, request: Request, *, num_drafts: int, num_accepted: int) -> None:
        """Learn that the first `num_accepted` of a request's `num_drafts` drafted tokens were right."""
        ...

    def drop(self, request: Request) -> None:
        """Forget a request's drafts in flight: their outcome will not be known."""
        ...

    def observe_step(
        self, duration_s: float, *, num_drafts: int, num_decodes: int, num_chunk_tokens: int
    ) -> float | None:
        """Learn from the duration of a step. Returns how long it would have taken without drafts; None if unknown."""
        ...


class Landing:
    """Takes in the results of steps, oldest step first."""

    def __init__(
        self,
        *,
        kv_cache: KVCacheManager,
        live: LiveRequests,
        policy: SchedulingPolicy,
        verifier: Verifier | None,
        finish: Callable[[str, RequestStatus], Request],
    ) -> None:
        """Create it without any step in flight. Without a `verifier` there are no drafts. `finish` ends a request."""
        self.in_flight: deque[LaunchedStep] = deque()
        self._kv_cache = kv_cache
        self._live = live
        self._policy = policy
        self._verifier = verifier
        self._finish = finish

    def launch(self, step: LaunchedStep) -> None:
        """Expect the result of this step, after the results of the earlier ones."""
        self.in_flight.append(step)

    def drop(self, request: Request) -> None:
        """Note that a request is about to be preempted. It loses its blocks, so steps in flight cache none of them."""
        self._drop_drafts(request)
        for step in self.in_flight:
            step.keeps.pop(request, None)

    def _drop_drafts(self, request: Request) -> None:
        """Drop a request's results from the first step in flight that verifies drafts of it, and from all later ones:
        the number of tokens of a waiting request must not change."""
        num_dropped, has_drafts = 0, False
        for step in self.in_flight:
            for own, share in zip(step.requests, step.output.scheduled):
                if own is request and share.samples and request not in step.dropped:
                    has_drafts = has_drafts or bool(share.drafts)
                    if has_drafts:
                        step.dropped.add(request)
                        num_dropped += 1 + len(share.drafts)
        if num_dropped:
            request.retract(num_dropped)
            self._live.count_computed(-num_dropped)

    def land(
        self, output: SchedulerOutput, result: ModelRunnerOutput, *, duration_s: float | None
    ) -> list[RequestUpdate]:
        """Take in the result of the oldest step in flight. Returns an update for each changed request; raises
        `RuntimeError` if `output` is not that step."""
        if not self.in_flight or self.in_flight[0].output.step_id != output.step_id:
            raise RuntimeError(f"the result of step {output.step_id} came out of order or twice")
        step = self.in_flight.popleft()
        if duration_s is not None and not result.has_prepared and not self._is_mostly_copies(output, duration_s):
            self._observe(output, duration_s)
        if output.moves.moved_out and self._kv_cache.tiers is not None:
            self._kv_cache.tiers.landed(output.moves, has_failed=_all_failed(output, result))
        if step.keeps:
            self._keep_computed(step, result)
        updates = _told_of_prompts(step.requests, result) if result.prompt_logprobs or result.pooled else []
        if result.stopped:
            updates += self._stop(step, result.stopped)
        self._append(step, result, updates)
        return updates

    def _is_mostly_copies(self, output: SchedulerOutput, duration_s: float) -> bool:
        """Whether copies from and to host memory take more than a small part of the step's time."""
        num_copied = len(output.moves.moved_in) + len(output.moves.moved_out)
        return num_copied * self._kv_cache.restore_block_s > _COPIED_PART * duration_s

    def _observe(self, output: SchedulerOutput, duration_s: float) -> None:
        """Learn how long steps take. One token of each request counts as a decode. All others are drafted tokens or
        prompt tokens."""
        num_decodes = len(output.scheduled)
        num_drafts = 0 if self._verifier is None else sum(len(share.drafts) for share in output.scheduled)
        num_chunk_tokens = output.num_scheduled_tokens - num_decodes - num_drafts
        plain_s: float | None = duration_s
        if self._verifier is not None:
            plain_s = self._verifier.observe_step(
                duration_s, num_drafts=num_drafts, num_decodes=num_decodes, num_chunk_tokens=num_chunk_tokens
            )
        self._policy.view.observe_step(
            num_chunk_tokens=num_chunk_tokens, num_decodes=num_decodes, duration_s=duration_s, plain_s=plain_s
        )

    def _keep_computed(self, step: LaunchedStep, result: ModelRunnerOutput) -> None:
        """Let other requests find what this step has computed for requests that have not failed."""
        for request, share in step.keeps.items():
            sampled = result.sampled.get(share.request_id)
            has_failed = share.samples if sampled is None else sampled.error is not None
            if not has_failed and request.status is _RUNNING:
                self._kv_cache.land(request, share.num_computed_tokens + share.num_tokens)

    def _stop(self, step: LaunchedStep, stopped: frozenset[str]) -> list[RequestUpdate]:
        """End the `stopped` requests without a token of this step."""
        return [
            self._end(request, _NOTHING, RequestStatus.FINISHED_STOPPED, num_taken=0)
            for request in step.requests
            if request.request_id in stopped and request.status in (_RUNNING, _PREEMPTED)
        ]

    def _append(self, step: LaunchedStep, result: ModelRunnerOutput, updates: list[RequestUpdate]) -> None:
        """Append the new tokens to all live requests of a step. This loop takes most of the time of an update."""
        find_sampled, add_update = result.sampled.get, updates.append
        for request, share in zip(step.requests, step.output.scheduled):
            request_id = request.request_id
            sampled = find_sampled(request_id)
            if sampled is None:
                if not share.samples:
                    continue
                sampled = _NO_TOKEN
            status = request.status
            if status is not _RUNNING and status is not _PREEMPTED:
                continue
            if step.dropped and request in step.dropped and sampled.error is None:
                if share.drafts and self._verifier is not None:
                    self._verifier.drop(request)
                continue
            token_ids, num_taken = sampled.token_ids, 0
            finish_status = None if sampled.error is None else RequestStatus.FINISHED_ERROR
            if share.drafts and finish_status is None:
                self._verify(request, share, len(token_ids))
            if finish_status is None:
                for token_id in token_ids:
                    num_taken += 1
                    finish_status = request.append_output_token(token_id)
                    if finish_status is not None:
                        break
            if finish_status is None:
                add_update(
                    make_tuple(RequestUpdate, (request_id, token_ids, sampled.logprobs, None, None, None, None, None))
                )
            else:
                add_update(self._end(request, sampled, finish_status, num_taken=num_taken))

    def _verify(self, request: Request, share: ScheduledRequest, num_tokens: int) -> None:
        """Retract the rejected drafts of a request: its step has returned `num_tokens` tokens."""
        assert self._verifier is not None
        self._verifier.observe(request, num_drafts=len(share.drafts), num_accepted=num_tokens - 1)
        num_rejected = len(share.drafts) + 1 - num_tokens
        if num_rejected:
            if request.status is _RUNNING:
                self._live.count_computed(-num_rejected)
            request.retract(num_rejected)
            self._policy.taken_back(request, num_rejected)

    def _end(self, request: Request, sampled: SampledTokens, status: RequestStatus, *, num_taken: int) -> RequestUpdate:
        """End a request with the first `num_taken` sampled tokens, or because of an error."""
        token_ids, logprobs = sampled.token_ids[:num_taken], sampled.logprobs[:num_taken]
        if sampled.error is None and request.status is _RUNNING:
            self._kv_cache.complete(request)
        self._finish(request.request_id, status)
        return RequestUpdate(request.request_id, token_ids, logprobs, status, sampled.error)


def _all_failed(output: SchedulerOutput, result: ModelRunnerOutput) -> bool:
    """Whether all requests of a step failed, so that possibly none of it has run."""
    sampled = (result.sampled.get(share.request_id) for share in output.scheduled)
    return all(one is not None and one.error is not None for one in sampled)


def _told_of_prompts(requests: Iterable[Request], result: ModelRunnerOutput) -> list[RequestUpdate]:
    """Updates with the prompt logprobs and the pooled vectors of live requests. Their new tokens get other updates."""
    logprobs, pooled = result.prompt_logprobs, result.pooled
    return [
        RequestUpdate(
            request.request_id,
            (),
            (),
            None,
            prompt_logprobs=logprobs.get(request.request_id),
            pooled=pooled.get(request.request_id),
        )
        for request in requests
        if (request.request_id in logprobs or request.request_id in pooled) and not request.status.is_finished
    ]
