"""Tools and their calls, and a tool's schema split into parameters for formats that write each one separately."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headway.errors import InvalidRequestError
from headway.structured.json_schema import prepare_schema

logger = logging.getLogger(__name__)

MAX_NESTING = 128
"""Lists and objects inside each other, where a client may send any JSON. What walks through it may recurse."""
JSON_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_DEFINITIONS = ("$defs", "definitions")
# Ties between parameters, which cannot be said of each one alone.
_WHOLE_OBJECT_KEYWORDS = (
    *("anyOf", "oneOf", "allOf", "not", "if", "enum", "const", "minProperties", "maxProperties", "patternProperties"),
    *("propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
)
_OTHER_PARAMETERS = ("additionalProperties", "unevaluatedProperties", "$ref")
_PARAMETER_NAME = re.compile(r"[^\s<>=,()\[\]{}\"']+")
_MOST_REFERENCES = 32
_SHOWN_LEFT_OUT = 3
_SHOWN_CHARS = 300


def is_too_deep(value: Mapping[str, Any]) -> bool:
    """Whether JSON has more than `MAX_NESTING` levels; found without recursion."""
    level: list[Any] = [value]
    for _ in range(MAX_NESTING):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. `parameters` is the JSON schema of its arguments; None: any object.

    Arguments keep to the schema whether or not a tool is `strict`. If it is, a schema that a grammar or the model's
    format cannot keep to is refused; if not, they keep to what they can.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


def prepared_tool(tool: Tool, path: str) -> tuple[Tool, tuple[str, ...]]:
    """Return the tool with its schema in the form that grammars take, and the parts of it that its calls need not
    satisfy.

    `path` names the field that holds the schema. Unsupported parts of a strict tool's schema are refused.
    """
    if tool.parameters is None:
        return tool, ()
    left_out: list[str] = []
    text = prepare_schema(tool.parameters, path=path, loosened=None if tool.strict else left_out)
    return replace(tool, parameters=json.loads(text)), tuple(left_out)


@functools.lru_cache(1024)
def log_loosened(name: str, left_out: tuple[str, ...]) -> None:
    """Log which parts of a tool's schema its calls need not satisfy, once for each tool."""
    if left_out:
        more = f", and {len(left_out) - _SHOWN_LEFT_OUT} more" if len(left_out) > _SHOWN_LEFT_OUT else ""
        shown = "; ".join(one[:_SHOWN_CHARS] for one in left_out[:_SHOWN_LEFT_OUT])
        logger.warning("calls of tool %.100r are not held to its whole schema: %s%s", name, shown, more)


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool; `arguments` is JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Parameter:
    """One parameter of a tool. `schema` brings the definitions that its references need."""

    name: str
    schema: Mapping[str, Any]
    types: frozenset[str]
    required: bool


@dataclass(frozen=True)
class ParameterList:
    """The parameters of a tool in their order; `is_open` if it takes others, too."""

    parameters: tuple[Parameter, ...]
    is_open: bool

    def types_of(self, name: str) -> frozenset[str]:
        """JSON types that a parameter may have."""
        return next((one.types for one in self.parameters if one.name == name), JSON_TYPES)


def object_schema(tool: Tool) -> Mapping[str, Any]:
    """The schema of a tool's arguments, which are always an object."""
    schema = tool.parameters or {}
    declared = schema.get("type", "object")
    if declared != "object" and not (isinstance(declared, list) and "object" in declared):
        raise InvalidRequestError(
            f"the parameters of tool '{tool.name}' must be of type 'object', not {declared!r:.150}", param="tools"
        )
    _check_words(tool, schema)
    return {**schema, "type": "object"}


def _check_words(tool: Tool, schema: Mapping[str, Any]) -> None:
    if not isinstance(schema.get("properties") or {}, Mapping) or not _are_names(schema.get("required") or []):
        raise InvalidRequestError(
            f"the parameters of tool '{tool.name}' are no JSON schema: 'properties' is an object, "
            "and 'required' a list of names",
            param="tools",
        )


def closed_schema(tool: Tool) -> Mapping[str, Any]:
    """The schema of a tool's arguments without parameters that it does not list, unless it speaks of others itself.

    A call with a parameter that the function does not have would fail, and a small model would invent them endlessly.
    """
    schema = object_schema(tool)
    listed = schema.get("properties")
    is_plain = not any(word in schema for word in (*_WHOLE_OBJECT_KEYWORDS, *_OTHER_PARAMETERS))
    if listed and is_plain and all(name in listed for name in schema.get("required") or ()):
        return {**schema, "additionalProperties": False}
    return schema


def parameter_list(tool: Tool) -> ParameterList:
    """Split a tool's schema into parameters. Constraints between parameters are refused if it is strict, else
    dropped."""
    root = object_schema(tool)
    top = {**root, **_followed(root, root)}
    if tool.strict and (ties := [word for word in _WHOLE_OBJECT_KEYWORDS if word in top]):
        raise InvalidRequestError(
            f"the parameters of strict tool '{tool.name}' use '{ties[0]}' at their top level: this model's tool calls "
            "write each parameter on its own, and cannot keep to it",
            param="tools",
        )
    _check_words(tool, top)
    properties = top.get("properties") or {}
    required = top.get("required") or []
    # A schema may be true: anything. Required parameters need not be declared.
    schemas = {name: schema if isinstance(schema, Mapping) else {} for name, schema in properties.items()}
    schemas |= {name: {} for name in required if name not in schemas}
    if odd := [name for name in schemas if not _PARAMETER_NAME.fullmatch(name)]:
        raise InvalidRequestError(
            f"this model's tool calls cannot write the parameter {odd[0]!r:.150} of tool '{tool.name}'", param="tools"
        )
    found = [
        Parameter(name, _with_definitions(schema, root), types_of(schema, root), required=name in required)
        for name, schema in schemas.items()
    ]
    return ParameterList(tuple(found), is_open=not found and top.get("additionalProperties") is not False)


def types_of(schema: object, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """JSON types that a schema may allow; all of them where it does not say."""
    if not isinstance(schema, Mapping) or depth > _MOST_REFERENCES:
        return JSON_TYPES
    found = _declared(schema)
    if "$ref" in schema and (target := _target(schema["$ref"], root)) is not None:
        found &= types_of(target, root, depth + 1)
    for word in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(word), list) and options:
            found &= frozenset().union(*(types_of(one, root, depth + 1) for one in options))
    for one in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        found &= types_of(one, root, depth + 1)
    return found


def type_of_value(value: object) -> frozenset[str]:
    """JSON types that a value counts as."""
    match value:
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number"})
        case str():
            return frozenset({"string"})
        case None:
            return frozenset({"null"})
        case list():
            return frozenset({"array"})
        case _:
            return frozenset({"object"})


def without_references(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Any:
    """The schema with its `$ref`s replaced by what they refer to; None if they go in circles, or have siblings."""
    if depth > _MOST_REFERENCES:
        return None
    if isinstance(schema, list):
        items = [without_references(one, root, depth + 1) for one in schema]
        return None if None in items else items
    if not isinstance(schema, Mapping):
        return schema
    if "$ref" in schema:
        target = _target(schema["$ref"], root)
        siblings = schema.keys() - {"$ref", "title", "description", "default", *_DEFINITIONS}
        return None if target is None or siblings else without_references(target, root, depth + 1)
    inlined = {}
    for word, value in schema.items():
        if word in ("enum", "const", "default", "examples"):
            inlined[word] = value
        elif word not in _DEFINITIONS:
            inlined[word] = without_references(value, root, depth + 1)
            if inlined[word] is None and value is not None:
                return None
    return inlined


def listed_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """All values that a schema allows, where it lists them one by one."""
    if isinstance(values := schema.get("enum"), list):
        return values
    if "const" in schema:
        return [schema["const"]]
    if schema.get("type") == "null":
        return [None]
    options = schema.get("anyOf")
    if not isinstance(options, list):
        return None
    found = [listed_values(one) if isinstance(one, Mapping) else None for one in options]
    return None if None in found else [value for values in found for value in values or ()]


def _are_names(names: object) -> bool:
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _declared(schema: Mapping[str, Any]) -> frozenset[str]:
    declared = schema.get("type")
    listed = declared if isinstance(declared, list) else [declared]
    found = frozenset(one for one in listed if isinstance(one, str)) or JSON_TYPES
    if "number" in found:
        found |= {"integer"}
    values = (
        schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else None
    )
    return found if values is None else found & frozenset().union(*map(type_of_value, values))


def _followed(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    for _ in range(_MOST_REFERENCES):
        target = _target(schema.get("$ref"), root)
        if target is None:
            break
        schema = target
    return schema


def _target(reference: object, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = root
    for step in reference[2:].split("/"):
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None


def _with_definitions(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**schema, **{word: root[word] for word in _DEFINITIONS if word in root}}
