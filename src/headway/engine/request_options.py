"""What a request may say beside its prompt and its sampling: how it is scheduled, and what becomes of its blocks."""

from __future__ import annotations

import math
from typing import TypedDict

from headway.errors import InvalidRequestError


class RequestOptions(TypedDict, total=False):
    """Every one may be left out. Which of them count depends on the scheduling policy."""

    priority: int
    """The smallest number goes first (policy `priority`)."""
    tenant: str
    """Whose request it is (policy `fair`)."""
    predicted_tokens: float | None
    """How many tokens it is going to generate, if anybody knows (sjf, srpt, ltr, hrrn; dynamic batching)."""
    ttft_target_s: float | None
    """So long after its arrival it should have its first token (policy `slo`)."""
    tpot_target_s: float | None
    """And each later one so long after the one before."""
    cache_salt: str | None
    """Only requests with the same salt share cached prefixes."""
    cache_ttl_s: float
    """So long its prompt's blocks stay in the prefix cache, if at all possible."""


def check_options(options: RequestOptions) -> None:
    """`InvalidRequestError` says what is wrong with them."""
    priority = options.get("priority", 0)
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidRequestError(f"priority must be a whole number, not {priority!r}.", param="priority")
    tenant = options.get("tenant", "")
    if not isinstance(tenant, str):
        raise InvalidRequestError(f"tenant must be a string, not {tenant!r}.", param="tenant")
    salt = options.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise InvalidRequestError(f"cache_salt must be a string, not {salt!r}.", param="cache_salt")
    ttl_s = options.get("cache_ttl_s", 0.0)
    if not _is_number(ttl_s) or not 0 <= ttl_s < math.inf:
        raise InvalidRequestError(f"cache_ttl_s must be 0 or more seconds, not {ttl_s!r}.", param="cache_ttl_s")
    positive = ("predicted_tokens", "ttft_target_s", "tpot_target_s")
    numbers: dict[str, float | None] = {name: options.get(name) for name in positive}  # type: ignore[misc]
    for name, number in numbers.items():
        if number is not None and (not _is_number(number) or not 0 < number < math.inf):
            raise InvalidRequestError(f"{name} must be a number above 0, not {number!r}.", param=name)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
