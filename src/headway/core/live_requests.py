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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from headway.core.kv.manager import KVCacheManager
from headway.core.kv.tiered_cache import FetchDecision, FetchKind
from headway.core.policy import SchedulingPolicy
from headway.core.queue import WaitingQueue
from headway.core.request import Request, RequestStatus
from headway.core.scheduler_output import NewRequest
from headway.errors import RequestNotFoundError

FETCH_LIMIT_S = 30.0
"""After so long a request does not wait for its blocks any more, whatever has become of them."""

_BatchOrder = tuple[Any, int, int]  # the policy's key when the request was admitted, order index, arrival index


class Departures(NamedTuple):
    """Requests that have left the batch, for the runner to forget."""

    preempted_request_ids: tuple[str, ...]
    finished_request_ids: tuple[str, ...]


class _Awaited:
    """What a request that fetches waits for."""

    __slots__ = ("began_s", "chain", "missing")

    def __init__(self, began_s: float) -> None:
        self.chain: Sequence[bytes] = ()  # in order; without one, those behind it are of no use
        self.missing: set[bytes] = set()
        self.began_s = began_s


class LiveRequests:
    """Waiting and running requests. `running` is in the order the requests had when they were admitted."""

    def __init__(
        self, *, waiting: WaitingQueue, kv_cache: KVCacheManager, policy: SchedulingPolicy, max_num_seqs: int
    ) -> None:
        self.waiting = waiting
        self.running: list[Request] = []
        self.num_seats = max_num_seqs
        """How many requests may run at once."""
        self.fetching: dict[Request, _Awaited] = {}
        """Requests that wait for blocks, the one that began first first."""
        self.blocked: dict[Request, None] = {}
        """Of these: for whose blocks there was no room on the host yet, in their order."""
        self.by_id: dict[str, Request] = {}
        self.now_s = 0.0
        """When the step is planned."""
        self.last_joined_s = -math.inf
        """When a request last arrived while others ran."""
        self.num_computed_tokens = 0
        """Of all requests that have blocks together."""
        self._kv_cache = kv_cache
        self._policy = policy
        self._max_num_seqs = max_num_seqs
        self.orders: dict[Request, _BatchOrder] = {}
        """Of running requests."""
        self.num_skips: dict[Request, int] = {}
        """Of waiting requests that did not fit: how many others have been admitted past them."""
        self._waits_for: dict[bytes, list[Request]] = {}  # the requests that wait for a block
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
        if self.fetching:
            self._stop_waiting_long()
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

    def admit(self, request: Request, *, restore_mode: str, token_s: float | None) -> NewRequest:
        """Move a waiting request into the batch. Returns it as the runner has to know it."""
        order = (self._policy.key(request), request.order_index, request.arrival_index)
        self.waiting.admit(request)
        self.num_skips.pop(request, None)
        block_ids, num_computed_tokens = self._kv_cache.admit(request, restore_mode=restore_mode, token_s=token_s)
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

    # ---- waiting for blocks -----------------------------------------------------------------------------------------

    def may_fetch(self, request: Request) -> bool:
        """Whether a waiting request may wait for blocks: once, and not more of them than the batch has seats."""
        is_new = not request.has_fetched and not request.num_preemptions and not request.is_fork
        return is_new and len(self.fetching) < self._max_num_seqs

    def fetch(self, request: Request, decision: FetchDecision) -> bool:
        """Note what a waiting request does about blocks that are elsewhere. Returns whether it waits for them: then it
        has left the queue."""
        request.has_fetched = decision.kind is not FetchKind.NOTHING
        if decision.kind not in (FetchKind.WAIT, FetchKind.BLOCKED):
            return False
        request.move_to(RequestStatus.FETCHING)
        self.waiting.remove(request)
        self.num_skips.pop(request, None)
        self.fetching[request] = _Awaited(self.now_s)
        self._await(request, decision)
        return True

    def retry_fetches(self, fetch: Callable[[Request], FetchDecision]) -> None:
        """Have blocks fetched for those who had no room for them, the first one first, as far as there is now."""
        while self.blocked:
            request = next(iter(self.blocked))
            decision = fetch(request)
            self._await(request, decision)
            if decision.kind is FetchKind.BLOCKED:
                return
            if not decision.digests:
                self._queue_again(request)

    def _await(self, request: Request, decision: FetchDecision) -> None:
        if decision.kind is FetchKind.BLOCKED:
            self.blocked[request] = None
            return
        self.blocked.pop(request, None)
        awaited = self.fetching[request]
        awaited.chain, awaited.missing = decision.digests, set(decision.digests)
        for digest in decision.digests:
            self._waits_for.setdefault(digest, []).append(request)

    def fetch_done(self, digest: bytes, ok: bool) -> bool:
        """A block has come, or will not. Requests that have all they can get are queued again. Returns whether it has
        come and a request that waited for it waits for others still."""
        is_early = False
        for request in self._waits_for.pop(digest, ()):
            awaited = self.fetching[request]
            if ok:
                awaited.missing.discard(digest)
                is_early = is_early or bool(awaited.missing)
            else:
                self._cut(request, awaited, awaited.chain.index(digest))
            if not awaited.missing:
                self._queue_again(request)
        return is_early

    def _cut(self, request: Request, awaited: _Awaited, place: int) -> None:
        """Wait for the first blocks of the chain only."""
        chain, awaited.chain = awaited.chain, awaited.chain[:place]
        for digest in chain[place:]:
            if digest in awaited.missing:
                awaited.missing.remove(digest)
                self._forget_wait(request, digest)

    def _forget_wait(self, request: Request, digest: bytes) -> None:
        waits = self._waits_for.get(digest)
        if waits is not None:
            waits.remove(request)
            if not waits:
                del self._waits_for[digest]

    def _stop_fetching(self, request: Request) -> None:
        awaited = self.fetching[request]
        self._cut(request, awaited, 0)
        del self.fetching[request]
        self.blocked.pop(request, None)

    def _queue_again(self, request: Request) -> None:
        """The first block counts as used last: without it the others are of no use."""
        assert self._kv_cache.tiers is not None
        self._kv_cache.tiers.host.touch(reversed(self.fetching[request].chain))
        self._stop_fetching(request)
        request.move_to(RequestStatus.WAITING)
        self.waiting.push(request)

    def _release_fetched(self, request: Request) -> None:
        if self._kv_cache.tiers is not None:
            self._kv_cache.tiers.release(request)

    def _stop_waiting_long(self) -> None:
        while self.fetching:
            request, awaited = next(iter(self.fetching.items()))
            if self.now_s - awaited.began_s < FETCH_LIMIT_S:
                return
            self._queue_again(request)

    # ---- leaving --------------------------------------------------------------------------------------------------

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
            self._stop_fetching(request)
        else:
            self.waiting.remove(request)
            self.num_skips.pop(request, None)
        self._release_fetched(request)
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
