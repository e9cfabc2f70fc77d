"""Rewrites the keywords about single values: types, listed values, numbers, strings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headway.structured.schema_nodes import TYPES, value_key
from headway.structured.schema_writing import Handler, Writing

MAX_LENGTH = 65_536
MAX_LISTED_CHARS = 8_192  # of one string in an enum

_ESCAPED = frozenset("\n\r\b\t\f")
_FORMATS = frozenset(["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"])
_EXACT_INTEGERS = 2**53


# ------------------------------------------------------------------------------------------------- types and values
def _type(writing: Writing, value: Any) -> None:
    named = [value] if isinstance(value, str) else value
    if not isinstance(named, list) or not named or not all(isinstance(one, str) for one in named):
        writing.refuse("'type' is a name or a list of names", "type")
    for one in named:
        if one not in TYPES and one != "integer":
            writing.refuse(f"the type '{one:.50}' is unknown", "type")
    writing.out["type"] = value if isinstance(value, str) else list(dict.fromkeys(named))


def _const(writing: Writing, value: Any) -> None:
    _check_value(writing, value, "const")
    writing.out["const"] = value


def _enum(writing: Writing, value: Any) -> None:
    values = writing.listed("enum")
    for at, one in enumerate(values):
        _check_value(writing, one, "enum", at)
    writing.out["enum"] = list({value_key(one): one for one in values}.values())


def _check_value(writing: Writing, value: Any, *keys: str | int) -> None:
    """Refuse values that llguidance would change: it reads numbers as doubles and writes no \\u escapes."""
    if isinstance(value, str):
        if len(value) > MAX_LISTED_CHARS:
            writing.decline(f"a listed string has {len(value):,} characters, at most {MAX_LISTED_CHARS:,}", *keys)
        if any((char < " " and char not in _ESCAPED) or char == "\x7f" for char in value):
            writing.decline("a control character in a listed value is not supported", *keys)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if abs(value) > _EXACT_INTEGERS:
            writing.decline("a listed number beyond 2^53 is not supported", *keys)
    elif isinstance(value, list | dict):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            _check_value(writing, one, *keys, key)


# ---------------------------------------------------------------------------------------------- numbers and strings
def _bound(key: str) -> Handler:
    lower = key in {"minimum", "exclusiveMinimum"}
    plain, exclusive = ("minimum", "exclusiveMinimum") if lower else ("maximum", "exclusiveMaximum")

    def write(writing: Writing, value: Any) -> None:
        if key == exclusive and isinstance(value, bool):  # draft 4
            if value and plain in writing.schema:
                writing.out[exclusive] = writing.out.pop(plain, None) or _number(writing, plain, lower=lower)
            return
        if key == plain and writing.schema.get(exclusive) is True:
            writing.out[exclusive] = _number(writing, plain, lower=lower)
            return
        writing.out[key] = _number(writing, key, lower=lower)
        if key == exclusive and writing.rewriter.draft == 4 and plain in writing.schema:  # read as `true` there
            writing.out[key] = (max if lower else min)(writing.out[key], _number(writing, plain, lower=lower))

    return write


def _number(writing: Writing, key: str, *, lower: bool) -> int | float:
    value = writing.schema[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        writing.refuse(f"'{key}' is a number", key)
    if isinstance(value, int) and abs(value) > _EXACT_INTEGERS:
        near = float(value)
        if (lower and near < value) or (not lower and near > value):
            near = math.nextafter(near, math.inf if lower else -math.inf)
        value = int(near)
    if (lower and value > 2**62) or (not lower and value < -(2**62)):
        writing.decline(f"'{key}' is beyond the integers that can be written", key)
    return value


def _multiple_of(writing: Writing, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        writing.refuse("'multipleOf' is a number above 0", "multipleOf")
    if not 1e-9 <= value <= 1e9:
        writing.decline("'multipleOf' is taken between 1e-9 and 1e9", "multipleOf")
    writing.out["multipleOf"] = value


def _min_length(writing: Writing, value: Any) -> None:
    least = writing.count("minLength")
    if least > MAX_LENGTH:
        writing.decline(f"'minLength' is at most {MAX_LENGTH:,}", "minLength")
    writing.out["minLength"] = least


def _max_length(writing: Writing, value: Any) -> None:
    writing.out["maxLength"] = min(writing.count("maxLength"), MAX_LENGTH)


def _pattern(writing: Writing, value: Any) -> None:
    if not isinstance(value, str):
        writing.refuse("'pattern' is a string", "pattern")
    writing.out["pattern"] = writing.portable(value, "pattern")


def _format(writing: Writing, value: Any) -> None:
    said = writing.schema.keys() & {"const", "enum", "pattern", "minLength", "maxLength"}
    if isinstance(value, str) and value in _FORMATS and not said:
        writing.out["format"] = value


HANDLERS: Mapping[str, Handler] = {
    "type": _type,
    "const": _const,
    "enum": _enum,
    **{key: _bound(key) for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")},
    "multipleOf": _multiple_of,
    "minLength": _min_length,
    "maxLength": _max_length,
    "pattern": _pattern,
    "format": _format,
}
