"""The options of a request for the scheduler and the cache, besides its prompt and its sampling parameters.

They are one frozen record. It is made once, at the edge (HTTP or `LLM.generate`), and is passed unchanged to the
scheduler, also over the engine process's socket. The keywords of `LLM.generate`, the fields of the HTTP API and the
names in files of service and workload classes are derived from its fields. So a new option needs one field here and the
code that reads it: see docs/adding_an_option.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headway.errors import InvalidRequestError

_Check = Callable[[Any], bool]


def _option(default: Any, check: _Check, rule: str) -> Any:
    """Declare an option. `rule` says in words which values `check` accepts besides the default."""
    return field(default=default, metadata={"check": check, "rule": rule})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and 0 < value < math.inf


def _is_duration(value: Any) -> bool:
    return _is_number(value) and 0 <= value < math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOptions:
    """The options of one request. Each may be omitted; which of them have an effect depends on the policy."""

    priority: int = _option(0, _is_whole, "a whole number")
    """The smallest number goes first (policy `priority`)."""
    tenant: str = _option("", _is_text, "a string")
    """Requests of one tenant share its part of the batch (policy `fair`)."""
    predicted_tokens: float | None = _option(None, _is_positive, "a number above 0")
    """How many tokens the request is expected to generate, where requests are ordered by length."""
    ttft_target_s: float | None = _option(None, _is_positive, "a number above 0")
    """Target for the time from arrival to the first token (policy `slo`)."""
    tpot_target_s: float | None = _option(None, _is_positive, "a number above 0")
    """Target for the time between later tokens (policy `slo`)."""
    cache_salt: str | None = _option(None, _is_text, "a string")
    """Only requests with the same salt share cached prefixes."""
    cache_ttl_s: float = _option(0.0, _is_duration, "0 or more seconds")
    """How long the prompt's blocks stay pinned in the prefix cache, where there is room."""
    blocks_at: str = _option("", _is_text, "a string")
    """The address of a replica that has the full blocks of its tokens. The router sets it; the blocks are fetched."""

    def __post_init__(self) -> None:
        """Check all options. Raises `InvalidRequestError`, which names the wrong option."""
        for name, default, check, rule in _CHECKS:
            value = getattr(self, name)
            if value is not default and not check(value):
                raise InvalidRequestError(f"{name} must be {rule}, not {value!r}.", param=name)


_CHECKS: tuple[tuple[str, Any, _Check, str], ...] = tuple(
    (item.name, item.default, item.metadata["check"], item.metadata["rule"])
    for item in dataclasses.fields(RequestOptions)
)
OPTION_NAMES = tuple(name for name, *_ in _CHECKS)
DEFAULT_OPTIONS = RequestOptions()
