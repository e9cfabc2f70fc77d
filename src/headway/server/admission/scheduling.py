"""What a request asks of the scheduler and the cache: its own words, and those of its service class where it has none.

All of it is a hint: which of it counts depends on the scheduling policy, and nothing of it is refused for that.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from headway.config import did_you_mean
from headway.core.request_options import RequestOptions
from headway.server.admission.service_classes import (
    MAX_PRIORITY,
    MAX_TARGET_MS,
    TARGETS,
    ServiceClass,
    ServiceClasses,
    is_target_ms,
)
from headway.server.api.api_errors import bad_request
from headway.server.api.record_fields import HTTP_OPTIONS, option_values
from headway.server.api.requests import GenerationRequest

MAX_USER_CHARS = 256
MAX_SALT_CHARS = 256
MAX_CACHE_TTL_S = 86_400.0


class Scheduling(NamedTuple):
    """Of one HTTP request, for all its prompts."""

    service_class: ServiceClass
    options: RequestOptions


def scheduling_of(request: GenerationRequest, classes: ServiceClasses) -> Scheduling:
    """400 for a class that does not exist, and for an option that no request may have."""
    service_class = _class_of(request, classes)
    _check_limits(request)
    own = option_values({option.http_name: getattr(request, option.http_name) for option in HTTP_OPTIONS})
    options = dataclasses.replace(service_class.options, **own) if own else service_class.options
    return Scheduling(service_class, options)


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


def _check_limits(request: GenerationRequest) -> None:
    """What the server bounds beyond the record's own rules."""
    if len(request.user or "") > MAX_USER_CHARS:
        raise bad_request(f"'user' may have at most {MAX_USER_CHARS} characters.", param="user")
    for name in TARGETS:
        own_ms = getattr(request, name)
        if own_ms is not None and not is_target_ms(own_ms):
            raise bad_request(f"'{name}' must be above 0 and at most {MAX_TARGET_MS:.0f} milliseconds.", param=name)
    if not -MAX_PRIORITY < (request.priority or 0) < MAX_PRIORITY:
        raise bad_request(f"'priority' must be between -{MAX_PRIORITY} and {MAX_PRIORITY}.", param="priority")
    if request.cache_salt is not None and not 1 <= len(request.cache_salt) <= MAX_SALT_CHARS:
        raise bad_request(f"'cache_salt' must have 1 to {MAX_SALT_CHARS} characters.", param="cache_salt")
    if request.cache_ttl_s is not None and not 0 <= request.cache_ttl_s <= MAX_CACHE_TTL_S:
        raise bad_request(f"'cache_ttl_s' must be from 0 to {MAX_CACHE_TTL_S:g} seconds.", param="cache_ttl_s")
