"""How much may wait: a queue bounded by requests and by prompt tokens, with a line in it for each service class.

A request waits from the moment its body is here until its first token has come. How many tokens it has is first guessed
from the size of its body, so that a full queue is refused without tokenising; the guess is replaced by the truth
as soon as that is known. An empty queue takes any one request, so nothing is refused for ever.

    newcomer ──► is its class's line full? ──► would it be late? ──► is its tenant's part of the queue full, or all
                          429                        429             of it? ──► it waits
                                                                      │
                                         drop one that is shed earlier (503), or else 429

Dropped is the request that came last, of the class with the largest `shed` number, if that is larger than the
newcomer's own and the engine has not begun with it; where a tenant's part is full, one of that tenant.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self

from headway.server.admission.queue_shares import QueueShare, TenantLimits, TenantShares
from headway.server.admission.service_classes import ONE_CLASS, ServiceClass, ServiceClasses
from headway.server.api.api_errors import RETRY_AFTER_S, ApiError, overloaded, unavailable

BYTES_PER_TOKEN = 4
"""Average size of a token of text, JSON included; a guess that is soon replaced."""
REFUSAL_REASONS = ("queue_full", "class_queue_full", "tenant_queue_full", "late")
MEMORY_S = 10.0
"""After this time what was seen counts 1/e of what is seen now."""


class QueueLimits:
    """Counts what waits and refuses what does not fit."""

    def __init__(
        self,
        *,
        max_requests: int,
        max_tokens: int,
        classes: ServiceClasses = ONE_CLASS,
        tenants: TenantLimits | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.whole = QueueShare(max_requests, max_tokens)
        self.tenants = TenantShares(tenants)
        self.lines = {each.name: ClassLine(each, now) for each in classes}
        self._shed_order = sorted(self.lines.values(), key=lambda line: -line.service_class.shed)

    @property
    def num_requests(self) -> int:
        return self.whole.num_requests

    @property
    def num_tokens(self) -> int:
        return self.whole.num_tokens

    def reserve(
        self,
        *,
        body_bytes: int,
        service_class: ServiceClass | None = None,
        tenant: str = "",
        in_time_s: float | None = None,
    ) -> Reservation:
        """A place for a request of which only the size is known; 429 if there is none, or if its first token cannot be
        expected within `in_time_s`. What is of no class waits in no line, and nothing is dropped for it."""
        line = None if service_class is None else self.lines[service_class.name]
        guess = body_bytes // BYTES_PER_TOKEN
        if line is not None and in_time_s is not None:
            line.check_in_time(in_time_s)
        reservation = Reservation(self, line, tenant)
        reservation.take(1, guess)
        return reservation

    def make_room(self, num_requests: int, num_tokens: int, line: ClassLine | None, tenant: str) -> None:
        """Raise 429 if this does not fit, not even if others are dropped for it; else drop them."""
        if line is not None:
            line.check_room(num_requests)
        share = self.tenants.of(tenant)
        dropped: list[Reservation] = []
        try:
            if share is not None:
                self._make_room_in(share, num_requests, num_tokens, line, dropped, of_tenant=tenant)
            if not self.tenants.are_guaranteed:
                self._make_room_in(self.whole, num_requests, num_tokens, line, dropped)
        finally:
            self.tenants.forget(tenant)
        for victim in dropped:
            victim.drop()

    def _make_room_in(
        self,
        share: QueueShare,
        num_requests: int,
        num_tokens: int,
        line: ClassLine | None,
        dropped: list[Reservation],
        *,
        of_tenant: str | None = None,
    ) -> None:
        """Add to those that are dropped as many as are needed, of one tenant or of all."""
        left = replace(
            share,
            num_requests=share.num_requests - sum(victim.num_requests for victim in dropped),
            num_tokens=share.num_tokens - sum(victim.num_tokens for victim in dropped),
        )
        candidates = self._candidates(line)
        while not left.has_room(num_requests, num_tokens):
            victim = next(candidates, None)
            if victim is None:
                error = share.full(num_requests)
                raise error if line is None else line.refused(error)
            if victim not in dropped and of_tenant in (None, victim.tenant):
                dropped.append(victim)
                left.num_requests -= victim.num_requests
                left.num_tokens -= victim.num_tokens

    def _candidates(self, newcomer: ClassLine | None) -> Iterator[Reservation]:
        """What could be dropped for a newcomer, in the order in which it would be."""
        for line in self._shed_order:
            if newcomer is None or line.service_class.shed <= newcomer.service_class.shed:
                return
            yield from line.not_begun()


class Waiting(Protocol):
    """What the queue has to know of work that waits in it."""

    @property
    def has_begun(self) -> bool:
        """Whether the engine has computed anything of it."""
        ...

    def drop(self) -> None:
        """It is not wanted any more; its reservation knows why."""
        ...


class ClassLine:
    """The requests of one class that wait, and what became of all that came: numbers of HTTP requests."""

    def __init__(self, service_class: ServiceClass, now: Callable[[], float]) -> None:
        self.service_class = service_class
        self.num_waiting = 0
        """Completions, as all limits count them."""
        self.num_admitted = 0
        self.num_shed = 0
        self.num_refused = dict.fromkeys(REFUSAL_REASONS, 0)
        self.rate = FirstTokenRate(now)
        self.droppable: dict[Reservation, None] = {}  # those of which nothing has a token, in order of arrival

    def check_room(self, num_requests: int) -> None:
        """429 if the class has a limit and this exceeds it."""
        most = self.service_class.max_waiting
        if most is not None and self.num_waiting + num_requests > most:
            raise self.refused(
                overloaded(
                    f"The queue of class '{self.service_class.name}' is full: {self.num_waiting} requests are waiting, "
                    f"of at most {most}. Please retry later.",
                    code="class_queue_full",
                )
            )

    def check_in_time(self, target_s: float) -> None:
        """429 if a newcomer has to expect that it misses its target."""
        per_second = self.rate.per_second()
        wait_s = self.num_waiting / per_second
        if wait_s > target_s:
            raise self.refused(
                overloaded(
                    f"The first token would be late: {self.num_waiting} requests of class '{self.service_class.name}' "
                    f"are waiting and {per_second:.3g} per second get their first token, which makes about "
                    f"{1e3 * wait_s:.0f} ms, and the target is {1e3 * target_s:.0f} ms. Please retry later.",
                    code="late",
                    retry_after_s=max(RETRY_AFTER_S, math.ceil(wait_s - target_s)),
                )
            )

    def refused(self, error: ApiError) -> ApiError:
        """Count a refusal by its reason."""
        self.num_refused[str(error.code)] += 1
        return error

    def not_begun(self) -> Iterator[Reservation]:
        """What could still be dropped, the newest first."""
        return (each for each in reversed(self.droppable) if not each.has_begun)

    def add_waiting(self, number: int) -> None:
        """Count `number` more that wait, or fewer."""
        self.num_waiting += number
        self.rate.note_waiting(self.num_waiting)


class Reservation:
    """One HTTP request's part of the queue; a context manager that gives back what is left of it."""

    def __init__(self, limits: QueueLimits, line: ClassLine | None, tenant: str) -> None:
        self.tenant = tenant
        self.num_requests = 0
        self.num_tokens = 0
        self.shed_error: ApiError | None = None
        """Why it was dropped, if it was."""
        self._limits = limits
        self._line = line
        self._waiting: Waiting | None = None

    def take(self, num_requests: int, num_tokens: int) -> None:
        """Wait with this many; 429 if they do not fit."""
        self._limits.make_room(num_requests, num_tokens, self._line, self.tenant)
        self._add(num_requests, num_tokens)
        if self._line is not None:
            self._line.droppable[self] = None  # a second time it keeps its place

    def settle(self, *, num_requests: int, num_tokens: int) -> None:
        """Replace the guess by what the request really is; 429 if that does not fit."""
        self.check()
        self._add(-self.num_requests, -self.num_tokens)
        self.take(num_requests, num_tokens)
        if self._line is not None:
            self._line.num_admitted += 1

    def follow(self, waiting: Waiting) -> None:
        """From now on `waiting` is told if this is dropped; until then only `check` tells."""
        self.check()
        self._waiting = waiting

    def check(self) -> None:
        """503 if it was dropped."""
        if self.shed_error is not None:
            raise self.shed_error

    def note_started(self, num_requests: int, num_tokens: int) -> None:
        """These have got their first token, and wait no longer."""
        if self._line is not None:
            self._line.rate.note_first_tokens(num_requests)
            self._line.droppable.pop(self, None)
        self._add(-num_requests, -num_tokens)

    @property
    def has_begun(self) -> bool:
        """Whether the engine has computed anything of it."""
        return self._waiting is not None and self._waiting.has_begun

    def drop(self) -> None:
        """Free its place for another request."""
        assert self._line is not None
        self._line.num_shed += 1
        self.shed_error = unavailable(
            f"The queue is full, and what waits of class '{self._line.service_class.name}' is dropped first. "
            "Please retry later.",
            code="shed",
        )
        self._leave()
        if self._waiting is not None:
            self._waiting.drop()

    def _leave(self) -> None:
        self._add(-self.num_requests, -self.num_tokens)
        if self._line is not None:
            self._line.droppable.pop(self, None)

    def _add(self, num_requests: int, num_tokens: int) -> None:
        self.num_requests += num_requests
        self.num_tokens += num_tokens
        for share in (self._limits.whole, self._limits.tenants.of(self.tenant)):
            if share is not None:
                share.num_requests += num_requests
                share.num_tokens += num_tokens
        self._limits.tenants.forget(self.tenant)
        if self._line is not None:
            self._line.add_waiting(num_requests)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()


class FirstTokenRate:
    """How fast a line moves: first tokens per second, measured while at least one request waited for one.

    Idle time says nothing about how fast requests could have been served, so it does not count as time; but it lets
    what was seen before fade, as all time does.

        expected wait of a newcomer  =  requests that wait  /  first tokens per second

    The rate is the line's own. Which other requests are served meanwhile, and in what order, is in it already, under
    any policy.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._num_waiting = 0
        self._last_s = now()
        self._num_first_tokens = 0.0
        self._busy_s = 0.0

    def note_waiting(self, num_waiting: int) -> None:
        """`num_waiting` wait from now on."""
        self._advance()
        self._num_waiting = num_waiting

    def note_first_tokens(self, number: int) -> None:
        """`number` have got their first token, and wait no longer."""
        self._advance()
        self._num_first_tokens += number

    def per_second(self) -> float:
        """Infinite if no request has had to wait. A line that stands still counts as one in which a single first token
        has come, so that there is always a number to tell."""
        self._advance()
        return max(self._num_first_tokens, 1.0) / self._busy_s if self._busy_s else math.inf

    def _advance(self) -> None:
        now_s = self._now()
        fade = math.exp((self._last_s - now_s) / MEMORY_S)
        self._last_s = now_s
        self._num_first_tokens *= fade
        self._busy_s = self._busy_s * fade + (MEMORY_S * (1.0 - fade) if self._num_waiting else 0.0)
