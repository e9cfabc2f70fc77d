"""What a request may say beside its prompt and its sampling: how it is scheduled, and what becomes of its blocks."""

from __future__ import annotations

from typing import TypedDict


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
