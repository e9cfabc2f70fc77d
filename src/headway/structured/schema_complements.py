"""Writes the complement of a schema as a schema, which `not` and `if` need.

A value outside all views of a schema is outside the schema. The complement is made from types, listed values, required
names, the values of properties, and patterns that only list characters. Other constraints are ignored, so the result
may allow less than the complement, but never more.
"""

from __future__ import annotations

from collections.abc import Iterable

from headway.structured.json_pattern import none_of, opposite_pattern
from headway.structured.schema_nodes import TYPES, Node, Schema
from headway.structured.schema_views import SchemaViews, View

_MAX_DEPTH = 10


class InexpressibleError(ValueError):
    """The opposite of a schema cannot be written as a schema."""


def complement(sets: SchemaViews, node: Node, depth: int = 0) -> Schema:
    """Return a schema, free of references, that allows nothing of what this one allows."""
    if depth > _MAX_DEPTH:
        raise InexpressibleError("the schema is nested too deeply")
    parts = [_outside(sets, view, depth) for view in sets.views(node, depth)]
    if False in parts:
        return False
    return {"allOf": parts} if len(parts) > 1 else parts[0] if parts else True


def _outside(sets: SchemaViews, view: View, depth: int) -> Schema:
    others = [kind for kind in TYPES if kind not in view.types]
    options: list[Schema] = [{"type": others}] if others else []
    if view.values is not None:
        options += _other_values(view.values, view.types)
        return {"anyOf": options} if options else False
    passed_over = not view.exact or _has_bounds(view)
    if "string" in view.types:
        opposites = map(opposite_pattern, view.patterns)
        options += [{"type": "string", "pattern": one} for one in opposites if one is not None]
    if "object" in view.types:
        options += [{"type": "object", "properties": {name: False}} for name in sorted(view.required)]
        for name, nodes in view.properties.items():
            for inner in nodes:
                try:
                    outside = complement(sets, inner, depth + 1)
                except InexpressibleError:
                    passed_over = True
                    continue
                if outside is not False:
                    options.append({"type": "object", "required": [name], "properties": {name: outside}})
    if not options and passed_over:
        raise InexpressibleError("the opposite of this schema cannot be expressed")
    return {"anyOf": options} if options else False


def _has_bounds(view: View) -> bool:
    """Whether a view has constraints that the complement ignores."""
    said = (view.min_length, view.patterns, view.extras, view.items, view.prefix, view.min_items)
    return any(said) or view.max_length is not None or view.max_items is not None


def _other_values(values: Iterable[object], types: frozenset[str]) -> list[Schema]:
    """Schemas for strings and booleans that are not listed, if these types are allowed."""
    listed = list(values)
    options: list[Schema] = []
    words = [one for one in listed if isinstance(one, str)]
    if words:
        outside = none_of(words)
        if outside is None:
            raise InexpressibleError("the listed strings are too long or too many to be excluded")
        options.append({"type": "string", "pattern": outside})
    left = [one for one in (True, False) if not any(one is other for other in listed)]
    if "boolean" in types and len(left) == 1:
        options.append({"enum": left})
    return options
