"""Turn a JSON schema into one that llguidance compiles and that allows nothing the given one forbids.

`prepare_schema` bounds the input, follows its references, and rewrites what llguidance has no words for. The result
allows the same values (exact) or fewer (tightened); what would need more than that is refused, with its JSON path, or
left out on demand.

    keyword                                how
    -------------------------------------  ---------------------------------------------------------------------------
    type, const, enum, anyOf, allOf        exact
    properties, required,                  exact, but for the order of the names: as listed
    additionalProperties, patternProperties
    items, prefixItems, additionalItems    exact
    minimum … multipleOf                   exact, in decimal arithmetic; bounds beyond 2^53 move inwards to a double
    minLength, maxLength, maxItems         exact up to 65,536 characters and 2,000 items; larger maxima are lowered
    pattern                                exact for ASCII; \\w, \\d are ASCII, \\W, \\D leave out all letters, digits
    $ref                                   exact within the document, by pointer, anchor or $id; up to draft 7 its
                                           siblings do not count
    format                                 an annotation: asserted where llguidance knows it and nothing else is said
    oneOf                                  anyOf once no value can fit two branches. A branch is tightened if needed:
                                           names that only another branch requires are left out, a property that
                                           tells the branches apart is required, shared types and values are left out
    not, if/then/else                      by the complement of type, const, enum, required, properties, bounds and
                                           lengths; a part without one (pattern, items) is passed over
    dependencies, dependentRequired,       either without the trigger or with what it asks for (at most 6 triggers)
    dependentSchemas
    contains, minContains                  tightened: the first items match
    uniqueItems                            listed values in the order of the list, up to a few hundred selections
    minProperties, maxProperties           counted over the listed names; 0 and 1 exact
    propertyNames                          listed names, one pattern, or lengths
    unevaluatedProperties                  over the names and patterns that are always evaluated
    unevaluatedItems                       behind prefixItems, or a list of items
    refused, or left out where a schema    $dynamicRef, maxContains, unevaluatedItems beside other keywords, lookaround
    may be loosened                        and back references, patternProperties that overlap, uniqueItems over values
                                           that are not listed, oneOf whose branches cannot be told apart
    refused                                $ref to other documents, draft 3, what is no schema
    all other keywords                     annotations: dropped

Strings are written without \\u escapes: llguidance compares the names of properties as they are spelled, so an escape
would let a listed name pass as another one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any, NoReturn

from headway.errors import InvalidRequestError
from headway.structured.json_pattern import PatternError, portable_pattern
from headway.structured.pattern_matching import compiler_fault, work_of
from headway.structured.schema_references import References, refuse
from headway.structured.schema_sets import (
    TYPES,
    InexpressibleError,
    Node,
    Schema,
    SchemaViews,
    TooComplexError,
    View,
    is_integral,
    type_of,
    value_key,
)

MAX_SCHEMA_BYTES = 256 * 1024
MAX_DEPTH = 64
MAX_VALUES = 30_000  # JSON values in a schema
MAX_ALTERNATIVES = 2_000  # in one anyOf, oneOf or enum
MAX_EMITTED = 8_000  # schemas after rewriting
MAX_PROPERTIES = 1_000  # of one object
MAX_PATTERN_PROPERTIES = 50
MAX_PATTERNS = 1_500  # of one schema, with those of names
MAX_LISTED_CHARS = 8_192  # of one string in an enum
MAX_LENGTH = 65_536
MAX_ITEMS = 2_000
MAX_MIN_ITEMS = 500
MAX_SELECTIONS = 128  # of uniqueItems, minProperties, maxProperties
MAX_DEPENDENCIES = 6  # each doubles the alternatives

_OPTIONS = {"json_allowed_escapes": 'nrbtf\\"'}
_ESCAPED = frozenset("\n\r\b\t\f")
_FORMATS = frozenset(["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"])
_DRAFTS = {
    "http://json-schema.org/draft-03/schema": 3,
    "http://json-schema.org/draft-04/schema": 4,
    "http://json-schema.org/draft-06/schema": 6,
    "http://json-schema.org/draft-07/schema": 7,
    "https://json-schema.org/draft/2019-09/schema": 2019,
}
# Keywords by the draft that brought them. They are kept in a schema of an earlier draft, which allows less, but nothing
# is concluded from them.
_ADDED = {
    6: "const contains propertyNames exclusiveMinimum exclusiveMaximum",
    7: "if then else",
    2019: "dependentRequired dependentSchemas unevaluatedProperties unevaluatedItems minContains maxContains",
    2020: "prefixItems",
}
_EXACT_INTEGERS = 2**53
_MAX_PASSES = 24  # over the definitions, to find those that some value matches


def prepare_schema(schema: dict[str, Any] | bool | str, *, path: str, loosened: list[str] | None = None) -> str:
    """Return the schema as JSON text for llguidance; `path` names the field that holds it, for messages.

    Keywords that are not supported are refused. With `loosened` they are left out, and what was left out is added to
    it: the result then allows more than the schema does.
    """
    document = _read(schema, path) if isinstance(schema, str) else schema
    if isinstance(document, bool):
        if not document:
            refuse("the schema 'false' allows no value", path)
        return json.dumps({"x-guidance": _OPTIONS})
    if not isinstance(document, dict):
        refuse("a schema is an object or a boolean", path)
    _check_size(document, path)
    document = json.loads(json.dumps(document))  # a tree: each schema stands at one place only
    try:
        emitted = _Rewriter(document, path, loosened).document()
    except TooComplexError as error:
        refuse(str(error), path)
    except RecursionError:
        refuse("the schema is nested too deeply", path)
    return json.dumps({"x-guidance": _OPTIONS} | emitted)


# ------------------------------------------------------------------------------------------------------ the input
def _read(text: str, path: str) -> Any:
    if len(text) > MAX_SCHEMA_BYTES:
        refuse(f"the schema has {len(text):,} bytes, at most {MAX_SCHEMA_BYTES:,} are taken", path)

    def constant(name: str) -> NoReturn:
        refuse(f"{name} is no JSON number", path)

    try:
        return json.loads(text, parse_constant=constant)
    except InvalidRequestError:
        raise
    except (ValueError, RecursionError) as error:
        refuse(f"the schema is no JSON: {str(error)[:200]}", path)


def _check_size(document: dict[str, Any], path: str) -> None:
    """Bound depth, number of values and bytes, without recursion: nothing has been checked yet."""
    values, size = 0, 0
    level: list[tuple[Any, str]] = [(document, path)]
    for _ in range(MAX_DEPTH + 1):
        deeper: list[tuple[Any, str]] = []
        for value, place in level:
            values += 1
            if isinstance(value, dict):
                for key, inner in value.items():
                    if not isinstance(key, str):
                        refuse(f"the key {key!r:.50} is no string", place)
                    size += len(key) + 4
                    _check_text(key, place)
                    deeper.append((inner, f"{place}.{key:.100}"))
            elif isinstance(value, list):
                deeper += [(inner, f"{place}.{at}") for at, inner in enumerate(value)]
            else:
                size += _check_scalar(value, place)
            if values + len(deeper) > MAX_VALUES:
                refuse(f"the schema has more than {MAX_VALUES:,} values", path)
        if size > MAX_SCHEMA_BYTES:
            refuse(f"the schema has more than {MAX_SCHEMA_BYTES:,} bytes", path)
        if not deeper:
            return
        level = deeper
    refuse(f"the schema is nested more than {MAX_DEPTH} deep", level[0][1][:500])


def _check_scalar(value: Any, place: str) -> int:
    if isinstance(value, str):
        _check_text(value, place)
        return len(value) + 2
    if isinstance(value, float) and not math.isfinite(value):
        refuse("a number must be finite", place)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**300:
        refuse("the number is too large", place)
    if value is not None and not isinstance(value, bool | int | float):
        refuse(f"{type(value).__name__} is no JSON value", place)
    return 8


def _check_text(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        refuse("a string holds half of a surrogate pair", place)


# -------------------------------------------------------------------------------------------------- the rewriting
class UnsupportedError(InvalidRequestError):
    """A keyword means something that cannot be expressed; without it, the schema allows more."""


class _Rewriter:
    """Rewrite one document: each schema that is referred to becomes a definition of the result."""

    def __init__(self, document: dict[str, Any], path: str, loosened: list[str] | None) -> None:
        self.loosened = loosened
        self.patterns_work = 0
        named = document.get("$schema")
        self.draft = _DRAFTS.get(named.rstrip("#") if isinstance(named, str) else "", 2020)
        if self.draft == 3:
            refuse("draft 3 is not supported", f"{path}.$schema")
        self.references = References(document, path, self.draft)
        self._ref_overrides = self.references.ref_overrides
        self._root = self.references.root
        self.sets = SchemaViews(
            self.references.target,
            self.references.enter,
            ref_overrides=self._ref_overrides,
            unknown=self._unknown(),
        )
        self._names: dict[int, str] = {}
        self._pending: list[tuple[str, Node]] = []
        self._inlining: list[int] = []
        self.around: list[Node] = []  # schemas that apply to the same value as the one being written
        self._emitted = 0

    def _unknown(self) -> frozenset[str]:
        later = [keywords for draft, keywords in _ADDED.items() if self.draft < draft]
        return frozenset(key for keywords in later for key in keywords.split())

    def document(self) -> dict[str, Any]:
        root = self.rewrite(self._root)
        defs: dict[str, Schema] = {}
        while self._pending:
            name, node = self._pending.pop()
            defs[name] = self.rewrite(node)
        if root is False or not _can_match(root, defs):
            refuse("no JSON value can match this schema", self._root.path)
        whole = {} if root is True else root
        return whole | {"$defs": defs} if defs else whole

    # ---------------------------------------------------------------------------------------------- references
    def _reference(self, node: Node) -> Schema:
        return self._definition(self.references.target(node))

    def value(self, node: Node) -> Schema:
        """Rewrite the schema of an inner value.

        Below a schema that is written more than once, one with branches becomes a definition and is written once.
        """
        schema = node.schema
        around, self.around = self.around, []
        try:
            if self._inlining and isinstance(schema, dict) and schema.keys() & _BRANCHING and "$ref" not in schema:
                return self._definition(self.references.enter(node))
            return self.rewrite(node)
        finally:
            self.around = around

    def _definition(self, target: Node) -> Schema:
        if isinstance(target.schema, bool):
            return target.schema
        name = self._names.get(id(target.schema))
        if name is None:
            name = self._names[id(target.schema)] = f"d{len(self._names)}"
            self._pending.append((name, target))
        return {"$ref": f"#/$defs/{name}"}

    def beside(self, node: Node, around: Node) -> Schema:
        """Rewrite a schema that applies to the same value as another one."""
        self.around.append(around)
        try:
            return self.inline(node)
        finally:
            self.around.pop()

    def inline(self, node: Node) -> Schema:
        """Rewrite a schema that is merged with others: llguidance cannot merge a reference into its own target."""
        schema = node.schema
        if isinstance(schema, dict) and "$ref" in schema and (self._ref_overrides or not _constrains(schema, "$ref")):
            target = self.references.target(node)
            if id(target.schema) not in self._inlining:
                self._inlining.append(id(target.schema))
                try:
                    return self.inline(target)
                finally:
                    self._inlining.pop()
        return self.rewrite(node)

    # ------------------------------------------------------------------------------------------------ one schema
    def rewrite(self, node: Node) -> Schema:
        self._emitted += 1
        if self._emitted > MAX_EMITTED:
            refuse(f"the schema expands to more than {MAX_EMITTED:,} schemas", self._root.path)
        schema = node.schema
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            refuse("a schema is an object or a boolean", node.path)
        node = self.references.enter(node)
        if "$ref" in schema and (self._ref_overrides or not _constrains(schema, "$ref")):
            return self._reference(node)
        writing = _Writing(self, node, schema)
        left_out: set[str] = set()
        for key in sorted(schema, key=lambda key: key.startswith("unevaluated")):
            handler = _HANDLERS.get(key)
            if handler is None:
                continue
            try:
                handler(writing, schema[key])
            except (UnsupportedError, TooComplexError) as error:
                if self.loosened is None:
                    raise
                self.loosened.append(
                    str(error) if isinstance(error, UnsupportedError) else f"{node.path}.{key}: {error}"
                )
                left_out.update(_WITHOUT.get(key, ()))
        for key in left_out:
            writing.out.pop(key, None)
        return writing.result()


class _Writing:
    """The rewriting of one schema: keywords that stay in `out`, and schemas that apply besides in `parts`."""

    def __init__(self, rewriter: _Rewriter, node: Node, schema: dict[str, Any]) -> None:
        self.rewriter = rewriter
        self.node = node
        self.schema = schema
        self.out: dict[str, Any] = {}
        self.parts: list[Schema] = []

    def result(self) -> Schema:
        named = self.out.get("type")
        types = None if named is None else {named} if isinstance(named, str) else set(named)
        narrowed = [part if types is None else _narrow(part, types) for part in self.parts]
        if False in narrowed:
            return False
        parts = [part for part in narrowed if part is not True]
        return self.out | {"allOf": [*self.out.get("allOf", []), *parts]} if parts else self.out

    def refuse(self, message: str, *keys: str | int) -> NoReturn:
        refuse(message, self.node.place(*keys))

    def decline(self, message: str, *keys: str | int) -> NoReturn:
        """Say that a keyword is not supported: it is refused, or left out where the schema may be loosened."""
        path = self.node.place(*keys)
        raise UnsupportedError(f"{path}: {message}", param=path)

    def child(self, value: Any, *keys: str | int) -> Schema:
        return self.rewriter.value(self.node.child(value, *keys))

    def _list(self, key: str, *, limit: int = MAX_ALTERNATIVES) -> list[Any]:
        value = self.schema[key]
        if not isinstance(value, list) or not value:
            self.refuse(f"'{key}' is a list that is not empty", key)
        if len(value) > limit:
            self.decline(f"'{key}' has {len(value):,} entries, at most {limit:,} are taken", key)
        return value

    def _map(self, key: str) -> dict[str, Any]:
        value = self.schema[key]
        if not isinstance(value, dict):
            self.refuse(f"'{key}' is an object", key)
        return value

    def _count(self, key: str, default: int | None = None) -> int | None:
        if key not in self.schema:
            return default
        value = self.schema[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not is_integral(value) or value < 0:
            self.refuse(f"'{key}' is a whole number of 0 or more", key)
        return int(value)

    # ------------------------------------------------------------------------------------------ types and values
    def type(self, value: Any) -> None:
        named = [value] if isinstance(value, str) else value
        if not isinstance(named, list) or not named or not all(isinstance(one, str) for one in named):
            self.refuse("'type' is a name or a list of names", "type")
        for one in named:
            if one not in TYPES and one != "integer":
                self.refuse(f"the type '{one:.50}' is unknown", "type")
        self.out["type"] = value if isinstance(value, str) else list(dict.fromkeys(named))

    def const(self, value: Any) -> None:
        self._check_value(value, "const")
        self.out["const"] = value

    def enum(self, value: Any) -> None:
        values = self._list("enum")
        for at, one in enumerate(values):
            self._check_value(one, "enum", at)
        self.out["enum"] = list({value_key(one): one for one in values}.values())

    def _check_value(self, value: Any, *keys: str | int) -> None:
        """Refuse values that llguidance would change: it reads numbers as doubles and writes no \\u escapes."""
        if isinstance(value, str):
            if len(value) > MAX_LISTED_CHARS:
                self.decline(f"a listed string has {len(value):,} characters, at most {MAX_LISTED_CHARS:,}", *keys)
            if any((char < " " and char not in _ESCAPED) or char == "\x7f" for char in value):
                self.decline("a control character in a listed value is not supported", *keys)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            if abs(value) > _EXACT_INTEGERS:
                self.decline("a listed number beyond 2^53 is not supported", *keys)
        elif isinstance(value, list | dict):
            for key, one in value.items() if isinstance(value, dict) else enumerate(value):
                self._check_value(one, *keys, key)

    # ----------------------------------------------------------------------------------------- numbers and strings
    def bound(self, key: str, value: Any) -> None:
        lower = key in {"minimum", "exclusiveMinimum"}
        plain, exclusive = ("minimum", "exclusiveMinimum") if lower else ("maximum", "exclusiveMaximum")
        if key == exclusive and isinstance(value, bool):  # draft 4
            if value and plain in self.schema:
                self.out[exclusive] = self.out.pop(plain, None) or self._number(plain, lower=lower)
            return
        if key == plain and self.schema.get(exclusive) is True:
            self.out[exclusive] = self._number(plain, lower=lower)
            return
        self.out[key] = self._number(key, lower=lower)
        if key == exclusive and self.rewriter.draft == 4 and plain in self.schema:  # read as `true` there
            self.out[key] = (max if lower else min)(self.out[key], self._number(plain, lower=lower))

    def _number(self, key: str, *, lower: bool) -> int | float:
        value = self.schema[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(f"'{key}' is a number", key)
        if isinstance(value, int) and abs(value) > _EXACT_INTEGERS:
            near = float(value)
            if (lower and near < value) or (not lower and near > value):
                near = math.nextafter(near, math.inf if lower else -math.inf)
            value = int(near)
        if (lower and value > 2**62) or (not lower and value < -(2**62)):
            self.decline(f"'{key}' is beyond the integers that can be written", key)
        return value

    def multiple_of(self, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            self.refuse("'multipleOf' is a number above 0", "multipleOf")
        if not 1e-9 <= value <= 1e9:
            self.decline("'multipleOf' is taken between 1e-9 and 1e9", "multipleOf")
        self.out["multipleOf"] = value

    def min_length(self, value: Any) -> None:
        least = self._count("minLength") or 0
        if least > MAX_LENGTH:
            self.decline(f"'minLength' is at most {MAX_LENGTH:,}", "minLength")
        self.out["minLength"] = least

    def max_length(self, value: Any) -> None:
        self.out["maxLength"] = min(self._count("maxLength") or 0, MAX_LENGTH)

    def pattern(self, value: Any) -> None:
        if not isinstance(value, str):
            self.refuse("'pattern' is a string", "pattern")
        self.out["pattern"] = self._portable(value, "pattern")

    def _portable(self, pattern: str, *keys: str) -> str:
        try:
            portable = portable_pattern(pattern)
        except PatternError as error:
            self.decline(str(error), *keys)
        self.rewriter.patterns_work += work_of(portable)
        if self.rewriter.patterns_work > MAX_PATTERNS:
            raise TooComplexError(
                f"the schema's patterns are too many, or use too many classes; {MAX_PATTERNS:,} are taken"
            )
        if (fault := compiler_fault({"type": "string", "pattern": portable})) is not None:
            self.decline(fault, *keys)
        return portable

    def format(self, value: Any) -> None:
        said = self.schema.keys() & {"const", "enum", "pattern", "minLength", "maxLength"}
        if isinstance(value, str) and value in _FORMATS and not said:
            self.out["format"] = value

    # ------------------------------------------------------------------------------------------------------- arrays
    def items(self, value: Any) -> None:
        if isinstance(value, list):
            self.out["prefixItems"] = [self.child(one, "items", at) for at, one in enumerate(value)]
            if "additionalItems" in self.schema:
                self.out["items"] = self.child(self.schema["additionalItems"], "additionalItems")
        else:
            self.out["items"] = self.child(value, "items")

    def prefix_items(self, value: Any) -> None:
        if self.rewriter.draft < 2020:  # there, `items` speaks of all items
            return
        listed = self._list("prefixItems", limit=MAX_MIN_ITEMS)
        self.out["prefixItems"] = [self.child(one, "prefixItems", at) for at, one in enumerate(listed)]

    def min_items(self, value: Any) -> None:
        least = self._count("minItems") or 0
        if least > MAX_MIN_ITEMS:
            self.decline(f"'minItems' is at most {MAX_MIN_ITEMS:,}", "minItems")
        self.out["minItems"] = least

    def max_items(self, value: Any) -> None:
        self.out["maxItems"] = min(self._count("maxItems") or 0, MAX_ITEMS)

    def contains(self, value: Any) -> None:
        if "maxContains" in self.schema:
            self.decline("'maxContains' is not supported", "maxContains")
        least = self._count("minContains", 1) or 0
        if least > MAX_MIN_ITEMS // 10:
            self.decline(f"'minContains' is at most {MAX_MIN_ITEMS // 10}", "minContains")
        if least:
            matching = self.rewriter.inline(self.node.child(value, "contains"))
            self.parts.append({"prefixItems": [matching] * least, "minItems": least})

    def unique_items(self, value: Any) -> None:
        if not isinstance(value, bool):
            self.refuse("'uniqueItems' is a boolean", "uniqueItems")
        if not value or (self._count("maxItems", 2) or 0) <= 1:
            return
        views = self.rewriter.sets.views(self.node)
        if not any("array" in view.types and (view.max_items is None or view.max_items > 1) for view in views):
            return
        values = None
        if isinstance(self.schema.get("items"), dict):
            values = self.rewriter.sets.finite_values([self.node.child(self.schema["items"], "items")])
        if values is None:
            self.decline("'uniqueItems' is supported over listed values only", "uniqueItems")
        least = self._count("minItems", 0) or 0
        most = min(self._count("maxItems", len(values)) or 0, len(values))
        selections: list[Schema] = []
        for size in range(least, most + 1):
            if len(selections) + math.comb(len(values), size) > MAX_SELECTIONS:
                most = size - 1
                break
            for chosen in combinations(values, size):
                selections.append(
                    {
                        "type": "array",
                        "prefixItems": [{"const": one} for one in chosen],
                        "items": False,
                        "minItems": size,
                        "maxItems": size,
                    }
                )
        if most < min(least + 2, len(values)):
            self.decline(f"'uniqueItems' over {len(values)} listed values has too many selections", "uniqueItems")
        self.parts.append({"anyOf": [*selections, {"type": [kind for kind in TYPES if kind != "array"]}]})

    # ------------------------------------------------------------------------------------------------------ objects
    def properties(self, value: Any) -> None:
        if len(self._map("properties")) > MAX_PROPERTIES:
            self.decline(f"'properties' has more than {MAX_PROPERTIES:,} names", "properties")
        self.out["properties"] = {
            name: self.child(one, "properties", name) for name, one in self._map("properties").items()
        }

    def required(self, value: Any) -> None:
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            self.refuse("'required' is a list of names", "required")
        self.out["required"] = list(dict.fromkeys(value))

    def additional_properties(self, value: Any) -> None:
        self.out["additionalProperties"] = self.child(value, "additionalProperties")

    def pattern_properties(self, value: Any) -> None:
        if len(self._map("patternProperties")) > MAX_PATTERN_PROPERTIES:
            self.decline(f"'patternProperties' has more than {MAX_PATTERN_PROPERTIES} patterns", "patternProperties")
        merged: dict[str, tuple[list[str], Schema]] = {}
        for pattern, one in self._map("patternProperties").items():
            inner = self.child(one, "patternProperties", pattern)
            portable = self._portable(pattern, "patternProperties", pattern)
            merged.setdefault(json.dumps(inner), ([], inner))[0].append(portable)
        # Patterns that overlap are not supported; those that say the same may overlap as one.
        self.out["patternProperties"] = {
            "|".join(patterns) if len(patterns) == 1 else "|".join(f"(?:{one})" for one in patterns): inner
            for patterns, inner in merged.values()
        }
        names = dict.fromkeys(self.out["patternProperties"], True)
        if len(names) > 1 and (fault := compiler_fault({"type": "object", "patternProperties": names})) is not None:
            self.decline(fault, "patternProperties")

    def _object_names(self) -> tuple[list[str], list[str], bool]:
        """Names that are required, names that are optional, and whether there can be no others."""
        listed = self.schema.get("properties")
        named = self.schema.get("required")
        required = dict.fromkeys(one for one in named if isinstance(one, str)) if isinstance(named, list) else {}
        optional = [name for name in listed if name not in required] if isinstance(listed, dict) else []
        closed = self.schema.get("additionalProperties") is False and not self.schema.get("patternProperties")
        return list(required), optional, closed

    def min_properties(self, value: Any) -> None:
        least = self._count("minProperties") or 0
        required, optional, closed = self._object_names()
        missing = least - len(required)
        if missing <= 0:
            return
        if least == 1:
            if closed or not optional or len(optional) > MAX_SELECTIONS:
                self.out["minProperties"] = 1
            else:
                self._either([{"required": [name]} for name in optional], "minProperties")
            return
        # A name may be written twice where names are free, and counts once: only listed names are counted.
        selections = math.comb(len(optional), missing)
        if selections * len(optional) > MAX_ALTERNATIVES or selections > MAX_SELECTIONS or missing > len(optional):
            self.decline("'minProperties' is supported over few listed names only", "minProperties")
        self._either([{"required": list(names)} for names in combinations(optional, missing)], "minProperties")

    def max_properties(self, value: Any) -> None:
        most = self._count("maxProperties") or 0
        required, optional, closed = self._object_names()
        if closed and len(required) + len(optional) <= most:
            return
        if not optional:
            if most > MAX_ITEMS:
                self.decline(f"'maxProperties' is at most {MAX_ITEMS:,}", "maxProperties")
            self.out["maxProperties"] = most
            return
        room = most - len(required)
        if room < 0:
            self.refuse("'maxProperties' is less than the number of required names", "maxProperties")
        selections = math.comb(len(optional), min(room, len(optional)))
        if selections * len(optional) > MAX_ALTERNATIVES or selections > MAX_SELECTIONS:
            self.decline("'maxProperties' is supported over few listed names only", "maxProperties")
        options: list[Schema] = []
        for names in combinations(optional, min(room, len(optional))):
            options.append({"properties": dict.fromkeys([*required, *names], True), "additionalProperties": False})
        self._either(options, "maxProperties")

    def _either(self, options: list[Schema], key: str) -> None:
        if not options:
            self.refuse(f"no object can satisfy '{key}'", key)
        self.parts.append({"anyOf": options})

    def property_names(self, value: Any) -> None:
        views = self.rewriter.sets.views(self.node.child(value, "propertyNames"))
        values = self.rewriter.sets.finite_values([self.node.child(value, "propertyNames")])
        if values is not None:
            names = [one for one in values if isinstance(one, str)]
            self.parts.append({"properties": dict.fromkeys(names, True), "additionalProperties": False})
            return
        [view] = views if len(views) == 1 else [None]
        if view is None or not view.exact or view.excluded or "string" not in view.types:
            self.decline("these 'propertyNames' are not supported", "propertyNames")
        patterns = [self._portable(one, "propertyNames", "pattern") for one in view.patterns]
        if view.min_length or view.max_length is not None:
            most = "" if view.max_length is None else min(view.max_length, MAX_LENGTH)
            patterns.append(f"^[\\s\\S]{{{view.min_length},{most}}}$")
        if len(patterns) > 1:
            self.decline("'propertyNames' with a pattern and lengths is not supported", "propertyNames")
        if patterns:
            self.parts.append({"patternProperties": {patterns[0]: True}, "additionalProperties": False})

    def dependencies(self, key: str, value: Any) -> None:
        asked = self._map(key)
        if len(asked) > MAX_DEPENDENCIES:
            self.decline(f"'{key}' has {len(asked)} triggers, at most {MAX_DEPENDENCIES} are taken", key)
        for name, needs in asked.items():
            if isinstance(needs, str):  # draft 3 and its readers
                needs = [needs]
            if isinstance(needs, list):
                if not all(isinstance(one, str) for one in needs):
                    self.refuse(f"'{key}' lists names", key, name)
                then: list[Schema] = [{"required": [name, *needs]}]
            else:
                then = [{"required": [name]}, self.rewriter.inline(self.node.child(needs, key, name))]
            self.parts.append({"anyOf": [{"properties": {name: False}}, {"allOf": then}]})

    def unevaluated_properties(self, value: Any) -> None:
        """Handled behind all other keywords: what they say of names is in `out`."""
        applied = list(self._applied(self.node, set()))
        if value is True or any("additionalProperties" in schema for schema in applied):
            return
        views = self.rewriter.sets.views(self._without("unevaluatedProperties"))
        names = (
            [name for name in views[0].properties if all(name in view.properties for view in views)] if views else []
        )
        own = self.out.get("properties", {})
        self.out["properties"] = own | {name: True for name in names if name not in own}
        patterns = self._maps(applied[1:], "patternProperties")
        if patterns:
            self.out["patternProperties"] = {
                self._portable(one, "patternProperties", one): True for one in patterns
            } | self.out.get("patternProperties", {})
        self.out["additionalProperties"] = self.child(value, "unevaluatedProperties")

    def _applied(self, node: Node, seen: set[int]) -> Iterator[dict[str, Any]]:
        """Schemas that every value must satisfy, beginning with the one at `node`; each one once."""
        schema = node.schema
        if not isinstance(schema, dict) or id(schema) in seen:
            return
        seen.add(id(schema))
        yield schema
        for at, one in enumerate(schema["allOf"] if isinstance(schema.get("allOf"), list) else ()):
            yield from self._applied(self.rewriter.references.enter(node.child(one, "allOf", at)), seen)
        if "$ref" in schema:
            yield from self._applied(self.rewriter.references.target(node), seen)

    def _maps(self, schemas: list[dict[str, Any]], key: str) -> dict[str, Any]:
        maps = [schema[key] for schema in schemas if isinstance(schema.get(key), dict)]
        return {name: one for found in maps for name, one in found.items()}

    def unevaluated_items(self, value: Any) -> None:
        items = self.schema.get("items")
        # A list of schemas speaks of the first items only, up to draft 2019-09.
        is_whole = "additionalItems" in self.schema if isinstance(items, list) else "items" in self.schema
        if value is True or is_whole:
            return
        beside = ("prefixItems", "minItems", "maxItems", *(("items",) if isinstance(items, list) else ()))
        if _constrains(self.schema, "unevaluatedItems", *_SCALAR_KEYWORDS, *beside):
            self.decline("'unevaluatedItems' beside other keywords is not supported", "unevaluatedItems")
        self.out["items"] = self.child(value, "unevaluatedItems")

    # -------------------------------------------------------------------------------------------------- combinators
    def _without(self, *keys: str) -> Node:
        return self.node.child({key: one for key, one in self.schema.items() if key not in keys})

    def all_of(self, value: Any) -> None:
        members = [self.node.child(one, "allOf", at) for at, one in enumerate(self._list("allOf"))]
        alone = len(members) == 1 and not _constrains(self.schema, "allOf")
        rest = self._without("allOf")
        self.parts += [self.rewriter.rewrite(one) if alone else self.rewriter.beside(one, rest) for one in members]

    def any_of(self, value: Any) -> None:
        members = [self.node.child(one, "anyOf", at) for at, one in enumerate(self._list("anyOf"))]
        self.parts.append({"anyOf": [self._member(one, "anyOf") for one in members]})

    def _member(self, node: Node, key: str) -> Schema:
        merged = _constrains(self.schema, key)
        return self.rewriter.beside(node, self._without(key)) if merged else self.rewriter.rewrite(node)

    def one_of(self, value: Any) -> None:
        members = [self.node.child(one, "oneOf", at) for at, one in enumerate(self._list("oneOf"))]
        if len(members) == 1:
            self.parts.append(self._member(members[0], "oneOf"))
            return
        rest = self._without("oneOf")
        tightened = self._told_apart(rest, members)
        options: list[Schema] = []
        for member, more in zip(members, tightened):
            if False in more:
                continue
            if not more:
                options.append(self._member(member, "oneOf"))
                continue
            extra = [self.rewriter.rewrite(member.child(one)) for one in more]
            options.append({"allOf": [self.rewriter.inline(member), *extra]})
        self.parts.append({"anyOf": options} if options else False)

    def _told_apart(self, rest: Node, members: list[Node]) -> list[list[Schema]]:
        """What each branch must satisfy besides; where the schema may be loosened, `oneOf` may be read as `anyOf`."""
        try:
            tightened = _tell_apart(self.rewriter.sets, rest, members)
            if tightened is not None:
                return tightened
            self.decline("the branches of 'oneOf' cannot be told apart; use 'anyOf', or require what differs", "oneOf")
        except (UnsupportedError, TooComplexError) as error:
            if self.rewriter.loosened is None:
                raise
            self.rewriter.loosened.append(f"{self.node.path}.oneOf is read as anyOf: {error}")
            return [[] for _ in members]

    def negation(self, value: Any) -> None:
        self.parts.append(self._complement(value, "not"))

    def _complement(self, value: Any, key: str) -> Schema:
        try:
            around = [*self.rewriter.around, self._without(key)]
            return self.rewriter.sets.complement(self.node.child(value, key), around)
        except InexpressibleError:
            self.decline(f"the opposite of this schema cannot be expressed, which '{key}' asks for", key)

    def condition(self, value: Any) -> None:
        if not self.schema.keys() & {"then", "else"}:
            return
        rest = self._without("if", "then", "else")
        then = self.rewriter.beside(self.node.child(self.schema.get("then", True), "then"), rest)
        otherwise = self.rewriter.beside(self.node.child(self.schema.get("else", True), "else"), rest)
        holds = self.rewriter.beside(self.node.child(value, "if"), rest)
        self.parts.append({"anyOf": [{"allOf": [holds, then]}, {"allOf": [self._complement(value, "if"), otherwise]}]})

    def reference(self, value: Any) -> None:
        self.parts.append(self.rewriter.inline(self.node.child({"$ref": value})))

    def unsupported(self, key: str, value: Any) -> None:
        self.decline(f"'{key}' is not supported", key)


def _named(handler: Callable[[_Writing, str, Any], None], key: str) -> Callable[[_Writing, Any], None]:
    return lambda writing, value: handler(writing, key, value)


_HANDLERS: dict[str, Callable[[_Writing, Any], None]] = {
    "type": _Writing.type,
    "const": _Writing.const,
    "enum": _Writing.enum,
    **{key: _named(_Writing.bound, key) for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")},
    "multipleOf": _Writing.multiple_of,
    "minLength": _Writing.min_length,
    "maxLength": _Writing.max_length,
    "pattern": _Writing.pattern,
    "format": _Writing.format,
    "items": _Writing.items,
    "prefixItems": _Writing.prefix_items,
    "minItems": _Writing.min_items,
    "maxItems": _Writing.max_items,
    "contains": _Writing.contains,
    "uniqueItems": _Writing.unique_items,
    "properties": _Writing.properties,
    "required": _Writing.required,
    "additionalProperties": _Writing.additional_properties,
    "patternProperties": _Writing.pattern_properties,
    "minProperties": _Writing.min_properties,
    "maxProperties": _Writing.max_properties,
    "propertyNames": _Writing.property_names,
    **{key: _named(_Writing.dependencies, key) for key in ("dependencies", "dependentRequired", "dependentSchemas")},
    "unevaluatedProperties": _Writing.unevaluated_properties,
    "unevaluatedItems": _Writing.unevaluated_items,
    "allOf": _Writing.all_of,
    "anyOf": _Writing.any_of,
    "oneOf": _Writing.one_of,
    "not": _Writing.negation,
    "if": _Writing.condition,
    "$ref": _Writing.reference,
    **{key: _named(_Writing.unsupported, key) for key in ("$dynamicRef", "$recursiveRef", "extends", "disallow")},
}
# What must be left out as well where a keyword is: it would speak of more values than it did.
_WITHOUT = {
    "properties": ("properties", "additionalProperties"),
    "patternProperties": ("patternProperties", "additionalProperties"),
    "prefixItems": ("prefixItems", "items"),
}
_BRANCHING = frozenset({"oneOf", "anyOf", "allOf", "if"})
_SCALAR_KEYWORDS = [
    "type",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "properties",
    "required",
    "additionalProperties",
    "patternProperties",
]


def _constrains(schema: dict[str, Any], *besides: str) -> bool:
    """Whether a schema has keywords that are more than annotations, besides these."""
    return bool((schema.keys() & _HANDLERS.keys()).difference(besides))


def _narrow(schema: Schema, types: set[str]) -> Schema:
    """Tell a schema the types that its surroundings allow: llguidance multiplies alternatives before it drops any."""
    if isinstance(schema, bool) or schema.keys() == {"$ref"}:
        return schema
    out = dict(schema)
    named = schema.get("type")
    if named is not None:
        own = {named} if isinstance(named, str) else set(named)
        types = {one for one in own if one in types or (one == "integer" and "number" in types)} | (
            {"integer"} if "number" in own and "integer" in types else set()
        )
    if "anyOf" in schema:
        out["anyOf"] = [one for one in (_narrow(one, types) for one in schema["anyOf"]) if one is not False]
    if "allOf" in schema:
        out["allOf"] = [one for one in (_narrow(one, types) for one in schema["allOf"]) if one is not True]
    if not types or out.get("anyOf") == [] or False in out.get("allOf", ()):
        return False
    if named is not None or schema.keys() - {"anyOf", "allOf", "$ref", "const", "enum"}:
        out["type"] = sorted(types) if len(types) > 1 else next(iter(types))
    return out


# ------------------------------------------------------------------------------------------------------------ oneOf
def _tell_apart(sets: SchemaViews, rest: Node, members: list[Node]) -> list[list[Schema]] | None:
    """For each branch, the schemas that it must satisfy besides so that it shares no value with another branch.

    A branch may be tightened as it likes, but the others are taken as they were given: a value must not fit them.
    """
    originals = [sets.all_of([rest, member]) for member in members]
    if _discriminated(sets, originals):
        return [[] for _ in members]
    found: list[list[Schema]] = []
    for at, member in enumerate(members):
        own, more = originals[at], []
        for other in originals[:at] + originals[at + 1 :]:
            for _ in range(8):
                clash = next(_clashes(sets, own, other), None)
                if clash is None:
                    break
                remedy = _remedy(sets, *clash)
                if remedy is None:
                    return None
                more.append(remedy)
                own = sets.both(own, sets.views(member.child(remedy)))
            else:
                return None
        found.append(more)
    return found


def _discriminated(sets: SchemaViews, branches: list[list[View]]) -> bool:
    """Whether all branches are objects with a required property that has other values in each."""
    views = [view for branch in branches for view in branch]
    if not views or any(view.types != {"object"} for view in views):
        return False
    for name in sorted(frozenset.intersection(*(view.required for view in views))):
        seen: dict[Any, int] = {}
        for at, branch in enumerate(branches):
            values = [sets.finite_values(view.about(name)) for view in branch]
            if any(one is None or any(seen.setdefault(value_key(two), at) != at for two in one) for one in values):
                break
        else:
            return True
    return False


def _clashes(sets: SchemaViews, own: list[View], other: list[View]) -> Iterator[tuple[View, View, set[str]]]:
    for two in other:
        for one in own:
            shared = sets.shared_types(one, two)
            if shared:
                yield one, two, shared


def _remedy(sets: SchemaViews, one: View, two: View, shared: set[str]) -> Schema | None:
    """Return what keeps a value of the first view out of the second."""
    if one.values is not None:
        left = [value for value in one.values if not sets.allows(two, value) or not _listed_in(two, value)]
        return {"enum": left} if left else False
    if sets.covers(two, one, shared):  # whatever fits here fits there as well
        return {"type": sorted(one.types - shared)} if one.types - shared else False
    if shared > {"object"} and (one.required or one.properties):
        return {"type": "object"}
    if shared != {"object"} and one.types - shared:
        return {"type": sorted(one.types - shared)}
    if shared == {"object"}:
        open_names = [name for name in one.properties if name not in one.required and sets.all_of(one.about(name))]
        apart = [name for name in open_names if sets.properties_apart(one, two, name)]
        telling = [name for name in apart if sets.finite_values(one.about(name)) is not None]
        foreign = sorted(two.required - one.required)
        if telling:
            return {"required": telling[:1]}
        if foreign:
            return {"properties": dict.fromkeys(foreign, False)}
        return {"required": apart[:1]} if apart else None
    if shared == {"array"}:
        return {"minItems": 1} if not one.min_items and sets.items_apart(one, two) else None
    if two.values is not None:
        return {"not": {"enum": [value for value in two.values if type_of(value) in shared]}}
    if shared == {"number"} and two.integer == one.integer and (two.low or two.high):
        below = {"maximum" if two.low[1] else "exclusiveMaximum": two.low[0]} if two.low else None
        above = {"minimum" if two.high[1] else "exclusiveMinimum": two.high[0]} if two.high else None
        return {"anyOf": [side for side in (below, above) if side]}
    return None


def _listed_in(view: View, value: Any) -> bool:
    return view.keys is None or value_key(value) in view.keys


# --------------------------------------------------------------------------------------------------- satisfiability
def _can_match(root: Schema, defs: dict[str, Schema]) -> bool:
    """Whether some finite value may match: references that never come to an end match nothing."""
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
        return schema.get("minLength", 0) <= schema.get("maxLength", MAX_LENGTH)
    return True
