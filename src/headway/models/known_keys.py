"""Which keys and values a record of a configuration file may have; an error names any other key.

A table gives a rule for each key. A rule gets the place of the record (for errors), the key and the value, and raises
if it does not accept the value.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from headway.errors import CorruptModelError, UnsupportedModelError

Rule = Callable[[str, str, Any], None]
KnownKeys = Mapping[str, Rule]


def check_keys(source: str, values: Mapping[str, Any], known: KnownKeys, *, ignores_unknown: bool = False) -> None:
    """Apply a table to the record at `source`. `ignores_unknown`: keys that are not in the table mean nothing."""
    for key, value in values.items():
        if key in known:
            known[key](source, str(key), value)
        elif not ignores_unknown:
            raise UnsupportedModelError(f"{source}: {key!r} (here {reprlib.repr(value)}) is not a known key")


def anything(source: str, key: str, value: Any) -> None:
    """Accept every value: the key changes nothing that is computed, or another function reads it."""


def only(*accepted: Any) -> Rule:
    """Accept only these values: those that are implemented, or that turn a feature off."""

    def check(source: str, key: str, value: Any) -> None:
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in accepted):
            shown = ", ".join(repr(one) for one in accepted)
            raise UnsupportedModelError(
                f"{source}: {key!r} is {reprlib.repr(value)}, which is not supported; supported: {shown}"
            )

    return check


def names(source: str, key: str, value: Any) -> None:
    """Accept a list of strings, or null."""
    if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        raise CorruptModelError(f"{source}: {key!r} is {reprlib.repr(value)}, which is not a list of names")


def record(known: KnownKeys) -> Rule:
    """Accept an object with these keys, or null."""

    def check(source: str, key: str, value: Any) -> None:
        if value is None:
            return
        if not isinstance(value, Mapping):
            raise CorruptModelError(f"{source}: {key!r} is {reprlib.repr(value)}, which is not an object")
        check_keys(f"{source}: {key}", value, known)

    return check


def each(rule: Rule) -> Rule:
    """Accept an object whose keys are free and whose values obey a rule, or null."""

    def check(source: str, key: str, value: Any) -> None:
        if value is None:
            return
        if not isinstance(value, Mapping):
            raise CorruptModelError(f"{source}: {key!r} is {reprlib.repr(value)}, which is not an object")
        for name, item in value.items():
            rule(f"{source}: {key}", str(name), item)

    return check
