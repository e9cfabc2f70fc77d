"""Rewrites one document for llguidance: each schema that is referred to becomes a definition of the result.

A `Rewriter` walks the document. A `Writing` is the rewriting of one schema: handlers, one for each keyword, put the
keywords that stay into `out`, and schemas that also apply to the value into `parts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from headway.errors import InvalidRequestError
from headway.structured.json_pattern import PatternError, portable_pattern
from headway.structured.pattern_matching import compiler_fault, work_of
from headway.structured.schema_nodes import Node, Schema, TooComplexError, is_integral
from headway.structured.schema_references import References, refuse
from headway.structured.schema_satisfiability import can_match
from headway.structured.schema_views import SchemaViews

MAX_EMITTED = 8_000  # schemas after rewriting
MAX_ALTERNATIVES = 2_000  # in one anyOf, oneOf or enum
MAX_PATTERNS = 1_500  # of one schema, with those of names

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
_BRANCHING = frozenset({"oneOf", "anyOf", "allOf", "if"})
# What must be left out as well where a keyword is: it would speak of more values than it did.
_WITHOUT = {
    "properties": ("properties", "additionalProperties"),
    "patternProperties": ("patternProperties", "additionalProperties"),
    "prefixItems": ("prefixItems", "items"),
}


class UnsupportedError(InvalidRequestError):
    """A keyword means something that cannot be expressed; without it, the schema allows more."""


class Rewriter:
    """One document. With `loosened`, keywords that are not supported are left out, and are added to it."""

    def __init__(
        self, document: dict[str, Any], path: str, handlers: Mapping[str, Handler], loosened: list[str] | None
    ) -> None:
        self.loosened = loosened
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
        self._handlers = handlers
        self._names: dict[int, str] = {}
        self._pending: list[tuple[str, Node]] = []
        self._inlining: list[int] = []
        self._emitted = 0
        self._patterns_work = 0

    def _unknown(self) -> frozenset[str]:
        later = [keywords for draft, keywords in _ADDED.items() if self.draft < draft]
        return frozenset(key for keywords in later for key in keywords.split())

    def document(self) -> dict[str, Any]:
        """The whole result, with its definitions."""
        root = self.rewrite(self._root)
        defs: dict[str, Schema] = {}
        while self._pending:
            name, node = self._pending.pop()
            defs[name] = self.rewrite(node)
        if root is False or not can_match(root, defs):
            refuse("no JSON value can match this schema", self._root.path)
        whole = {} if root is True else root
        return whole | {"$defs": defs} if defs else whole

    # ---------------------------------------------------------------------------------------------- references
    def value(self, node: Node) -> Schema:
        """Rewrite the schema of an inner value.

        Below a schema that is written more than once, one with branches becomes a definition and is written once.
        """
        schema = node.schema
        if self._inlining and isinstance(schema, dict) and schema.keys() & _BRANCHING and "$ref" not in schema:
            return self._definition(self.references.enter(node))
        return self.rewrite(node)

    def _definition(self, target: Node) -> Schema:
        if isinstance(target.schema, bool):
            return target.schema
        name = self._names.get(id(target.schema))
        if name is None:
            name = self._names[id(target.schema)] = f"d{len(self._names)}"
            self._pending.append((name, target))
        return {"$ref": f"#/$defs/{name}"}

    def inline(self, node: Node) -> Schema:
        """Rewrite a schema that is merged with others: llguidance cannot merge a reference into its own target."""
        if self._is_reference(node.schema):
            target = self.references.target(node)
            if id(target.schema) not in self._inlining:
                self._inlining.append(id(target.schema))
                try:
                    return self.inline(target)
                finally:
                    self._inlining.pop()
        return self.rewrite(node)

    def _is_reference(self, schema: Any) -> bool:
        """Whether a schema is nothing but a reference."""
        if not isinstance(schema, dict) or "$ref" not in schema:
            return False
        return self._ref_overrides or not self.constrains(schema, "$ref")

    # ------------------------------------------------------------------------------------------------ one schema
    def rewrite(self, node: Node) -> Schema:
        """Rewrite one schema, and what stands in it."""
        self._emitted += 1
        if self._emitted > MAX_EMITTED:
            refuse(f"the schema expands to more than {MAX_EMITTED:,} schemas", self._root.path)
        schema = node.schema
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            refuse("a schema is an object or a boolean", node.path)
        node = self.references.enter(node)
        if self._is_reference(schema):
            return self._definition(self.references.target(node))
        writing = Writing(self, node, schema)
        left_out: set[str] = set()
        for key in schema:
            handler = self._handlers.get(key)
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

    def constrains(self, schema: dict[str, Any], *besides: str) -> bool:
        """Whether a schema has keywords that are more than annotations, besides these."""
        return bool((schema.keys() & self._handlers.keys()).difference(besides))

    def count_pattern(self, pattern: str) -> None:
        """Bound what compiling the patterns of a document takes."""
        self._patterns_work += work_of(pattern)
        if self._patterns_work > MAX_PATTERNS:
            raise TooComplexError(
                f"the schema's patterns are too many, or use too many classes; {MAX_PATTERNS:,} are taken"
            )


class Writing:
    """The rewriting of one schema: keywords that stay in `out`, and schemas that apply besides in `parts`."""

    def __init__(self, rewriter: Rewriter, node: Node, schema: dict[str, Any]) -> None:
        self.rewriter = rewriter
        self.node = node
        self.schema = schema
        self.out: dict[str, Any] = {}
        self.parts: list[Schema] = []

    def result(self) -> Schema:
        """The schema as it is written."""
        if False in self.parts:
            return False
        parts = [part for part in self.parts if part is not True]
        return self.out | {"allOf": parts} if parts else self.out

    def refuse(self, message: str, *keys: str | int) -> NoReturn:
        """Raise an error: this is not a valid schema."""
        refuse(message, self.node.place(*keys))

    def decline(self, message: str, *keys: str | int) -> NoReturn:
        """Refuse an unsupported keyword, or leave it out if the schema may be loosened."""
        path = self.node.place(*keys)
        raise UnsupportedError(f"{path}: {message}", param=path)

    def child(self, value: Any, *keys: str | int) -> Schema:
        """Rewrite the schema of an inner value."""
        return self.rewriter.value(self.node.child(value, *keys))

    def beside(self, value: Any, *keys: str | int) -> Schema:
        """Rewrite a schema that applies to the same value."""
        node = self.node.child(value, *keys)
        return self.rewriter.inline(node) if self.constrains_besides(str(keys[0])) else self.rewriter.rewrite(node)

    def constrains_besides(self, *keys: str) -> bool:
        return self.rewriter.constrains(self.schema, *keys)

    def without(self, *keys: str) -> Node:
        """The same schema without some of its keywords."""
        return self.node.child({key: one for key, one in self.schema.items() if key not in keys})

    def listed(self, key: str, *, limit: int = MAX_ALTERNATIVES) -> list[Any]:
        value = self.schema[key]
        if not isinstance(value, list) or not value:
            self.refuse(f"'{key}' is a list that is not empty", key)
        if len(value) > limit:
            self.decline(f"'{key}' has {len(value):,} entries, at most {limit:,} are taken", key)
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.schema[key]
        if not isinstance(value, dict):
            self.refuse(f"'{key}' is an object", key)
        return value

    def count(self, key: str) -> int:
        value = self.schema[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not is_integral(value) or value < 0:
            self.refuse(f"'{key}' is a whole number of 0 or more", key)
        return int(value)

    def portable(self, pattern: str, *keys: str) -> str:
        """A pattern as llguidance reads it."""
        try:
            portable = portable_pattern(pattern)
        except PatternError as error:
            self.decline(str(error), *keys)
        self.rewriter.count_pattern(portable)
        if (fault := compiler_fault({"type": "string", "pattern": portable})) is not None:
            self.decline(fault, *keys)
        return portable


Handler = Callable[[Writing, Any], None]
"""A function that writes one keyword and gets the keyword's value."""


def unsupported(key: str) -> Handler:
    """The handler of a keyword that is refused, or left out."""
    return lambda writing, _: writing.decline(f"'{key}' is not supported", key)
