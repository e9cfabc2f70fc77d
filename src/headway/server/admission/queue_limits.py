"""Limits of the queue: it is bounded by requests and by prompt tokens, and has a line for each service class.

A request waits from the time its body is complete until it gets its first token. Its number of tokens is first
estimated from the size of its body, so that a full queue refuses it without tokenising; the real number replaces the
estimate as soon as it is known. An empty queue accepts any single request, so no request is refused for ever.

    newcomer ──► is its class's line full? ──► would it be late? ──► is its tenant's part of the queue full, or all
                          429                        429             of it? ──► it waits
                                                                      │
                                         drop one that is shed earlier (503), or else 429

Of the requests that the engine has not begun to compute, the newest one of the class with the largest `shed` number is
dropped, if that number is larger than the newcomer's. If a tenant's part is full, only its own requests are dropped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self

from headway.server.admission.expected_wait import ExpectedWait
from headway.server.admission.queue_shares import QueueShare, TenantLimits, TenantShares
from headway.server.admission.service_classes import ONE_CLASS, ServiceClass, ServiceClasses
from headway.server.api.api_errors import RETRY_AFTER_S, ApiError, overloaded, unavailable

BYTES_PER_TOKEN = 4
"""Average size of a token of text, including its share of the JSON. It is only used for the first estimate."""
REFUSAL_REASONS = ("queue_full", "class_queue_full", "tenant_queue_full", "late")


def _no_cost() -> float:
    return 0.0


class QueueLimits:
    """Counts queued requests and prompt tokens, and refuses requests that do not fit."""

    def __init__(
        self,
        *,
        max_requests: int,
        max_tokens: int,
        classes: ServiceClasses = ONE_CLASS,
        tenants: TenantLimits | None = None,
        now: Callable[[], float] = time.monotonic,
        token_s: Callable[[], float] = _no_cost,
    ) -> None:
        """`token_s` returns the seconds that the engine needs for a prompt token; 0 if that is not known."""
        self.whole = QueueShare(max_requests, max_tokens)
        self.tenants = TenantShares(tenants)
        self.lines = {each.name: ClassLine(each, now, token_s) for each in classes}
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
        """Reserve a place for a request of which only the body size is known. Raises 429 if there is no room, or if
        its first token is not expected within `in_time_s`. A request without a class is in no line, and no other
        request is dropped for it."""
        line = None if service_class is None else self.lines[service_class.name]
        guess = body_bytes // BYTES_PER_TOKEN
        if line is not None and in_time_s is not None:
            line.check_in_time(in_time_s, guess)
        reservation = Reservation(self, line, tenant)
        reservation.take(1, guess)
        return reservation

    def make_room(self, num_requests: int, num_tokens: int, line: ClassLine | None, tenant: str) -> None:
        """Drop as many other requests as needed to make room. Raises 429, and drops none, if that is not enough."""
        if line is not None:
            line.check_room(num_requests, num_tokens)
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
        """Add as many victims to `dropped` as are needed, from `of_tenant` or from all tenants. Raises 429 if there
        are too few."""
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
                raise error if line is None else line.refused(error, num_tokens=num_tokens)
            if victim not in dropped and of_tenant in (None, victim.tenant):
                dropped.append(victim)
                left.num_requests -= victim.num_requests
                left.num_tokens -= victim.num_tokens

    def _candidates(self, newcomer: ClassLine | None) -> Iterator[Reservation]:
        """Yield the requests that could be dropped for a newcomer, in the order in which they would be dropped."""
        for line in self._shed_order:
            if newcomer is None or line.service_class.shed <= newcomer.service_class.shed:
                return
            yield from line.not_begun()


class Waiting(Protocol):
    """What the queue needs to know about a queued request."""

    @property
    def has_begun(self) -> bool:
        """Whether the engine has computed anything for the request."""
        ...

    def drop(self) -> None:
        """End the request. Its reservation has the error."""
        ...


class ClassLine:
    """The queued requests of one class, and counts of its admitted, dropped and refused HTTP requests."""

    LONGEST_RETRY_S = 600
    """No refusal asks a client to stay away for longer: by then the load may be another."""

    def __init__(self, service_class: ServiceClass, now: Callable[[], float], token_s: Callable[[], float]) -> None:
        self.service_class = service_class
        self.num_waiting = 0
        """Number of queued completions, which is what all limits count."""
        self.num_admitted = 0
        self.num_shed = 0
        self.num_refused = dict.fromkeys(REFUSAL_REASONS, 0)
        self.wait = ExpectedWait(now, token_s)
        self.droppable: dict[Reservation, None] = {}  # requests without any token so far, in order of arrival

    def check_room(self, num_requests: int, num_tokens: int) -> None:
        """Raise 429 if `num_requests` more would exceed the limit of the class."""
        most = self.service_class.max_waiting
        if most is not None and self.num_waiting + num_requests > most:
            raise self.refused(
                overloaded(
                    f"The queue of class '{self.service_class.name}' is full: {self.num_waiting} requests are waiting, "
                    f"of at most {most}. Please retry later.",
                    code="class_queue_full",
                ),
                num_tokens=num_tokens,
            )

    def check_in_time(self, target_s: float, num_tokens: int) -> None:
        """Raise 429 if a newcomer with this many prompt tokens is expected to miss its target."""
        wait_s = self.wait.seconds(num_tokens)
        if wait_s > target_s:
            error = overloaded(
                f"The first token would be late: {self.num_waiting} requests of class '{self.service_class.name}' are "
                f"waiting, it is expected in about {1e3 * wait_s:.0f} ms, and the target is {1e3 * target_s:.0f} ms. "
                "Please retry later.",
                code="late",
            )
            raise self.refused(error, num_tokens=num_tokens, target_s=target_s)

    def refused(self, error: ApiError, *, num_tokens: int, target_s: float = 0.0) -> ApiError:
        """Count a refusal by its reason, and return it. The client is asked to retry when a request like this would
        have had its first token, or when it would be in time."""
        self.num_refused[str(error.code)] += 1
        retry_s = math.ceil(min(self.wait.seconds(num_tokens) - target_s, self.LONGEST_RETRY_S))
        error.headers["retry-after"] = str(max(RETRY_AFTER_S, retry_s))
        return error

    def not_begun(self) -> Iterator[Reservation]:
        """Yield the requests that can still be dropped, newest first."""
        return (each for each in reversed(self.droppable) if not each.has_begun)

    def add_waiting(self, number: int) -> None:
        """Add `number`, which may be negative, to the queued completions."""
        self.num_waiting += number


class Reservation:
    """One HTTP request's place in the queue. It is a context manager that releases the place at its end."""

    def __init__(self, limits: QueueLimits, line: ClassLine | None, tenant: str) -> None:
        self.tenant = tenant
        self.num_requests = 0
        self.num_tokens = 0
        self.shed_error: ApiError | None = None
        """The error of a request that was dropped, else None."""
        self._limits = limits
        self._line = line
        self._waiting: Waiting | None = None
        self._place = 0  # in its line, for the forecast

    def take(self, num_requests: int, num_tokens: int) -> None:
        """Enter the queue with this many requests and tokens. Raises 429 if they do not fit."""
        self._limits.make_room(num_requests, num_tokens, self._line, self.tenant)
        self._add(num_requests, num_tokens)
        if self._line is not None:
            self._line.droppable[self] = None  # a request that is already in the dict keeps its position

    def settle(self, *, num_requests: int, num_tokens: int) -> None:
        """Replace the estimate by the real numbers. Raises 429 if they do not fit."""
        self.check()
        self._add(-self.num_requests, -self.num_tokens)
        self.take(num_requests, num_tokens)
        if self._line is not None:
            self._line.num_admitted += 1
            self._place = self._line.wait.admit(num_tokens)

    def follow(self, waiting: Waiting) -> None:
        """From now on call `waiting.drop()` if this request is dropped. Until then only `check` reports it."""
        self.check()
        self._waiting = waiting

    def note_forecast(self, first_token_s: float) -> None:
        """Note the engine's forecast for this request, which later ones of its line are judged by."""
        if self._line is not None:
            self._line.wait.note_forecast(self._place, first_token_s)

    def check(self) -> None:
        """Raise 503 if this request was dropped."""
        if self.shed_error is not None:
            raise self.shed_error

    def note_started(self, num_requests: int, num_tokens: int) -> None:
        """Remove requests that got their first token from the queue."""
        if self._line is not None:
            self._line.droppable.pop(self, None)
        self._add(-num_requests, -num_tokens)

    @property
    def has_begun(self) -> bool:
        """Whether the engine has computed anything for this request."""
        return self._waiting is not None and self._waiting.has_begun

    def drop(self) -> None:
        """Drop this request, so that another one can have its place."""
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
