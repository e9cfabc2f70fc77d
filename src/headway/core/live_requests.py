"""All live requests of a scheduler: the place of each, and the moves between places.

    add ──► waiting ──► running ──► finished
            │  ▲ ▲         │
            ▼  │ └ preempt ┘
          fetching

A move changes everything that must change together: the request's status, the queue, the block table, the policy's
counts, and the departures to report to the runner with the next step. Other modules decide which requests move, and
when.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from headway.core.fetching import FetchingRequests
from headway.core.forecast.waiting_totals import WaitingTotals
from headway.core.kv.manager import KVCacheManager
from headway.core.policy import SchedulingPolicy
from headway.core.queue import WaitingQueue
from headway.core.request import Request, RequestStatus
from headway.core.scheduler_output import NewRequest
from headway.errors import RequestNotFoundError
from headway.settings import SchedulerSettings

_BatchOrder = tuple[Any, int, int]  # the policy's key when the request was admitted, order index, arrival index


class Departures(NamedTuple):
    """Requests that have left the batch, which the runner has to forget."""

    preempted_request_ids: tuple[str, ...]
    finished_request_ids: tuple[str, ...]


class LiveRequests:
    """Waiting, fetching and running requests. `running` is sorted by the policy's order at admission."""

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
        self.totals = WaitingTotals(policy.rank)
        """The sums of the requests that wait or fetch."""
        self.num_plans = 0
        """How many steps have been planned, empty ones included."""
        self.by_id: dict[str, Request] = {}
        self.now_s = 0.0
        """The time at which the step is planned."""
        self.last_joined_s = -math.inf
        """The time at which a request last arrived while others ran."""
        self.num_computed_tokens = 0
        """The computed tokens of all requests with blocks together."""
        self._kv_cache = kv_cache
        self._policy = policy
        self._preemption_mode = config.preemption_mode
        self._max_preemptions = config.max_preemptions
        self.orders: dict[Request, _BatchOrder] = {}
        """The order of each running request in the batch."""
        self.num_skips: dict[Request, int] = {}
        """How many others have been admitted past each waiting request that did not fit."""
        self._preempted_request_ids: list[str] = []  # those preempted since the last step
        self._finished_request_ids: list[str] = []  # those finished since the last step
        self._num_arrivals = 0

    @property
    def num_free_seats(self) -> int:
        """How many more requests may be admitted to the batch."""
        return self.num_seats - len(self.running)

    def advance(self, now_s: float) -> None:
        """Set the time of the step that is being planned."""
        self.now_s = now_s
        self.num_plans += 1
        if self.fetching.requests:
            self.fetching.advance(now_s)
        self.waiting.advance(now_s)

    def entry_key(self, request: Request) -> Any:
        """The policy's key of a running request at its admission."""
        return self.orders[request][0]

    def skip(self, request: Request) -> None:
        """Count that another request is admitted past this one."""
        self.num_skips[request] = self.num_skips.get(request, 0) + 1

    # ---- entering -------------------------------------------------------------------------------------------------

    def fits(self, request: Request, *, leaving: Sequence[Request] = ()) -> bool:
        """Whether there is memory for a waiting request, or would be if the `leaving` ones had left. A request that was
        preempted while a step sampled for it has to wait for that result: the runner needs the values of all its tokens
        at admission."""
        if request.num_pending_tokens:
            return False
        # One spare block per running request, so that each can grow for a while before one must be preempted.
        num_spare_blocks = len(self.running) - len(leaving)
        return self._kv_cache.can_admit(request, num_spare_blocks=num_spare_blocks, leaving=leaving)

    def can_enter(self, request: Request) -> bool:
        """Whether a waiting request would be admitted now if it were first in the queue."""
        return self.num_free_seats > 0 and not self._kv_cache.should_wait(request) and self.fits(request)

    def add(self, request: Request, *, now_s: float) -> None:
        """Queue a new request, whose id is not in use."""
        request.arrive(self._num_arrivals, now_s=now_s)
        self._num_arrivals += 1
        if self.running:
            self.last_joined_s = now_s
        self.by_id[request.request_id] = request
        self.waiting.push(request)
        self.totals.add(request)

    def fetch(self, request: Request) -> bool:
        """Let a waiting request wait for remote blocks, if it should. Returns whether it has left the queue."""
        if self._kv_cache.tiers is None or not self.fetching.begin(request, now_s=self.now_s):
            return False
        self.num_skips.pop(request, None)
        return True

    def admit(self, request: Request) -> NewRequest:
        """Move a waiting request into the batch. Returns the record of it for the runner."""
        order = (self._policy.key(request), request.order_index, request.arrival_index)
        self.waiting.admit(request)
        self.totals.remove(request)
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
        """Return the running requests that have not been preempted too often already."""
        most = self._max_preemptions
        return [request for request in self.running if request.num_preemptions < most]

    def preempt(self, request: Request) -> None:
        """Free a running request's blocks and queue it again, in its place by arrival."""
        self.num_computed_tokens -= request.num_computed_tokens
        request.preempt()
        self.stop_running(request)
        self._kv_cache.free(request)
        self._preempted_request_ids.append(request.request_id)
        self.waiting.push(request)
        self.totals.add(request)

    def finish(self, request_id: str, status: RequestStatus) -> Request:
        """End a request in any state and free its blocks at once. What it has computed stays cached, unless it has
        failed. Raises `RequestNotFoundError` if no live request has this id."""
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
        self.totals.remove(request)
        if old_status is RequestStatus.FETCHING:
            self.fetching.remove(request)
        else:
            self.waiting.remove(request)
            self.num_skips.pop(request, None)
        if self._kv_cache.tiers is not None:
            self._kv_cache.tiers.release(request)
        return request

    def stop_running(self, request: Request) -> None:
        """Remove a request from the running ones; it still has its blocks."""
        self.running.remove(request)
        del self.orders[request]
        self._policy.left(request)

    def forget(self, request: Request, *, keep: bool) -> None:
        """Forget a request that ran and has ended, and free its blocks. `keep`: what it has computed stays cached."""
        del self.by_id[request.request_id]
        self.num_computed_tokens -= request.num_computed_tokens
        self._kv_cache.free(request, keep=keep)
        self._finished_request_ids.append(request.request_id)

    def count_computed(self, num_tokens: int) -> None:
        """Count the tokens of a planned step as computed."""
        self.num_computed_tokens += num_tokens

    def take_departures(self) -> Departures:
        """Return the requests that have left the batch since the last call."""
        departures = Departures(tuple(self._preempted_request_ids), tuple(self._finished_request_ids))
        self._preempted_request_ids.clear()
        self._finished_request_ids.clear()
        return departures

    def inherit_departures(self, other: LiveRequests) -> None:
        """Take over the unreported departures of a scheduler that this one replaces."""
        departures = other.take_departures()
        self._preempted_request_ids += departures.preempted_request_ids
        self._finished_request_ids += departures.finished_request_ids
