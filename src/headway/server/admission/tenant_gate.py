"""How much of the engine one tenant may have: requests beyond that wait here, and not in the engine's queue.

    tenant a   ▇▇▇▇▇▇▇▇▇ ─ 39 more wait here      the engine has at most `most` sequences of a tenant, as many as there
    tenant b   ▒                                  are seats and a few more: so a tenant that is alone has all seats, and
                                                  one that comes waits for few others, however many there are

That holds under every scheduling policy, costs no token per second, and needs nothing in the scheduler: which of the
requests that it has gets a seat is the policy's choice. Of those that wait here, the one of the smallest `priority`
goes first, then the one that came first.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from headway.errors import HeadwayError, InvalidRequestError
from headway.front.streams import RequestStream
from headway.wire.messages import AddRequest, Delta

SPARE_PART = 8
"""For every so many seats the engine has one request more of a tenant, which takes a seat as soon as one is free."""


class TakesRequests(Protocol):
    """The engine, as far as this needs it."""

    def submit(self, request: AddRequest, stream: RequestStream | None = None) -> RequestStream: ...


def default_most(num_seats: int) -> int:
    """How many sequences of a tenant an engine with so many seats has, if nothing else is said."""
    return num_seats + max(1, num_seats // SPARE_PART)


@dataclass(order=True)
class _Held:
    priority: int
    number: int
    request: AddRequest = field(compare=False)
    stream: RequestStream = field(compare=False)
    is_withdrawn: bool = field(default=False, compare=False)


@dataclass
class _Tenant:
    num_inside: int = 0
    held: list[_Held] = field(default_factory=list)
    """A heap, in which those that were withdrawn may still be."""
    num_withdrawn: int = 0


class TenantGate:
    """Belongs to one event loop. `most` is asked again and again, since there may be more seats; None: no limit."""

    def __init__(self, engine: TakesRequests, most: Callable[[], int | None]) -> None:
        self._engine = engine
        self._most = most
        self._tenants: dict[str, _Tenant] = {}
        self._numbers = itertools.count()

    def submit(self, request: AddRequest) -> RequestStream:
        """As the engine's own, now or when there is room. What the engine refuses later ends the stream."""
        if self._most() is None:
            return self._engine.submit(request)
        tenant = self._tenants.setdefault(request.options.tenant, _Tenant())
        stream = RequestStream(request.request_id, lambda _: self._withdraw(tenant, held))
        held = _Held(request.options.priority, next(self._numbers), request, stream)
        if tenant.held or not self._has_room(tenant, request):
            heapq.heappush(tenant.held, held)
        else:
            self._let_in(tenant, held)
        return stream

    def _has_room(self, tenant: _Tenant, request: AddRequest) -> bool:
        most = self._most()
        return most is None or not tenant.num_inside or tenant.num_inside + _num_sequences(request) <= most

    def _let_in(self, tenant: _Tenant, held: _Held) -> None:
        number = _num_sequences(held.request)
        tenant.num_inside += number

        def leave() -> None:
            tenant.num_inside -= number
            # Not at once: whoever tells the end of a request is in the middle of something.
            asyncio.get_running_loop().call_soon(self._let_others_in, tenant, held.request.options.tenant)

        try:
            self._engine.submit(held.request, held.stream)
        except HeadwayError:
            tenant.num_inside -= number
            raise
        held.stream.when_ended(leave)

    def _let_others_in(self, tenant: _Tenant, name: str) -> None:
        while tenant.held and (tenant.held[0].is_withdrawn or self._has_room(tenant, tenant.held[0].request)):
            held = heapq.heappop(tenant.held)
            if held.is_withdrawn:
                tenant.num_withdrawn -= 1
                continue
            try:
                self._let_in(tenant, held)
            except HeadwayError as error:
                held.stream.push(_failure(held.request.request_id, error))
        if not tenant.num_inside and not tenant.held and self._tenants.get(name) is tenant:
            del self._tenants[name]

    def _withdraw(self, tenant: _Tenant, held: _Held) -> None:
        """Its client has left before it was let in."""
        held.is_withdrawn = True
        tenant.num_withdrawn += 1
        if 2 * tenant.num_withdrawn > len(tenant.held):
            tenant.held = [one for one in tenant.held if not one.is_withdrawn]
            heapq.heapify(tenant.held)
            tenant.num_withdrawn = 0


def _num_sequences(request: AddRequest) -> int:
    return 1 if request.params is None else request.params.num_choices


def _failure(request_id: str, error: HeadwayError) -> Delta:
    return Delta(
        request_id,
        finish_reason="error",
        error=str(error),
        is_last=True,
        error_status=error.http_status,
        error_param=error.param if isinstance(error, InvalidRequestError) else None,
    )
