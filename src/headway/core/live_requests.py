"""All live requests of a scheduler: where each of them is, and the moves from one place to another.

    add ──► waiting ──► running ──► finished
            │  ▲ ▲         │
            ▼  │ └ preempt ┘
          fetching

A move changes all that must change together: the request's status, the queue, the block table, the policy's counts, and
what the runner has to be told with the next step. Which requests move, and when, is decided elsewhere.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from headway.core.fetching import FetchingRequests
from headway.core.kv.manager import KVCacheManager
from headway.core.policy import SchedulingPolicy
from headway.core.queue import WaitingQueue
from headway.core.request import Request, RequestStatus
from headway.core.scheduler_output import NewRequest
from headway.errors import RequestNotFoundError
from headway.settings import SchedulerSettings

_BatchOrder = tuple[Any, int, int]  # the policy's key when the request was admitted, order index, arrival index


class Departures(NamedTuple):
    """Requests that have left the batch, for the runner to forget."""

    preempted_request_ids: tuple[str, ...]
    finished_request_ids: tuple[str, ...]


class LiveRequests:
    """Waiting and running requests. `running` is in the order the requests had when they were admitted."""

    def __init__(
        self,
        config: SchedulerSettings,
        *,
        waiting: WaitingQueue,
        kv_cache: KVCacheManager,
        policy: SchedulingPolicy,
    ) -> None:
        self.waiting = waiting
        self.running: list[Request] = []
        self.num_seats = config.max_num_seqs
        """How many requests may run at once."""
        self.fetching = FetchingRequests(
            waiting=waiting, kv_cache=kv_cache, step_time=policy.view.pace.step_time, most=config.max_num_seqs
        )
        self.by_id: dict[str, Request] = {}
        self.now_s = 0.0
        """When the step is planned."""
        self.last_joined_s = -math.inf
        """When a request last arrived while others ran."""
        self.num_computed_tokens = 0
        """Of all requests that have blocks together."""
        self._kv_cache = kv_cache
        self._policy = policy
        self._preemption_mode = config.preemption_mode
        self._max_preemptions = config.max_preemptions
        self.orders: dict[Request, _BatchOrder] = {}
        """Of running requests."""
        self.num_skips: dict[Request, int] = {}
        """Of waiting requests that did not fit: how many others have been admitted past them."""
        self._preempted_request_ids: list[str] = []  # since the last step
        self._finished_request_ids: list[str] = []  # likewise
        self._num_arrivals = 0

    @property
    def num_free_seats(self) -> int:
        """How many more requests the batch may have."""
        return self.num_seats - len(self.running)

    def advance(self, now_s: float) -> None:
        """Set the time of the step that is being planned."""
        self.now_s = now_s
        if self.fetching.requests:
            self.fetching.advance(now_s)
        self.waiting.advance(now_s)

    def entry_key(self, request: Request) -> Any:
        """The policy's key of a running request when it was admitted."""
        return self.orders[request][0]

    def skip(self, request: Request) -> None:
        """Count that another request is admitted past this one."""
        self.num_skips[request] = self.num_skips.get(request, 0) + 1

    # ---- entering -------------------------------------------------------------------------------------------------

    def fits(self, request: Request, *, leaving: Sequence[Request] = ()) -> bool:
        """Whether there is memory for a waiting request, or would be without those that are `leaving`. One that was
        preempted while a step sampled for it has to wait for that result: the runner must be told all its tokens."""
        if request.num_pending_tokens:
            return False
        # One spare block per running request: enough for each to grow a while before one must be preempted.
        num_spare_blocks = len(self.running) - len(leaving)
        return self._kv_cache.can_admit(request, num_spare_blocks=num_spare_blocks, leaving=leaving)

    def can_enter(self, request: Request) -> bool:
        """Whether a waiting request would enter now, if it were the first."""
        return self.num_free_seats > 0 and not self._kv_cache.should_wait(request) and self.fits(request)

    def add(self, request: Request, *, now_s: float) -> None:
        """Queue a new request, whose id is not in use."""
        request.arrive(self._num_arrivals, now_s=now_s)
        self._num_arrivals += 1
        if self.running:
            self.last_joined_s = now_s
        self.by_id[request.request_id] = request
        self.waiting.push(request)

    def fetch(self, request: Request) -> bool:
        """Whether a waiting request waits for blocks that are elsewhere, from now on. Then it has left the queue."""
        if self._kv_cache.tiers is None or not self.fetching.begin(request, now_s=self.now_s):
            return False
        self.num_skips.pop(request, None)
        return True

    def admit(self, request: Request) -> NewRequest:
        """Move a waiting request into the batch. Returns it as the runner has to know it."""
        order = (self._policy.key(request), request.order_index, request.arrival_index)
        self.waiting.admit(request)
        self.num_skips.pop(request, None)
        block_ids, num_computed_tokens = self._kv_cache.admit(
            request,
            restore_mode=self._preemption_mode if request.num_preemptions else "auto",
            token_s=self._policy.view.pace.step_time.per_token_s,
        )
        request.admit(num_computed_tokens)
        self.orders[request] = order
        bisect.insort(self.running, request, key=self.orders.__getitem__)
        self._policy.entered(request)
        self.num_computed_tokens += num_computed_tokens
        return NewRequest(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=tuple(request.output_token_ids),
            sampling_params=request.sampling_params,
            num_computed_tokens=num_computed_tokens,
            block_ids=block_ids,
        )

    # ---- leaving --------------------------------------------------------------------------------------------------

    def preemptible(self) -> list[Request]:
        """Running requests that have not been preempted too often already."""
        most = self._max_preemptions
        return [request for request in self.running if request.num_preemptions < most]

    def preempt(self, request: Request) -> None:
        """Take back a running request's blocks. It waits again, where its arrival puts it."""
        self.num_computed_tokens -= request.num_computed_tokens
        request.preempt()
        self.stop_running(request)
        self._kv_cache.free(request)
        self._preempted_request_ids.append(request.request_id)
        self.waiting.push(request)

    def finish(self, request_id: str, status: RequestStatus) -> Request:
        """End a request in any state; its blocks are free at once. Other requests may find what it has computed, unless
        it has failed."""
        request = self.by_id.get(request_id)
        if request is None:
            raise RequestNotFoundError(f"No live request has the id '{request_id}'.")
        old_status = request.status
        request.move_to(status)
        if old_status is RequestStatus.RUNNING:
            self.stop_running(request)
            self.forget(request, keep=status is not RequestStatus.FINISHED_ERROR)
            return request
        del self.by_id[request_id]
        if old_status is RequestStatus.FETCHING:
            self.fetching.remove(request)
        else:
            self.waiting.remove(request)
            self.num_skips.pop(request, None)
        if self._kv_cache.tiers is not None:
            self._kv_cache.tiers.release(request)
        return request

    def stop_running(self, request: Request) -> None:
        """Take a request out of those that run; it still has its blocks."""
        self.running.remove(request)
        del self.orders[request]
        self._policy.left(request)

    def forget(self, request: Request, *, keep: bool) -> None:
        """Let go of a request that ran and has ended; its blocks are free at once. `keep`: other requests may find what
        it has computed."""
        del self.by_id[request.request_id]
        self.num_computed_tokens -= request.num_computed_tokens
        self._kv_cache.free(request, keep=keep)
        self._finished_request_ids.append(request.request_id)

    def count_computed(self, num_tokens: int) -> None:
        """Count the tokens of a planned step as computed."""
        self.num_computed_tokens += num_tokens

    def take_departures(self) -> Departures:
        """Which requests have left the batch since the last call."""
        departures = Departures(tuple(self._preempted_request_ids), tuple(self._finished_request_ids))
        self._preempted_request_ids.clear()
        self._finished_request_ids.clear()
        return departures

    def inherit_departures(self, other: LiveRequests) -> None:
        """Take over what the runner has not been told by a scheduler that this one replaces."""
        departures = other.take_departures()
        self._preempted_request_ids += departures.preempted_request_ids
        self._finished_request_ids += departures.finished_request_ids
