"""Whether some finite value may match a schema: references that never come to an end match nothing."""

from __future__ import annotations

import math
from typing import Any

from headway.structured.schema_nodes import TYPES, Schema, TooComplexError

_MAX_PASSES = 24  # over the definitions, to find those that some value matches


def can_match(root: Schema, defs: dict[str, Schema]) -> bool:
    """Whether a value may match `root`, whose references name `defs`."""
    alive: set[str] = set()
    pending = list(defs)
    for _ in range(_MAX_PASSES):
        still = []
        for name in reversed(pending):  # a chain of references goes through the names in one direction
            if _alive(defs[name], alive):
                alive.add(name)
            else:
                still.append(name)
        if _alive(root, alive):
            return True
        if len(still) == len(pending):
            return False
        pending = still
    raise TooComplexError("the schema's references depend on each other in too many steps")


def _alive(schema: Schema, alive: set[str]) -> bool:
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and schema["$ref"].rpartition("/")[2] not in alive:
        return False
    if "anyOf" in schema and not any(_alive(one, alive) for one in schema["anyOf"]):
        return False
    if not all(_alive(one, alive) for one in schema.get("allOf", ())):
        return False
    named = schema.get("type", list(TYPES))
    types = {named} if isinstance(named, str) else set(named)
    return any(_type_alive(kind, schema, alive) for kind in types)


def _type_alive(kind: str, schema: dict[str, Any], alive: set[str]) -> bool:
    if kind == "object":
        listed, extra = schema.get("properties", {}), schema.get("additionalProperties", True)
        patterns = schema.get("patternProperties")
        others = True if patterns else extra
        return all(_alive(listed.get(name, others), alive) for name in schema.get("required", ()))
    if kind == "array":
        prefix, items = schema.get("prefixItems", []), schema.get("items", True)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most is not None and least > most:
            return False
        return all(
            _alive(prefix[at] if at < len(prefix) else items, alive) for at in range(min(least, len(prefix) + 1))
        )
    if kind == "string":
        return schema.get("minLength", 0) <= schema.get("maxLength", math.inf)
    return True
