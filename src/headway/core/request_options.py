"""What a request asks of the scheduler and the cache, beside its prompt and its sampling: one frozen record.

It is made once, at the edge (HTTP or `LLM.generate`), travels whole to the scheduler, also over the engine process's
socket, and is never changed on the way. A new option is a field here and the place that reads it; see docs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headway.errors import InvalidRequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOptions:
    """Every option may be left out. Which of them count depends on the scheduling policy."""

    priority: int = 0
    """The smallest number goes first (policy `priority`)."""
    tenant: str = ""
    """Requests of one tenant share its part of the batch (policy `fair`)."""
    predicted_tokens: float | None = None
    """How many tokens the request is expected to generate (sjf, srpt, ltr, hrrn; dynamic batching)."""
    ttft_target_s: float | None = None
    """Target for the time from arrival to the first token (policy `slo`)."""
    tpot_target_s: float | None = None
    """Target for the time between later tokens (policy `slo`)."""
    cache_salt: str | None = None
    """Only requests with the same salt share cached prefixes."""
    cache_ttl_s: float = 0.0
    """How long the prompt's blocks stay pinned in the prefix cache, where there is room."""

    def __post_init__(self) -> None:
        """`InvalidRequestError` names the option that is wrong."""
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise InvalidRequestError(f"priority must be a whole number, not {self.priority!r}.", param="priority")
        if not isinstance(self.tenant, str):
            raise InvalidRequestError(f"tenant must be a string, not {self.tenant!r}.", param="tenant")
        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            raise InvalidRequestError(f"cache_salt must be a string, not {self.cache_salt!r}.", param="cache_salt")
        if not _is_number(self.cache_ttl_s) or not 0 <= self.cache_ttl_s < math.inf:
            raise InvalidRequestError(
                f"cache_ttl_s must be 0 or more seconds, not {self.cache_ttl_s!r}.", param="cache_ttl_s"
            )
        for name in ("predicted_tokens", "ttft_target_s", "tpot_target_s"):
            number = getattr(self, name)
            if number is not None and (not _is_number(number) or not 0 < number < math.inf):
                raise InvalidRequestError(f"{name} must be a number above 0, not {number!r}.", param=name)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


DEFAULT_OPTIONS = RequestOptions()
