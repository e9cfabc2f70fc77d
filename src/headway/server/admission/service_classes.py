"""Service classes: an operator's settings for kinds of requests, read from a small file.

A class sets default options for its requests (targets, priority), how many of them may wait, and how early they are
dropped when the queue is full. Without a file there is one class, with no defaults and no limits.

A request's own options override those of its class. All of them are hints: the scheduling policy decides which of them
it uses, and a request is never refused because the policy ignores one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from headway.core.request_options import DEFAULT_OPTIONS, RequestOptions
from headway.errors import ConfigError, InvalidRequestError, did_you_mean
from headway.option_fields import shown
from headway.server.api.api_errors import bad_request
from headway.server.api.record_fields import HTTP_OPTIONS, option_values
from headway.server.api.requests import GenerationRequest
from headway.server.limits import LIMITS
from headway.text_files import read_decoded

TARGETS = ("ttft_target_ms", "tpot_target_ms")
EXAMPLE = """\
default = "standard"          # the class of requests that name none

[classes.interactive]
ttft_target_ms = 500          # first token, from arrival
tpot_target_ms = 50           # each later token
priority = -10                # smaller goes first

[classes.standard]
max_waiting = 200             # more than that are refused
shed = 1                      # larger is dropped earlier

[classes.batch]
priority = 10
max_waiting = 1000
shed = 2
"""
"""Example file for `headway serve --help` and docs/server.md."""
OPTION_KEYS = tuple(
    option.http_name for option in HTTP_OPTIONS if option.name not in ("tenant", "cache_salt", "cache_ttl_s")
)
"""Options that a class may set: all that do not depend on the sender or the content of a request."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """The settings for one kind of request."""

    name: str
    options: RequestOptions = DEFAULT_OPTIONS
    """Default options for its requests."""
    max_waiting: int | None = None
    """How many completions of this class may wait for their first token; None for no limit."""
    shed: int = 0
    """When the queue is full, requests of classes with larger numbers are dropped for those with smaller numbers."""


class ServiceClasses:
    """All service classes by name."""

    def __init__(self, classes: Mapping[str, ServiceClass], default: str) -> None:
        self._classes = dict(classes)
        self.default = self._classes[default]
        """The class of requests that name none."""

    def get(self, name: str) -> ServiceClass | None:
        """Return the class with this name, or None."""
        return self._classes.get(name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._classes)

    def __iter__(self) -> Iterator[ServiceClass]:
        return iter(self._classes.values())

    def __len__(self) -> int:
        return len(self._classes)


ONE_CLASS = ServiceClasses({"default": ServiceClass("default")}, "default")
"""The classes of a server without a file."""


def read_service_classes(path: str | None) -> ServiceClasses:
    """Read the classes from a .toml or .json file; without a path, return `ONE_CLASS`. Raises `ConfigError`."""
    if path is None:
        return ONE_CLASS
    try:
        return parse_service_classes(_load(Path(path)))
    except ConfigError as error:
        raise ConfigError(f"service_classes '{path}': {error}") from None


def parse_service_classes(data: object) -> ServiceClasses:
    """Return the classes from the decoded contents of a file. Raises `ConfigError`."""
    if not isinstance(data, dict):
        raise ConfigError(f"an object with 'classes' is expected, not {shown(data)}.")
    _check_keys(data, ("default", "classes"), "")
    tables = data.get("classes")
    if not isinstance(tables, dict) or not tables:
        raise ConfigError("it must have a table 'classes' with at least one class, e.g. [classes.interactive].")
    classes = {name: _class(name, table) for name, table in tables.items()}
    default = data.get("default", next(iter(classes)) if len(classes) == 1 else None)
    if default is None:
        raise ConfigError(f"'default' must name the class of requests that name none: {', '.join(classes)}.")
    if not isinstance(default, str) or default not in classes:
        hint = did_you_mean(str(default), classes)
        raise ConfigError(f"'default' is {shown(default)}, and there is no such class.{hint}")
    return ServiceClasses(classes, default)


def _load(path: Path) -> object:
    if path.suffix not in (".toml", ".json"):
        raise ConfigError("the file's name must end in .toml or .json.")
    return read_decoded(path, tomllib.loads if path.suffix == ".toml" else json.loads, path.suffix[1:].upper())


def _class(name: str, table: object) -> ServiceClass:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"the name of a class has 1 to 64 letters, digits, '.', '-' and '_'; {shown(name)} is none.")
    where = f"class '{name}': "
    if not isinstance(table, dict):
        raise ConfigError(f"{where}a table is expected, not {shown(table)}.")
    _check_keys(table, (*OPTION_KEYS, "max_waiting", "shed"), where)
    for key in TARGETS:
        if key in table and not is_target_ms(table[key]):
            raise ConfigError(f"{where}{key} must be a number of milliseconds above 0, not {shown(table[key])}.")
    _check_whole(table, "priority", 1 - LIMITS.max_priority, LIMITS.max_priority - 1, where)
    _check_whole(table, "max_waiting", 1, 2**40, where)
    _check_whole(table, "shed", 0, 2**31, where)
    try:
        options = RequestOptions(**option_values({key: table[key] for key in OPTION_KEYS if key in table}))
    except InvalidRequestError as error:
        raise ConfigError(f"{where}{error}") from None
    return ServiceClass(name, options, max_waiting=table.get("max_waiting"), shed=table.get("shed", 0))


def is_target_ms(value: object) -> bool:
    """Whether the value is valid as a target in milliseconds."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return is_number and 0 < value <= LIMITS.max_target_ms  # type: ignore[operator]


def _check_keys(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in known:
            raise ConfigError(f"{where}there is no setting {shown(key)}.{did_you_mean(key, known)}")


def _check_whole(table: Mapping[str, Any], key: str, least: int, most: int, where: str) -> None:
    value = table.get(key, least)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{where}{key} must be a whole number from {least} to {most}, not {shown(value)}.")


class Scheduling(NamedTuple):
    """Class, options and client of one HTTP request; they apply to all of its prompts."""

    service_class: ServiceClass
    options: RequestOptions
    client: str = ""
    """The sender: the digest of an API key, or an address."""


def scheduling_of(request: GenerationRequest, classes: ServiceClasses) -> Scheduling:
    """Return a request's class and options. Raises 400 for an unknown class or an option beyond the server's limits."""
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
    """Raise 400 for options beyond the server's limits, which are stricter than the record's own checks."""
    if len(request.user or "") > LIMITS.max_user_chars:
        raise bad_request(f"'user' may have at most {LIMITS.max_user_chars} characters.", param="user")
    for name in TARGETS:
        own_ms = getattr(request, name)
        if own_ms is not None and not is_target_ms(own_ms):
            raise bad_request(
                f"'{name}' must be above 0 and at most {LIMITS.max_target_ms:.0f} milliseconds.", param=name
            )
    most = LIMITS.max_priority
    if not -most < (request.priority or 0) < most:
        raise bad_request(f"'priority' must be between -{most} and {most}.", param="priority")
    if request.cache_salt is not None and not 1 <= len(request.cache_salt) <= LIMITS.max_salt_chars:
        raise bad_request(f"'cache_salt' must have 1 to {LIMITS.max_salt_chars} characters.", param="cache_salt")
    if request.cache_ttl_s is not None and not 0 <= request.cache_ttl_s <= LIMITS.max_cache_ttl_s:
        raise bad_request(f"'cache_ttl_s' must be from 0 to {LIMITS.max_cache_ttl_s:g} seconds.", param="cache_ttl_s")
