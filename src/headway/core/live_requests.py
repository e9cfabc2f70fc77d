"""All live requests of a scheduler: where each of them is, and the moves from one place to another.

    add ──► waiting ──► running ──► finished
               ▲           │
               └─ preempt ─┘             in sealed batches, between running and finished: held

A move changes all that must change together: the request's status, the queue, the block table, the policy's counts, and
what the runner has to be told with the next step. Which requests move, and when, is decided elsewhere.
"""

from __future__ import annotations

import bisect
import math
from typing import Any, NamedTuple

from headway.core.kv_cache_manager import KVCacheManager
from headway.core.policy import SchedulingPolicy
from headway.core.queue import WaitingQueue
from headway.core.request import Request, RequestStatus
from headway.core.scheduler_output import NewRequest
from headway.errors import RequestNotFoundError

_BatchOrder = tuple[Any, int, int]  # the policy's key when the request was admitted, order index, arrival index


class Departures(NamedTuple):
    """Requests that have left the batch, for the runner to forget."""

    preempted_request_ids: tuple[str, ...]
    finished_request_ids: tuple[str, ...]


class LiveRequests:
    """Waiting, running and held requests. `running` is in the order the requests had when they were admitted."""

    def __init__(
        self, *, waiting: WaitingQueue, kv_cache: KVCacheManager, policy: SchedulingPolicy, max_num_seqs: int
    ) -> None:
        self.waiting = waiting
        self.running: list[Request] = []
        self.held: dict[Request, RequestStatus] = {}
        """Requests of a sealed batch that have their last token, and how they are going to end."""
        self.by_id: dict[str, Request] = {}
        self.last_joined_s = -math.inf
        """When a request last arrived while others ran."""
        self.num_computed_tokens = 0
        """Of all running and held requests together."""
        self._kv_cache = kv_cache
        self._policy = policy
        self._max_num_seqs = max_num_seqs
        self._orders: dict[Request, _BatchOrder] = {}  # of running requests
        self._num_skips: dict[Request, int] = {}  # of waiting requests that have been skipped
        self._preempted_request_ids: list[str] = []  # since the last step
        self._finished_request_ids: list[str] = []  # likewise
        self._num_arrivals = 0

    @property
    def num_in_batch(self) -> int:
        """Running and held requests: each has a seat and a block table."""
        return len(self.running) + len(self.held)

    @property
    def num_free_seats(self) -> int:
        """How many more requests the batch may have."""
        return self._max_num_seqs - len(self.running) - len(self.held)

    def entry_key(self, request: Request) -> Any:
        """The policy's key of a running request when it was admitted."""
        return self._orders[request][0]

    def num_skips(self, request: Request) -> int:
        """How many requests were admitted past a waiting one that did not fit."""
        return self._num_skips.get(request, 0)

    def skip(self, request: Request) -> None:
        """Count that another request is admitted past this one."""
        self._num_skips[request] = self._num_skips.get(request, 0) + 1

    def add(self, request: Request, *, now_s: float) -> None:
        """Queue a new request, whose id is not in use."""
        request.arrive(self._num_arrivals, now_s=now_s)
        self._num_arrivals += 1
        if self.running:
            self.last_joined_s = now_s
        self.by_id[request.request_id] = request
        self.waiting.push(request)

    def admit(self, request: Request, *, restore_mode: str, token_s: float | None) -> NewRequest:
        """Move a waiting request into the batch. Returns it as the runner has to know it."""
        order = (self._policy.key(request), request.order_index, request.arrival_index)
        self.waiting.admit(request)
        self._num_skips.pop(request, None)
        block_ids, num_computed_tokens = self._kv_cache.admit(request, restore_mode=restore_mode, token_s=token_s)
        request.admit(num_computed_tokens)
        self._orders[request] = order
        bisect.insort(self.running, request, key=self._orders.__getitem__)
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

    def preempt(self, request: Request) -> None:
        """Take back a running request's blocks. It waits again, where its arrival puts it."""
        self.num_computed_tokens -= request.num_computed_tokens
        request.preempt()
        self._stop_running(request)
        self._kv_cache.free(request)
        self._preempted_request_ids.append(request.request_id)
        self.waiting.push(request)

    def hold(self, request: Request, status: RequestStatus) -> None:
        """Keep the seat and the memory of a running request that has its last token; `status`: how it will end."""
        request.move_to(RequestStatus.HELD)
        self._stop_running(request)
        self.held[request] = status

    def finish(self, request_id: str, status: RequestStatus) -> Request:
        """End a request in any state; its blocks are free at once. Other requests may find what it has computed, unless
        it has failed."""
        request = self.by_id.get(request_id)
        if request is None:
            raise RequestNotFoundError(f"No live request has the id '{request_id}'.")
        old_status = request.status
        request.move_to(status)
        del self.by_id[request_id]
        if old_status is RequestStatus.RUNNING:
            self._stop_running(request)
        elif old_status is RequestStatus.HELD:
            del self.held[request]
        else:
            self.waiting.remove(request)
            self._num_skips.pop(request, None)
            return request
        self.num_computed_tokens -= request.num_computed_tokens
        self._kv_cache.free(request, keep=status is not RequestStatus.FINISHED_ERROR)
        self._finished_request_ids.append(request_id)
        return request

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

    def _stop_running(self, request: Request) -> None:
        self.running.remove(request)
        del self._orders[request]
        self._policy.left(request)

    def check_invariants(self) -> None:
        """Raise `AssertionError` if a request is lost, twice there, or in another place than its status says."""
        waiting = list(self.waiting)
        in_places = sorted(request.request_id for request in [*self.running, *waiting, *self.held])
        assert in_places == sorted(self.by_id), (
            "a live request is neither waiting nor running nor held, or is two of these"
        )
        assert self.num_free_seats >= 0, "more requests run than max_num_seqs"
        assert self._orders.keys() == set(self.running), "a running request has no order, or another one has"
        orders = [self._orders[request] for request in self.running]
        assert orders == sorted(orders), "running requests are out of order"
        for request in self.held:
            assert request.status is RequestStatus.HELD, f"{request} is held"
        for request in self.running:
            assert request.status is RequestStatus.RUNNING, f"{request} is in the running list"
            assert request.num_remaining_tokens >= 0, f"{request} has computed more than it has"
        for request in waiting:
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), f"{request} is in the queue"
            assert request.num_computed_tokens == 0, f"{request} waits but claims to be in the cache"
        assert self._num_skips.keys() <= set(waiting), "skips are counted for a request that does not wait"
        num_computed = sum(request.num_computed_tokens for request in [*self.running, *self.held])
        assert num_computed == self.num_computed_tokens, "the sum of computed tokens is wrong"
        self.waiting.check_invariants()
