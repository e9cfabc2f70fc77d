"""Schemas at their places in a document, and the values of JSON that they speak of."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any] | bool
TYPES = ("null", "boolean", "number", "string", "array", "object")

_SHOWN_NAME_CHARS = 100


class TooComplexError(ValueError):
    """The schema's alternatives multiply beyond what is worth working out."""


@dataclass(frozen=True)
class Node:
    """A schema at its place."""

    schema: Schema
    path: str
    """Its JSON path, for messages."""
    is_identified: bool = False
    """Whether it stands in a schema with an identifier of its own: `#/…` would start there."""

    def child(self, schema: Any, *keys: str | int) -> Node:
        return Node(schema, self.place(*keys), self.is_identified)

    def place(self, *keys: str | int) -> str:
        """The path of what stands below; long names are cut, for each schema below them keeps a path."""
        return ".".join([self.path, *(str(key)[:_SHOWN_NAME_CHARS] for key in keys)])


def type_of(value: Any) -> str:
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (int, "number"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


def is_integral(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def value_key(value: Any) -> Hashable:
    """Return a key by which values compare as in JSON: 1 is 1.0 and is not true."""
    kind = type_of(value)
    if kind == "array":
        return (kind, *(value_key(one) for one in value))
    if kind == "object":
        return (kind, frozenset((name, value_key(one)) for name, one in value.items()))
    return (kind, value)
