"""What a request asks of the scheduler: its own words, and those of its service class where it has none.

All of it is a hint: which of it counts depends on the scheduling policy, and nothing of it is refused for that.
"""

from __future__ import annotations

from typing import NamedTuple

from headway.config import did_you_mean
from headway.server.admission.service_classes import MAX_TARGET_MS, ServiceClass, ServiceClasses, is_target_ms
from headway.server.api.api_errors import bad_request
from headway.server.api.requests import GenerationRequest

MAX_USER_CHARS = 256


class Scheduling(NamedTuple):
    """Of one HTTP request, for all its prompts."""

    service_class: ServiceClass
    priority: int
    tenant: str
    ttft_target_s: float | None
    tpot_target_s: float | None


def scheduling_of(request: GenerationRequest, classes: ServiceClasses) -> Scheduling:
    """400 for a class that does not exist, and for times that are none."""
    service_class = _class_of(request, classes)
    if len(request.user or "") > MAX_USER_CHARS:
        raise bad_request(f"'user' may have at most {MAX_USER_CHARS} characters.", param="user")
    return Scheduling(
        service_class,
        priority=service_class.priority if request.priority is None else request.priority,
        tenant=request.user or "",
        ttft_target_s=_target_s("ttft_target_ms", request.ttft_target_ms, service_class.ttft_target_ms),
        tpot_target_s=_target_s("tpot_target_ms", request.tpot_target_ms, service_class.tpot_target_ms),
    )


def _class_of(request: GenerationRequest, classes: ServiceClasses) -> ServiceClass:
    name = request.service_class
    if name is None:
        return classes.default
    found = classes.get(name)
    if found is None:
        hint = did_you_mean(name[:80], classes.names)
        raise bad_request(
            f"There is no service class '{name[:80]}' here.{hint} The classes are: {', '.join(classes.names)}.",
            param="service_class",
            code="unknown_service_class",
        )
    return found


def _target_s(name: str, own_ms: float | None, of_class_ms: float | None) -> float | None:
    if own_ms is not None and not is_target_ms(own_ms):
        raise bad_request(f"'{name}' must be above 0 and at most {MAX_TARGET_MS:.0f} milliseconds.", param=name)
    target_ms = of_class_ms if own_ms is None else own_ms
    return None if target_ms is None else target_ms / 1e3
