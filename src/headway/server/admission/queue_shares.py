"""The queue, and the part of it that one tenant may have: one that sends too much is refused itself, and no other.

Where every tenant has a part and all parts together are no more than the queue, a request within its tenant's part is
never refused for what others have waiting. A part in which nothing waits takes any one request, as the queue does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from headway.server.api.api_errors import ApiError, overloaded


@dataclass(eq=False)
class QueueShare:
    """What waits of those who share it, and how much may."""

    max_requests: int
    max_tokens: int
    is_tenants: bool = False
    num_requests: int = 0
    num_tokens: int = 0

    def has_room(self, num_requests: int, num_tokens: int) -> bool:
        """Whether so much more may wait."""
        return not self.num_requests or (
            self.num_requests + num_requests <= self.max_requests and self.num_tokens + num_tokens <= self.max_tokens
        )

    def full(self, num_requests: int) -> ApiError:
        """What a request is told that does not fit."""
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
    """Whether all parts together are no more than the queue."""


class TenantShares:
    """The parts of those tenants of whom something waits."""

    def __init__(self, limits: TenantLimits | None) -> None:
        self._limits = limits
        self._shares: dict[str, QueueShare] = {}

    def of(self, tenant: str) -> QueueShare | None:
        """That of a tenant, if there are limits."""
        if self._limits is None:
            return None
        new = QueueShare(self._limits.max_requests, self._limits.max_tokens, is_tenants=True)
        return self._shares.setdefault(tenant, new)

    def forget(self, tenant: str) -> None:
        """Something of a tenant has left the queue."""
        share = self._shares.get(tenant)
        if share is not None and not share.num_requests and not share.num_tokens:
            del self._shares[tenant]

    @property
    def are_guaranteed(self) -> bool:
        """Whether it is enough to look at a tenant's own part."""
        return self._limits is not None and self._limits.is_guaranteed
