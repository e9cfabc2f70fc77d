"""The interface of scheduling policies: which request goes first, which is preempted, how big a prefill chunk is.

A policy reads requests and changes nothing but its own counts. docs/adding_a_policy.md shows how to write one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from headway.core.forecast.waiting_totals import Waiting, WaitingTotals
from headway.core.kv.manager import KVCacheManager
from headway.core.queue import KeyedQueue, WaitingQueue
from headway.core.request import Request
from headway.core.scheduler_output import ScheduledRequest
from headway.core.step_time import DecodePace

_FIRST_STEP_S = 0.02
_MEMORY = 0.05  # weight of the last step in the mean time of a step


class PolicyView:
    """What policies may read besides the requests themselves. The scheduler keeps it up to date."""

    def __init__(self, kv_cache: KVCacheManager, pace: DecodePace, *, max_head_skips: int) -> None:
        self._kv_cache = kv_cache
        self.pace = pace
        """The estimates of step times."""
        self.max_head_skips = max_head_skips
        """How often a request may be passed because it does not fit."""
        self.now_s = 0.0
        """The time at which the step is planned."""
        self.step_s = _FIRST_STEP_S
        """The mean time of the last steps."""

    def advance(self, now_s: float) -> None:
        """Set the time of the step that is being planned."""
        self.now_s = now_s

    def observe_step(
        self, *, num_chunk_tokens: int, num_decodes: int, duration_s: float, plain_s: float | None
    ) -> None:
        """Learn from a step with this many prompt tokens beside its decodes. `plain_s`: how long it would have taken
        without drafts, if that is known."""
        if plain_s is not None:
            self.pace.observe(num_chunk_tokens=num_chunk_tokens, num_decodes=num_decodes, duration_s=plain_s)
        self.step_s += _MEMORY * (duration_s - self.step_s)

    def num_cached_tokens(self, request: Request) -> int:
        """Return how many tokens of a waiting request are in the prefix cache now."""
        return self._kv_cache.num_cached_tokens(request)

    def num_tokens_to_recompute(self, request: Request) -> int:
        """Return how many tokens of a running request would have to be computed again if it were preempted: those in
        blocks that it does not share with others."""
        return self._kv_cache.num_own_tokens(request)


class SchedulingPolicy(ABC):
    """Owns all these decisions. A subclass must define only `key`."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """A line for `--help`."""
    can_starve: ClassVar[bool] = True
    """Whether a request could wait for ever while others pass it. If so, the scheduler guards the queue."""

    def __init__(self, view: PolicyView) -> None:
        self.view = view

    # ---- which request goes first ---------------------------------------------------------------------------------

    @abstractmethod
    def key(self, request: Request) -> Any:
        """Return the sort key of a request. The smallest goes first; ties go to the earlier arrival. The key must not
        change while a request waits, unless the policy's queue allows it."""

    def create_queue(self, front_size: int) -> WaitingQueue:
        """Create the queue of waiting requests. The scheduler looks only at the first `front_size` of them."""
        return KeyedQueue(self.key, front_size=front_size)

    def rank(self, request: Request) -> float:
        """Return a number by which a forecast knows who goes first: of the waiting requests, those with a smaller or
        about the same rank are ahead of a newcomer. It is looked up when a request is queued. The default is the order
        of arrival."""
        return 0.0

    def ahead_of(self, request: Request, totals: WaitingTotals) -> Waiting:
        """Return the waiting requests that go before this newcomer, as a forecast expects it."""
        return totals.ahead_of(request)

    def promise_s(self, request: Request) -> float:
        """Return the time after its arrival within which a request should be admitted. No guard lifts it earlier."""
        return 0.0

    # ---- which request is preempted -------------------------------------------------------------------------------

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Return the request to preempt when blocks run out. `running` is not empty, and is sorted by the policy's
        order at admission."""
        return running[-1]

    def choose_displaced(self, request: Request, running: Sequence[Request]) -> Request | None:
        """Return the running request to preempt for a waiting one that finds no seat or memory; `None`: it waits."""
        return None

    @property
    def displaces(self) -> bool:
        """Whether the policy overrides `choose_displaced`, so that it must be called."""
        return type(self).choose_displaced is not SchedulingPolicy.choose_displaced

    # ---- how much of a step ---------------------------------------------------------------------------------------

    def chunk_size(
        self,
        request: Request,
        *,
        num_offered_tokens: int,
        num_left_tokens: int,
        can_enter: Callable[[Request], bool],
    ) -> int:
        """Return how many of the offered tokens a request computes now, at least 1. `num_left_tokens`: how many tokens
        the step has left for it and all later requests. `can_enter`: whether a waiting request would find a seat and
        memory now."""
        return num_offered_tokens

    @property
    def divides_steps(self) -> bool:
        """Whether the policy overrides `chunk_size` and so divides steps between prompts. In that case short prompts
        do not pass long ones in addition."""
        return type(self).chunk_size is not SchedulingPolicy.chunk_size

    def pace_s(self, default_s: float) -> float:
        """Return the target inter-token time that prompts must leave to decoding requests. `default_s` is the
        configured one; 0 means no limit."""
        return default_s

    def step_limit_s(self, prompts: Sequence[Request]) -> float:
        """Return how long the next step may take at most because of prompts, however many wait. `prompts`: the running
        requests whose prompts are not complete."""
        return math.inf

    # ---- notifications --------------------------------------------------------------------------------------------

    def entered(self, request: Request) -> None:  # noqa: B027 - most policies count nothing
        """Note that a request has been admitted to the batch."""

    def left(self, request: Request) -> None:  # noqa: B027
        """Note that a request has left the batch, for whatever reason."""

    def served(self, shares: Mapping[Request, ScheduledRequest]) -> None:  # noqa: B027
        """Note that a step with these shares has been planned."""

    def taken_back(self, request: Request, num_tokens: int) -> None:  # noqa: B027
        """Note that `num_tokens` tokens of a share were drafts that turned out wrong."""
