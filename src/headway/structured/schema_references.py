"""References inside one document: JSON pointers, anchors, and schemas with an identifier of their own.

Nothing is fetched. A reference is followed if its target stands in the document, whatever its identifiers look like:
`#/$defs/a`, `#anchor`, `item.json` where a schema has that `$id`, `urn:uuid:…`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from headway.errors import InvalidRequestError
from headway.structured.schema_sets import Node, Resource

_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_SCHEMAS = (
    *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", "additionalProperties"),
    *("unevaluatedProperties", "propertyNames", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
)
_AMBIGUOUS = Resource(False, "")


def refuse(message: str, path: str) -> NoReturn:
    """Refuse a schema for what stands at `path`."""
    raise InvalidRequestError(f"{path}: {message}", param=path)


class References:
    """The identifiers of one document, which is a tree: each schema stands at one place only."""

    def __init__(self, document: dict[str, Any], path: str, draft: int) -> None:
        self._id_key = "id" if draft == 4 else "$id"
        self.ref_overrides = draft <= 7  # there, the siblings of $ref do not count
        self._resources: dict[int, Resource] = {}  # by the schema that has an identifier
        self._by_uri: dict[str, Resource] = {}
        self._anchors: dict[tuple[int, str], Node | None] = {}  # by the resource's schema; None: there are several
        self.root = Node(document, Resource(document, path), path)
        self._by_uri[""] = self.root.resource
        self._collect(self.root)
        self.root = self.enter(self.root)

    def enter(self, node: Node) -> Node:
        """Return a schema with the resource that it begins, if it has an identifier: `#/…` inside it starts there."""
        resource = self._resources.get(id(node.schema))
        return node if resource is None else Node(node.schema, resource, node.path)

    def target(self, node: Node) -> Node:
        """Return the schema that the `$ref` of this one names."""
        assert isinstance(node.schema, dict)
        reference, place = node.schema["$ref"], f"{node.path}.$ref"
        if not isinstance(reference, str):
            refuse("'$ref' is a string", place)
        resource = self.enter(node).resource
        uri, fragment = _parts(reference)
        if uri:
            found = self._by_uri.get(_join(resource.base, uri))
            if found is None:
                refuse(f"the reference '{reference:.100}' leaves the schema, and is not followed", place)
            if found is _AMBIGUOUS:
                refuse(f"the reference '{reference:.100}' names several schemas", place)
            resource = found
        fragment = unquote(fragment)
        if not fragment or fragment.startswith("/"):
            return self._pointed(resource, fragment, f"the reference '{reference:.100}' leads nowhere", place)
        try:
            anchored = self._anchors[id(resource.root), fragment]
        except KeyError:
            refuse(f"the reference '{reference:.100}' leads nowhere", place)
        if anchored is None:
            refuse(f"the reference '{reference:.100}' names several schemas", place)
        return anchored

    def _pointed(self, resource: Resource, pointer: str, message: str, place: str) -> Node:
        found = Node(resource.root, resource, resource.path)
        for part in pointer.split("/")[1:]:
            key: Any = part.replace("~1", "/").replace("~0", "~")
            inside: Any = found.schema
            if isinstance(inside, list) and key.isdigit() and len(key) < 6:
                key = int(key)
            try:
                inner = inside[key] if isinstance(inside, dict | list) else None
            except (KeyError, IndexError, TypeError):
                inner = None
            if inner is None:
                refuse(message, place)
            found = self.enter(found.child(inner, key))
        return found

    def _collect(self, node: Node) -> None:
        schema = node.schema
        if not isinstance(schema, dict):
            return
        if not (self.ref_overrides and "$ref" in schema):
            node = self._identified(node, schema)
        for child in _children(node, schema):
            self._collect(child)

    def _identified(self, node: Node, schema: dict[str, Any]) -> Node:
        """Take in a schema's identifier and anchors."""
        name = schema.get(self._id_key)
        uri, fragment = _parts(name) if isinstance(name, str) else ("", "")
        if uri:
            resource = Resource(schema, node.path, _join(node.resource.base, uri))
            self._resources[id(schema)] = resource
            self._by_uri[resource.base] = _AMBIGUOUS if resource.base in self._by_uri else resource
            node = Node(schema, resource, node.path)
        anchors = [fragment] if self.ref_overrides else [schema.get("$anchor"), schema.get("$dynamicAnchor")]
        for anchor in dict.fromkeys(one for one in anchors if isinstance(one, str) and one):
            key = (id(node.resource.root), anchor)
            self._anchors[key] = None if key in self._anchors else node
        return node


def _children(node: Node, schema: dict[str, Any]) -> Iterator[Node]:
    for key in _SCHEMAS:
        value = schema.get(key)
        if isinstance(value, list):
            yield from (node.child(one, key, at) for at, one in enumerate(value))
        elif value is not None:
            yield node.child(value, key)
    for key in _NAMED_SCHEMAS:
        value = schema.get(key)
        if isinstance(value, dict):
            yield from (node.child(one, key, name) for name, one in value.items())


def _parts(reference: str) -> tuple[str, str]:
    uri, _, fragment = reference.partition("#")
    return uri, fragment


def _join(base: str, uri: str) -> str:
    try:
        return uri if urlsplit(uri).scheme else urldefrag(urljoin(base, uri)).url
    except ValueError:  # such as 'http://['
        return uri
