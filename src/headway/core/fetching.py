"""Requests that wait for remote blocks: the next blocks of their chains are on disk or at another replica.

    waiting ──► fetching ──► waiting          at most once, for all blocks of the chain that can be fetched

A block that cannot be fetched cuts the chain, since later blocks are useless without it. A request for whose blocks
host memory has no room is blocked, and is retried before others are admitted.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.kv.manager import KVCacheManager
from headway.core.kv.tiered_cache import FetchDecision, FetchKind, TieredCache
from headway.core.queue import WaitingQueue
from headway.core.request import Request, RequestStatus
from headway.core.step_time import StepTimeModel

FETCH_LIMIT_S = 30.0
"""After this time a request stops waiting for its blocks, whether they have arrived or not."""


class _Awaited:
    """The blocks that a fetching request waits for."""

    __slots__ = ("began_s", "chain", "missing")

    def __init__(self, began_s: float) -> None:
        self.chain: Sequence[bytes] = ()  # in order; without one of them, the later ones are useless
        self.missing: set[bytes] = set()
        self.began_s = began_s


class FetchingRequests:
    """Requests that have left the queue until their blocks have arrived, and the blocks that each waits for."""

    def __init__(self, *, waiting: WaitingQueue, kv_cache: KVCacheManager, step_time: StepTimeModel, most: int) -> None:
        self.requests: dict[Request, _Awaited] = {}
        """All fetching requests, in the order in which they began to wait."""
        self.blocked: dict[Request, None] = {}
        """The fetching requests for whose blocks host memory had no room yet, oldest first."""
        self.waits_for: dict[bytes, list[Request]] = {}
        """The requests that wait for a block, by its digest."""
        self._waiting = waiting
        self._kv_cache = kv_cache
        self._step_time = step_time
        self._most = most

    @property
    def _tiers(self) -> TieredCache:
        assert self._kv_cache.tiers is not None, "there is no other place for blocks"
        return self._kv_cache.tiers

    def begin(self, request: Request, *, now_s: float) -> bool:
        """Let a waiting request wait for remote blocks, if it should. That is decided once for each request, and no
        more requests wait than the batch has seats. Returns whether it waits and has left the queue."""
        is_new = not request.has_fetched and not request.num_preemptions and not request.is_fork
        if not is_new or len(self.requests) >= self._most:
            return False
        decision = self._decide(request)
        request.has_fetched = decision.kind is not FetchKind.NOTHING
        if decision.kind not in (FetchKind.WAIT, FetchKind.BLOCKED):
            return False
        request.move_to(RequestStatus.FETCHING)
        self._waiting.remove(request)
        self.requests[request] = _Awaited(now_s)
        self._await(request, decision)
        return True

    def retry(self) -> None:
        """Fetch blocks for blocked requests, oldest first, until there is no more room on the host."""
        while self.blocked:
            request = next(iter(self.blocked))
            decision = self._decide(request)
            self._await(request, decision)
            if decision.kind is FetchKind.BLOCKED:
                return
            if not decision.digests:
                self._queue_again(request)

    def _decide(self, request: Request) -> FetchDecision:
        return self._tiers.fetch(request, token_s=self._step_time.per_token_s)

    def _await(self, request: Request, decision: FetchDecision) -> None:
        if decision.kind is FetchKind.BLOCKED:
            self.blocked[request] = None
            return
        self.blocked.pop(request, None)
        awaited = self.requests[request]
        awaited.chain, awaited.missing = decision.digests, set(decision.digests)
        for digest in decision.digests:
            self.waits_for.setdefault(digest, []).append(request)

    def fetch_done(self, digest: bytes, ok: bool) -> bool:
        """Note that a block has arrived, or cannot be fetched. Requests that wait for no more blocks are queued again.
        Returns whether it has arrived for a request that still waits for others."""
        is_early = False
        for request in self.waits_for.pop(digest, ()):
            awaited = self.requests[request]
            if ok:
                awaited.missing.discard(digest)
                is_early = is_early or bool(awaited.missing)
            else:
                self._cut(request, awaited, awaited.chain.index(digest))
            if not awaited.missing:
                self._queue_again(request)
        return is_early

    def _cut(self, request: Request, awaited: _Awaited, place: int) -> None:
        """Wait only for the first `place` blocks of the chain."""
        chain, awaited.chain = awaited.chain, awaited.chain[:place]
        for digest in chain[place:]:
            if digest in awaited.missing:
                awaited.missing.remove(digest)
                self._forget_wait(request, digest)

    def _forget_wait(self, request: Request, digest: bytes) -> None:
        waits = self.waits_for.get(digest)
        if waits is not None:
            waits.remove(request)
            if not waits:
                del self.waits_for[digest]

    def remove(self, request: Request) -> None:
        """Remove a request that has ended, or is queued again."""
        awaited = self.requests[request]
        self._cut(request, awaited, 0)
        del self.requests[request]
        self.blocked.pop(request, None)

    def _queue_again(self, request: Request) -> None:
        """Queue a request again. Its first block counts as used last, since the others are useless without it."""
        self._tiers.host.touch(reversed(self.requests[request].chain))
        self.remove(request)
        request.move_to(RequestStatus.WAITING)
        self._waiting.push(request)

    def advance(self, now_s: float) -> None:
        """Queue requests again that have waited too long. `now_s` is the time at which the step is planned."""
        while self.requests:
            request, awaited = next(iter(self.requests.items()))
            if now_s - awaited.began_s < FETCH_LIMIT_S:
                return
            self._queue_again(request)
