"""From the bytes of a request to a checked record. What does not fit is refused with the name of the field at fault."""

from __future__ import annotations

import functools
import re
from typing import Any, TypeVar

import msgspec

from headway.config import did_you_mean
from headway.server.api.api_errors import ApiError, bad_request

_T = TypeVar("_T", bound=msgspec.Struct)

_AT = re.compile(r" - at `(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$")
_SHOWN_NAME_CHARS = 80

MAX_VALUES = 2**19
MAX_NESTED = 2**16
"""Commas in a body, and opening brackets: so many numbers, and lists or objects, are parsed in a tenth of a second, in
which the event loop does nothing else. Signs inside of texts count too; no context has room for so many of them."""


def decode_json(body: bytes, kind: type[_T]) -> _T:
    """The body as a `kind`, at once."""
    if not body.strip():
        raise bad_request("The body is empty; a JSON object is expected.")
    check_sizes(*sizes_of(body))
    return decode(body, kind)


def decode(body: bytes, kind: type[_T]) -> _T:
    """As `decode_json`, of a body whose sizes are known to be good."""
    try:
        return _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind) from None
    except UnicodeDecodeError:
        raise bad_request("The body is not valid UTF-8.") from None
    except msgspec.DecodeError as error:
        raise bad_request(f"The body is not valid JSON: {error}.") from None
    except RecursionError:
        raise bad_request("The body is nested too deeply.") from None


def sizes_of(body: bytes) -> tuple[int, int]:
    """How many commas and opening brackets a body, or part of one, has."""
    return body.count(b","), body.count(b"{") + body.count(b"[")


def check_sizes(num_values: int, num_nested: int) -> None:
    """Long texts are parsed in no time, many small values are not."""
    if num_values > MAX_VALUES or num_nested > MAX_NESTED:
        raise bad_request(
            f"The body has {num_values} commas and {num_nested} opening brackets; there may be {MAX_VALUES} and "
            f"{MAX_NESTED}. Send fewer prompts at once."
        )


@functools.cache
def _decoder(kind: type[_T]) -> msgspec.json.Decoder[_T]:
    return msgspec.json.Decoder(kind)


def _explain(message: str, kind: type[msgspec.Struct]) -> ApiError:
    """msgspec says "Expected `int`, got `str` - at `$.n`"; clients want the field by itself."""
    at = _AT.search(message)
    path = at["path"].removeprefix("$").lstrip(".") if at else ""
    what = _AT.sub("", message)
    if unknown := _UNKNOWN.match(what):
        return _unknown_field(unknown["name"], path, kind)
    if missing := _MISSING.match(what):
        name = _join(path, missing["name"])
        return bad_request(f"'{name}' is required.", param=name)
    if not path:
        return bad_request(f"The body does not fit: {_lower_first(what)}.")
    return bad_request(f"'{path}' does not fit: {_lower_first(what)}.", param=path)


def _unknown_field(name: str, path: str, kind: type[msgspec.Struct]) -> ApiError:
    shown = _join(path, name[:_SHOWN_NAME_CHARS])
    return bad_request(
        f"Unknown field '{shown}'.{did_you_mean(name[:_SHOWN_NAME_CHARS], _known_names(path, kind))}",
        param=shown,
        code="unknown_field",
    )


def _known_names(path: str, kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """The fields of the record at `path` inside a `kind`."""
    here: Any = kind
    for step in re.findall(r"\w+", path):
        found = next((field for field in msgspec.structs.fields(here) if field.name == step), None)
        inner = _struct_in(found.type) if found else None
        if inner is None:
            return ()
        here = inner
    return tuple(field.name for field in msgspec.structs.fields(here))


def _struct_in(hint: Any) -> type[msgspec.Struct] | None:
    """The record inside `list[Message] | None` and the like."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return hint
    for part in getattr(hint, "__args__", ()):
        if (found := _struct_in(part)) is not None:
            return found
    return None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
