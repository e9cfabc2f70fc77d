"""The headers by which gateways say something about a request, and learn why one was refused.

`HEADER_FIELDS` says which header stands for which field of a body. Clients may send the headers too: they can say
nothing that a body could not say, so nothing is gained by forging one. A gateway that must have the last word removes
the clients' headers and the fields of their bodies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from headway.server.admission.service_classes import ServiceClasses, is_target_ms
from headway.server.api.api_errors import ApiError, bad_request
from headway.server.api.requests import GenerationRequest
from headway.server.http.draining import SHUTTING_DOWN_CODE
from headway.server.limits import LIMITS

_WHOLE = re.compile(r"[+-]?[0-9]{1,12}")
_DECIMAL = re.compile(r"[0-9]{1,12}(\.[0-9]{1,12})?")


def _priority(text: str) -> int:
    value = int(text) if _WHOLE.fullmatch(text) else LIMITS.max_priority
    if not -LIMITS.max_priority < value < LIMITS.max_priority:
        raise ValueError
    return value


def _target_ms(text: str) -> float:
    value = float(text) if _DECIMAL.fullmatch(text) else 0.0
    if not is_target_ms(value):
        raise ValueError
    return value


def _user(text: str) -> str:
    if not 1 <= len(text) <= LIMITS.max_user_chars:
        raise ValueError
    return text


def _class_name(text: str) -> str:
    return text


class HeaderField(NamedTuple):
    """A header that stands for a field."""

    header: str
    field: str
    read: Callable[[str], object]
    """Returns the value. Raises `ValueError` if the header has none."""
    rule: str
    """What a valid value is, for the error."""
    overrides: bool = False
    """Whether it takes precedence over the body's field. Otherwise it counts only if the body leaves that out."""


_TARGET = f"a number of milliseconds above 0 and at most {LIMITS.max_target_ms:.0f}"
_USER = f"1 to {LIMITS.max_user_chars} characters"
HEADER_FIELDS = (
    HeaderField(
        "x-vllm-priority",
        "priority",
        _priority,
        f"a whole number between -{LIMITS.max_priority} and {LIMITS.max_priority}",
        overrides=True,  # as in vLLM
    ),
    HeaderField("x-llm-d-slo-ttft-ms", "ttft_target_ms", _target_ms, _TARGET),
    HeaderField("x-slo-ttft-ms", "ttft_target_ms", _target_ms, _TARGET),
    HeaderField("x-llm-d-slo-tpot-ms", "tpot_target_ms", _target_ms, _TARGET),
    HeaderField("x-slo-tpot-ms", "tpot_target_ms", _target_ms, _TARGET),
    HeaderField("x-llm-d-inference-fairness-id", "user", _user, _USER),
    HeaderField("x-gateway-inference-fairness-id", "user", _user, _USER),
    HeaderField("x-llm-d-inference-objective", "service_class", _class_name, ""),
    HeaderField("x-gateway-inference-objective", "service_class", _class_name, ""),
)
"""For the same field, the first header that was sent counts: the old name of a header comes after the new one."""
_NAMES = frozenset(each.header.encode() for each in HEADER_FIELDS)


def apply_headers(
    request: GenerationRequest, headers: Iterable[tuple[bytes, bytes]], classes: ServiceClasses
) -> dict[str, str]:
    """Fill in the fields of a request that its headers stand for. Returns the names of these fields with those of the
    headers. Raises 400 for a header with a wrong value. An objective that is the name of no service class is ignored:
    it belongs to the gateway, which may have others."""
    given: dict[bytes, bytes] = {}
    for name, text in headers:
        if name in _NAMES:
            given.setdefault(name, text)
    applied: dict[str, str] = {}
    for each in HEADER_FIELDS if given else ():
        sent = given.get(each.header.encode())
        if sent is None or each.field in applied:
            continue
        value = _value(each, sent.decode("latin-1").strip())
        if each.field == "service_class" and classes.get(str(value)) is None:
            continue
        if each.overrides or getattr(request, each.field) is None:
            setattr(request, each.field, value)
            applied[each.field] = each.header
    return applied


def _value(each: HeaderField, text: str) -> object:
    try:
        return each.read(text)
    except ValueError:
        raise bad_request(
            f"The header '{each.header}' must be {each.rule}, not '{text[:80]}'.", param=each.header
        ) from None


# ---- why a request was refused --------------------------------------------------------------------------------------

DROPPED_REASON = "x-llm-d-request-dropped-reason"
_REASONS: Mapping[str | None, str] = {
    "queue_timeout": "rejected-ttl-expired",
    SHUTTING_DOWN_CODE: "rejected-shutting-down",
    "shed": "evicted-priority",
}
"""Codes of errors → llm-d's reasons."""


def dropped_reason(failure: ApiError) -> dict[str, str]:
    """Return the header that tells a gateway why a request was dropped, if it was: refused or ended because of other
    requests or of the server's state, and not because of what it asked for."""
    reason = _REASONS.get(failure.code, "rejected-saturated" if failure.status == 429 else "")
    return {DROPPED_REASON: reason} if reason else {}
