"""Rewrites the keywords about arrays and objects."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headway.structured.pattern_matching import compiler_fault
from headway.structured.schema_nodes import Schema
from headway.structured.schema_writing import Handler, Writing, unsupported

MAX_ITEMS = 2_000
MAX_MIN_ITEMS = 500
MAX_PROPERTIES = 1_000  # of one object
MAX_PATTERN_PROPERTIES = 50
MAX_SELECTIONS = 128  # of minProperties

# Keywords that evaluate properties or items in schemas of their own.
_EVALUATING = ("allOf", "anyOf", "oneOf", "if", "$ref", "contains", "dependencies", "dependentSchemas")


# ----------------------------------------------------------------------------------------------------------- arrays
def _items(writing: Writing, value: Any) -> None:
    if isinstance(value, list):
        writing.out["prefixItems"] = [writing.child(one, "items", at) for at, one in enumerate(value)]
        if "additionalItems" in writing.schema:
            writing.out["items"] = writing.child(writing.schema["additionalItems"], "additionalItems")
    else:
        writing.out["items"] = writing.child(value, "items")


def _prefix_items(writing: Writing, value: Any) -> None:
    if writing.rewriter.draft < 2020:  # there, `items` speaks of all items
        return
    listed = writing.listed("prefixItems", limit=MAX_MIN_ITEMS)
    writing.out["prefixItems"] = [writing.child(one, "prefixItems", at) for at, one in enumerate(listed)]


def _min_items(writing: Writing, value: Any) -> None:
    least = writing.count("minItems")
    if least > MAX_MIN_ITEMS:
        writing.decline(f"'minItems' is at most {MAX_MIN_ITEMS:,}", "minItems")
    writing.out["minItems"] = least


def _max_items(writing: Writing, value: Any) -> None:
    writing.out["maxItems"] = min(writing.count("maxItems"), MAX_ITEMS)


def _unique_items(writing: Writing, value: Any) -> None:
    if not isinstance(value, bool):
        writing.refuse("'uniqueItems' is a boolean", "uniqueItems")
    views = writing.rewriter.sets.views(writing.node)
    if value and any("array" in view.types and (view.max_items is None or view.max_items > 1) for view in views):
        writing.decline("'uniqueItems' is not supported", "uniqueItems")


def _unevaluated_items(writing: Writing, value: Any) -> None:
    items = writing.schema.get("items")
    # A list of schemas speaks of the first items only, up to draft 2019-09.
    is_whole = "additionalItems" in writing.schema if isinstance(items, list) else "items" in writing.schema
    if value is not True and not is_whole:
        _check_evaluated(writing, "unevaluatedItems")
        writing.out["items"] = writing.child(value, "unevaluatedItems")


def _check_evaluated(writing: Writing, key: str) -> None:
    for one in _EVALUATING:
        if one in writing.schema:
            writing.decline(f"'{key}' beside '{one}' is not supported", key)


# ---------------------------------------------------------------------------------------------------------- objects
def _properties(writing: Writing, value: Any) -> None:
    listed = writing.mapping("properties")
    if len(listed) > MAX_PROPERTIES:
        writing.decline(f"'properties' has more than {MAX_PROPERTIES:,} names", "properties")
    writing.out["properties"] = {name: writing.child(one, "properties", name) for name, one in listed.items()}


def _required(writing: Writing, value: Any) -> None:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        writing.refuse("'required' is a list of names", "required")
    writing.out["required"] = list(dict.fromkeys(value))


def _additional_properties(writing: Writing, value: Any) -> None:
    writing.out["additionalProperties"] = writing.child(value, "additionalProperties")


def _unevaluated_properties(writing: Writing, value: Any) -> None:
    if value is not True and "additionalProperties" not in writing.schema:
        _check_evaluated(writing, "unevaluatedProperties")
        writing.out["additionalProperties"] = writing.child(value, "unevaluatedProperties")


def _pattern_properties(writing: Writing, value: Any) -> None:
    listed = writing.mapping("patternProperties")
    if len(listed) > MAX_PATTERN_PROPERTIES:
        writing.decline(f"'patternProperties' has more than {MAX_PATTERN_PROPERTIES} patterns", "patternProperties")
    merged: dict[str, tuple[list[str], Schema]] = {}
    for pattern, one in listed.items():
        inner = writing.child(one, "patternProperties", pattern)
        portable = writing.portable(pattern, "patternProperties", pattern)
        merged.setdefault(json.dumps(inner), ([], inner))[0].append(portable)
    # Patterns that overlap are not supported; those that say the same may overlap as one.
    writing.out["patternProperties"] = {
        "|".join(patterns) if len(patterns) == 1 else "|".join(f"(?:{one})" for one in patterns): inner
        for patterns, inner in merged.values()
    }
    names = dict.fromkeys(writing.out["patternProperties"], True)
    if len(names) > 1 and (fault := compiler_fault({"type": "object", "patternProperties": names})) is not None:
        writing.decline(fault, "patternProperties")


def _object_names(writing: Writing) -> tuple[list[str], list[str], bool]:
    """Names that are required, names that are optional, and whether there can be no others."""
    schema = writing.schema
    listed, named = schema.get("properties"), schema.get("required")
    required = dict.fromkeys(one for one in named if isinstance(one, str)) if isinstance(named, list) else {}
    optional = [name for name in listed if name not in required] if isinstance(listed, dict) else []
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    return list(required), optional, closed


def _min_properties(writing: Writing, value: Any) -> None:
    least = writing.count("minProperties")
    required, optional, closed = _object_names(writing)
    if least <= len(required):
        return
    if least > 1:  # a name may be written twice where names are free, and counts once
        writing.decline("'minProperties' above 1 is not supported, except over required names", "minProperties")
    if closed or not optional or len(optional) > MAX_SELECTIONS:
        writing.out["minProperties"] = 1
    else:
        writing.parts.append({"anyOf": [{"required": [name]} for name in optional]})


def _max_properties(writing: Writing, value: Any) -> None:
    most = writing.count("maxProperties")
    required, optional, closed = _object_names(writing)
    if closed and len(required) + len(optional) <= most:
        return
    if optional:
        writing.decline("'maxProperties' beside optional names is not supported", "maxProperties")
    if most > MAX_ITEMS:
        writing.decline(f"'maxProperties' is at most {MAX_ITEMS:,}", "maxProperties")
    writing.out["maxProperties"] = most


def _property_names(writing: Writing, value: Any) -> None:
    """Listed names, any names, or one pattern: what generators of schemas write for mappings."""
    sets, node = writing.rewriter.sets, writing.node.child(value, "propertyNames")
    values = sets.finite_values([node])
    if values is not None:
        names = [one for one in values if isinstance(one, str)]
        writing.parts.append({"properties": dict.fromkeys(names, True), "additionalProperties": False})
        return
    views = sets.views(node)
    view = views[0] if len(views) == 1 else None
    if view is None or not view.exact or "string" not in view.types or view.min_length or view.max_length is not None:
        writing.decline("these 'propertyNames' are not supported", "propertyNames")
    if len(view.patterns) > 1:
        writing.decline("'propertyNames' with several patterns is not supported", "propertyNames")
    for pattern in view.patterns:
        portable = writing.portable(pattern, "propertyNames", "pattern")
        writing.parts.append({"patternProperties": {portable: True}, "additionalProperties": False})


HANDLERS: Mapping[str, Handler] = {
    "items": _items,
    "prefixItems": _prefix_items,
    "minItems": _min_items,
    "maxItems": _max_items,
    "contains": unsupported("contains"),
    "uniqueItems": _unique_items,
    "unevaluatedItems": _unevaluated_items,
    "properties": _properties,
    "required": _required,
    "additionalProperties": _additional_properties,
    "unevaluatedProperties": _unevaluated_properties,
    "patternProperties": _pattern_properties,
    "minProperties": _min_properties,
    "maxProperties": _max_properties,
    "propertyNames": _property_names,
}
