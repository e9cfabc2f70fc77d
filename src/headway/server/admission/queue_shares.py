"""Shares of the queue: the whole queue, and each tenant's part, so that a tenant that sends too much only hurts itself.

If all parts together are no larger than the queue, a request that fits into its tenant's part is never refused because
of other tenants' requests. An empty part accepts any single request, as the queue does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from headway.server.api.api_errors import ApiError, overloaded


@dataclass(eq=False)
class QueueShare:
    """How many requests and prompt tokens are queued in this share, and their limits."""

    max_requests: int
    max_tokens: int
    is_tenants: bool = False
    num_requests: int = 0
    num_tokens: int = 0

    def has_room(self, num_requests: int, num_tokens: int) -> bool:
        """Whether this many more fit."""
        return not self.num_requests or (
            self.num_requests + num_requests <= self.max_requests and self.num_tokens + num_tokens <= self.max_tokens
        )

    def full(self, num_requests: int) -> ApiError:
        """Return the error for a request that does not fit."""
        too_many = self.num_requests + num_requests > self.max_requests
        what = f"{self.num_requests} requests" if too_many else f"{self.num_tokens} prompt tokens"
        if not self.is_tenants:
            return overloaded(f"The queue is full: {what} are waiting. Please retry later.", code="queue_full")
        most = f"{self.max_requests} requests and {self.max_tokens} prompt tokens"
        return overloaded(
            f"Your part of the queue is full: {what} of yours are waiting, of at most {most}, and this request has "
            f"{num_requests} more. Please retry later.",
            code="tenant_queue_full",
        )


class TenantLimits(NamedTuple):
    """How much of the queue each tenant may have."""

    max_requests: int
    max_tokens: int
    is_guaranteed: bool
    """Whether all parts together are no larger than the queue."""


class TenantShares:
    """The queue shares of all tenants that have queued requests."""

    def __init__(self, limits: TenantLimits | None) -> None:
        self._limits = limits
        self._shares: dict[str, QueueShare] = {}

    def of(self, tenant: str) -> QueueShare | None:
        """Return a tenant's share, or None if there are no limits per tenant."""
        if self._limits is None:
            return None
        new = QueueShare(self._limits.max_requests, self._limits.max_tokens, is_tenants=True)
        return self._shares.setdefault(tenant, new)

    def forget(self, tenant: str) -> None:
        """Forget the tenant's share if it is empty."""
        share = self._shares.get(tenant)
        if share is not None and not share.num_requests and not share.num_tokens:
            del self._shares[tenant]

    @property
    def are_guaranteed(self) -> bool:
        """Whether a request that fits into its tenant's part always fits into the queue."""
        return self._limits is not None and self._limits.is_guaranteed
