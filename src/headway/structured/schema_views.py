"""Reasons about the sets of values that schemas allow: views of them, and whether they share a value.

A `View` is one conjunction of constraints on a value; `SchemaViews.views` expands a schema over `anyOf` and `$ref`
into a list of them. A view may leave constraints out, never add any: it allows at least what its schema allows. So

* two schemas whose views are pairwise disjoint share no value, and
* what lies outside all views of a schema lies outside the schema.

Both are all that `oneOf`, `not` and `if` need (see `one_of` and `schema_complements`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from headway.structured.pattern_matching import share_no_string
from headway.structured.schema_nodes import TYPES, Node, TooComplexError, is_integral, type_of, value_key

_MAX_VIEWS = 48
_MAX_DEPTH = 10
_MAX_APART_DEPTH = 4
_MAX_WORK = 8_000
_MAX_ITEMS = 8


@dataclass(frozen=True)
class Extra:
    """What `additionalProperties` says about names that its own schema does not list."""

    names: frozenset[str]
    patterns: tuple[str, ...]
    node: Node


@dataclass(frozen=True)
class View:
    """One conjunction of constraints; `exact` if nothing of the schema was left out."""

    types: frozenset[str] = frozenset(TYPES)
    values: tuple[Any, ...] | None = None
    excluded: tuple[Any, ...] = ()
    min_length: int = 0
    max_length: int | None = None
    patterns: tuple[str, ...] = ()
    properties: Mapping[str, tuple[Node, ...]] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    extras: tuple[Extra, ...] = ()
    items: tuple[Node, ...] = ()
    prefix: tuple[tuple[Node, ...], ...] = ()
    min_items: int = 0
    max_items: int | None = None
    exact: bool = True

    @cached_property
    def keys(self) -> frozenset[Hashable] | None:
        """Keys of the listed values; None: the values are not listed."""
        return None if self.values is None else frozenset(map(value_key, self.values))

    @cached_property
    def excluded_keys(self) -> frozenset[Hashable]:
        return frozenset(map(value_key, self.excluded))

    def meet(self, other: View) -> View | None:
        types = self.types & other.types
        values = self.values if other.values is None else other.values
        if self.values is not None and other.keys is not None:
            values = tuple(one for one in self.values if value_key(one) in other.keys)
        if not types or values == ():
            return None
        properties = dict(self.properties)
        for name, nodes in other.properties.items():
            properties[name] = properties.get(name, ()) + nodes
        longest = max(len(self.prefix), len(other.prefix))
        return View(
            types=types,
            values=values,
            excluded=self.excluded + other.excluded,
            min_length=max(self.min_length, other.min_length),
            max_length=_smallest(self.max_length, other.max_length),
            patterns=self.patterns + other.patterns,
            properties=properties,
            required=self.required | other.required,
            extras=self.extras + other.extras,
            # `items` speaks of what follows a prefix: with prefixes of two lengths only the first of them is kept.
            items=self.items + other.items if longest == 0 else (),
            prefix=tuple(self.item(at) + other.item(at) for at in range(longest)),
            min_items=max(self.min_items, other.min_items),
            max_items=_smallest(self.max_items, other.max_items),
            exact=self.exact and other.exact and longest == 0,
        )

    def item(self, at: int) -> tuple[Node, ...]:
        return self.prefix[at] if at < len(self.prefix) else self.items

    def about(self, name: str) -> tuple[Node, ...]:
        """Schemas that the value of this property must satisfy (those of matching patterns are left out)."""
        found = self.properties.get(name, ())
        for extra in self.extras:
            if name not in extra.names and not extra.patterns:
                found = (*found, extra.node)
        return found


ANYTHING = View(exact=False)


class SchemaViews:
    """Views of the schemas of one document, with a limit on the work that may go into them."""

    def __init__(
        self,
        resolve: Callable[[Node], Node],
        enter: Callable[[Node], Node],
        *,
        ref_overrides: bool,
        unknown: frozenset[str],
    ) -> None:
        self._resolve = resolve
        self._enter = enter
        self._unknown = unknown  # keywords that the schema's draft does not have: no constraints to rely on
        self._ref_overrides = ref_overrides  # up to draft 7, the siblings of $ref do not count
        self._work = 0
        self._known: dict[tuple[int, bool, int], tuple[Node, list[View]]] = {}

    def _spend(self, work: int = 1) -> None:
        self._work += work
        if self._work > _MAX_WORK:
            raise TooComplexError("the schema has too many alternatives to distinguish")

    def views(self, node: Node, depth: int = 0) -> list[View]:
        """Spread a schema into views; none at all: the schema allows nothing."""
        key = (id(node.schema), node.is_identified, depth)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = (node, self._spread(node, depth))  # the node keeps the id in use
        return known[1]

    def _spread(self, node: Node, depth: int) -> list[View]:
        self._spend()
        schema = node.schema
        if schema is True:
            return [View()]
        if schema is False:
            return []
        if depth > _MAX_DEPTH or not isinstance(schema, dict):
            return [ANYTHING]
        node = self._enter(node)
        if self._ref_overrides and "$ref" in schema:
            return self.views(self._resolve(node), depth + 1)
        own = self._own(node, schema)
        found = [own] if own is not None else []
        for key in ("allOf", "anyOf", "oneOf"):
            members = [
                self.views(node.child(one, key, at), depth + 1) for at, one in enumerate(_listed(schema.get(key)))
            ]
            if key == "allOf":
                for member in members:
                    found = self.both(found, member)
            elif members:
                either = [view for member in members for view in member]
                found = self.both(found, [replace(view, exact=False) for view in either] if key == "oneOf" else either)
        if "$ref" in schema:
            found = self.both(found, self.views(self._resolve(node), depth + 1))
        return found

    def all_of(self, nodes: Sequence[Node], depth: int = 0) -> list[View]:
        found = [View()]
        for node in nodes:
            found = self.both(found, self.views(node, depth))
        return found

    def both(self, ones: list[View], twos: list[View]) -> list[View]:
        if len(ones) * len(twos) > _MAX_VIEWS:
            return [ANYTHING]
        self._spend(sum(1 + len(one.properties) // 8 + len(one.values or ()) // 256 for one in ones) * len(twos))
        return [view for one in ones for two in twos if (view := one.meet(two)) is not None]

    def _own(self, node: Node, schema: dict[str, Any]) -> View | None:
        """View of the keywords that stand directly in a schema."""
        schema = {key: one for key, one in schema.items() if key not in self._unknown}
        types, integer = frozenset(TYPES), False
        if "type" in schema:
            named = [schema["type"]] if isinstance(schema["type"], str) else _listed(schema["type"])
            integer = "integer" in named and "number" not in named
            types = frozenset("number" if one == "integer" else one for one in named if isinstance(one, str))
        values = None
        if "const" in schema:
            values = (schema["const"],)
        elif "enum" in schema:
            values = tuple(_listed(schema["enum"]))
        if values is not None:
            values = tuple(one for one in values if type_of(one) in types and (not integer or is_integral(one)))
            types &= {type_of(one) for one in values}
        if not types:
            return None
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        self._spend(len(properties) // 8)
        extra = schema.get("additionalProperties", True)
        patterns = schema.get("patternProperties")
        patterns = patterns if isinstance(patterns, dict) else {}
        extras: tuple[Extra, ...] = ()
        if extra is not True:
            place = node.child(extra, "additionalProperties")
            extras = (Extra(frozenset(properties), tuple(patterns), place),)
        items, prefix = schema.get("items"), schema.get("prefixItems")
        if isinstance(items, list):
            prefix, items = items, schema.get("additionalItems")
        return View(
            types=types,
            values=values,
            excluded=_values_forbidden(schema.get("not")),
            min_length=_whole(schema.get("minLength")) or 0,
            max_length=_whole(schema.get("maxLength")),
            patterns=(schema["pattern"],) if isinstance(schema.get("pattern"), str) else (),
            properties={name: (node.child(one, "properties", name),) for name, one in properties.items()},
            required=frozenset(one for one in _listed(schema.get("required")) if isinstance(one, str)),
            extras=extras,
            items=() if items is None else (node.child(items, "items"),),
            prefix=tuple((node.child(one, "prefixItems", at),) for at, one in enumerate(_listed(prefix))),
            min_items=_whole(schema.get("minItems")) or 0,
            max_items=_whole(schema.get("maxItems")),
            exact=not integer and not (schema.keys() & _LEFT_OUT),
        )

    # ------------------------------------------------------------------------------------------- disjointness
    def disjoint(self, one: View, two: View, depth: int = 0) -> bool:
        """Whether no value is in both views, as far as can be known."""
        return not self.shared_types(one, two, depth)

    def shared_types(self, one: View, two: View, depth: int = 0) -> set[str]:
        """Types of which a value may be in both views."""
        self._spend()
        if depth > _MAX_APART_DEPTH:
            return set(one.types & two.types)
        if one.values is not None or two.values is not None:
            common = self._common_values(one, two)
            return {
                type_of(value) for value in common if self.allows(one, value, depth) and self.allows(two, value, depth)
            }
        return {kind for kind in one.types & two.types if not self._apart(kind, one, two, depth)}

    def _common_values(self, one: View, two: View) -> Sequence[Any]:
        """Values that are listed in both views, or in the only one that lists any."""
        if one.values is None or two.values is None:
            return one.values or two.values or ()
        assert one.keys is not None and two.keys is not None
        self._spend(min(len(one.keys), len(two.keys)) // 256)
        if one.keys.isdisjoint(two.keys):
            return ()
        self._spend(len(one.values) // 8)
        return [value for value in one.values if value_key(value) in two.keys]

    def _apart(self, kind: str, one: View, two: View, depth: int) -> bool:
        if kind == "string":
            if _below(one.max_length, two.min_length) or _below(two.max_length, one.min_length):
                return True
            return bool(one.patterns and two.patterns) and self._patterns_apart(one.patterns + two.patterns)
        if kind == "object":
            names = sorted(one.required | two.required)
            self._spend(len(names) // 8)
            return any(self.properties_apart(one, two, name, depth) for name in names)
        if kind == "array":
            if _below(one.max_items, two.min_items) or _below(two.max_items, one.min_items):
                return True
            sure = min(max(one.min_items, two.min_items), _MAX_ITEMS)
            return any(self._nodes_apart(one.item(at), two.item(at), depth) for at in range(sure))
        return False

    def _patterns_apart(self, patterns: tuple[str, ...]) -> bool:
        self._spend(500)
        return share_no_string(patterns)

    def properties_apart(self, one: View, two: View, name: str, depth: int = 0) -> bool:
        """Whether no value of this property suits both views."""
        return self._nodes_apart(one.about(name), two.about(name), depth)

    def items_apart(self, one: View, two: View) -> bool:
        return self._nodes_apart(one.item(0), two.item(0), 0)

    def _nodes_apart(self, one: tuple[Node, ...], two: tuple[Node, ...], depth: int) -> bool:
        if not one and not two:
            return False
        others = self.all_of(two, depth + 1)
        return all(self.disjoint(a, b, depth + 1) for a in self.all_of(one, depth + 1) for b in others)

    def allows(self, view: View, value: Any, depth: int = 0) -> bool:
        """Whether a view may allow this value: False is certain, True is not."""
        self._spend()
        kind = type_of(value)
        if depth and view.keys is not None and value_key(value) not in view.keys:
            return False
        if kind not in view.types or (view.excluded and value_key(value) in view.excluded_keys):
            return False
        if kind == "array":
            if len(value) < view.min_items or (view.max_items is not None and len(value) > view.max_items):
                return False
            return depth > _MAX_DEPTH or all(
                any(self.allows(one, item, depth + 1) for one in self.all_of(view.item(at), depth + 1))
                for at, item in enumerate(value)
            )
        return True

    def finite_values(self, nodes: Sequence[Node]) -> list[Any] | None:
        """All values that these schemas allow together, if they are listed."""
        found: list[Any] = []
        for view in self.all_of(nodes):
            if view.values is None:
                return None
            found += [value for value in view.values if self.allows(view, value)]
        return list({value_key(value): value for value in found}.values())


_LEFT_OUT = frozenset(
    [
        "not",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "patternProperties",
        "multipleOf",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "if",
        "then",
        "else",
        "unevaluatedProperties",
        "unevaluatedItems",
        "$dynamicRef",
        "$recursiveRef",
    ]
)


def _values_forbidden(schema: Any) -> tuple[Any, ...]:
    """Values that `not: {enum: […]}` or `not: {const: …}` forbids."""
    if not isinstance(schema, dict):
        return ()
    if schema.keys() == {"const"}:
        return (schema["const"],)
    return tuple(_listed(schema["enum"])) if schema.keys() == {"enum"} else ()


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(value: Any) -> int | None:
    return int(value) if _number(value) is not None and is_integral(value) else None


def _largest(one: Any, two: Any) -> Any:
    return two if one is None else one if two is None else max(one, two)


def _smallest(one: Any, two: Any) -> Any:
    return two if one is None else one if two is None else min(one, two)


def _below(one: Any, two: Any) -> bool:
    return one is not None and two is not None and one < two
