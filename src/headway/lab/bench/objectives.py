"""Service-level objectives over a whole run: bounds on the keys of its result, such as `p99_itl_ms=100`.

A latency, or a count of what went wrong, must not exceed its bound; a rate or a share must reach it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway.config import did_you_mean
from headway.errors import ConfigError
from headway.lab.bench.online_metrics import OnlineMetrics

HIGHER_IS_BETTER = frozenset(
    {
        "completed",
        "request_throughput",
        "request_goodput",
        "goodput_share",
        "output_throughput",
        "total_token_throughput",
        "max_output_tokens_per_s",
    }
)
NEITHER_IS_BETTER = frozenset(
    {
        "duration",
        "total_input_tokens",
        "total_output_tokens",
        "offered_request_rate",
        "max_concurrent_requests",
        "tokens_per_event",
        "total_cached_tokens",
        "cached_token_share",
    }
)
SARATHI = ("p99_itl_ms=100", "p50_ttft_ms=2000")
"""Sarathi-Serve's capacity: the 99th percentile of the time between tokens is bounded, and so is the median delay until
a request begins (here with its prompt's computation in it)."""


@dataclass(frozen=True)
class Objective:
    """A bound on one key of a result."""

    key: str
    bound: float

    @property
    def is_floor(self) -> bool:
        """Whether the bound is to be reached, not kept below."""
        return self.key in HIGHER_IS_BETTER

    def is_met(self, result: Mapping[str, float | None]) -> bool:
        """At the bound is met; a number that is not there is not."""
        value = result.get(self.key)
        if value is None:
            return False
        return value >= self.bound if self.is_floor else value <= self.bound

    def __str__(self) -> str:
        return f"{self.key} {'≥' if self.is_floor else '≤'} {self.bound:g}"


def parse_objective(text: str) -> Objective:
    """From `KEY=BOUND`. `ConfigError` names the key that was probably meant."""
    key, _, number = text.partition("=")
    known = tuple(key for key in result_keys() if key not in NEITHER_IS_BETTER)
    if key not in known:
        hint = did_you_mean(key, known) or " Keys are those of the result, such as p99_itl_ms or request_goodput."
        raise ConfigError(f"An objective is KEY=BOUND; there is no key '{key}' to bound.{hint}")
    try:
        return Objective(key, float(number))
    except ValueError:
        raise ConfigError(f"The bound of '{key}' must be a number, not '{number}'.") from None


def missed(objectives: Sequence[Objective], result: Mapping[str, float | None]) -> list[Objective]:
    """Those that a result does not meet."""
    return [objective for objective in objectives if not objective.is_met(result)]


def result_keys() -> tuple[str, ...]:
    """The keys that every result has."""
    return tuple(OnlineMetrics.of([], 1.0).as_json())
