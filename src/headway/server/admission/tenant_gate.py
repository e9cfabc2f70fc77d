"""Limits how many sequences of one tenant are in the engine; further requests wait here, not in the engine's queue.

    tenant a   ▇▇▇▇▇▇▇▇▇ ─ 39 more wait here      the engine has at most `most` sequences of a tenant, slightly more
    tenant b   ▒                                  than it has seats: a tenant that is alone can fill all seats, and a
                                                  new tenant waits for only a few requests of each other tenant

This works with every scheduling policy, costs no throughput, and needs no support in the scheduler: the policy still
chooses which of the engine's requests gets a seat. Requests that wait here leave in order of `priority`, smallest
first, then in order of arrival.
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
"""For each group of this many seats, the engine has one spare request of a tenant, ready to take a freed seat."""


class TakesRequests(Protocol):
    """The part of the engine client that the gate needs."""

    def submit(self, request: AddRequest, stream: RequestStream | None = None) -> RequestStream: ...


def default_most(num_seats: int) -> int:
    """Return the default limit of sequences per tenant in an engine with `num_seats` seats."""
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
    """A heap. Withdrawn requests may stay in it for a while."""
    num_withdrawn: int = 0


class TenantGate:
    """Belongs to one event loop. `most` returns the limit per tenant, or None for no limit. It is called for every
    decision, because the number of seats may change."""

    def __init__(self, engine: TakesRequests, most: Callable[[], int | None]) -> None:
        self._engine = engine
        self._most = most
        self._tenants: dict[str, _Tenant] = {}
        self._numbers = itertools.count()

    def submit(self, request: AddRequest) -> RequestStream:
        """Submit a request to the engine, now or when there is room. If the engine refuses it later, the stream ends
        with that error."""
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
            # Deferred, because the caller that reports the end of a request is still at work on its own state.
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
        """Remove a request whose client left before it was submitted to the engine."""
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
