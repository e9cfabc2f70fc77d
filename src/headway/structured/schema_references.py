"""References inside one document, by JSON pointer. Nothing is fetched, and anchors and identifiers are not followed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn
from urllib.parse import unquote

from headway.errors import InvalidRequestError
from headway.structured.schema_nodes import Node


def refuse(message: str, path: str) -> NoReturn:
    """Refuse a schema for what stands at `path`."""
    raise InvalidRequestError(f"{path}: {message}", param=path)


class References:
    """The references of one document, which is a tree: each schema stands at one place only."""

    def __init__(self, document: dict[str, Any], path: str, draft: int) -> None:
        self.root = Node(document, path)
        self.ref_overrides = draft <= 7  # there, the siblings of $ref do not count
        self._id_key = "id" if draft == 4 else "$id"

    def enter(self, node: Node) -> Node:
        """Mark a schema that has an identifier, besides the document's own."""
        schema = node.schema
        if not isinstance(schema, dict) or schema is self.root.schema or (self.ref_overrides and "$ref" in schema):
            return node
        name = schema.get(self._id_key)
        is_identified = isinstance(name, str) and bool(name.partition("#")[0])
        return replace(node, is_identified=True) if is_identified else node

    def target(self, node: Node) -> Node:
        """Return the schema that the `$ref` of this one names."""
        assert isinstance(node.schema, dict)
        reference, place = node.schema["$ref"], f"{node.path}.$ref"
        if not isinstance(reference, str):
            refuse("'$ref' is a string", place)
        if not reference.startswith("#"):
            refuse(f"the reference '{reference:.100}' leaves the schema, and is not followed", place)
        if reference != "#" and not reference.startswith("#/"):
            refuse(f"the reference '{reference:.100}' names an anchor; only JSON pointers are followed", place)
        if self.enter(node).is_identified:
            refuse("a reference in a schema with an identifier of its own is not followed", place)
        return self._pointed(unquote(reference[1:]), f"the reference '{reference:.100}' leads nowhere", place)

    def _pointed(self, pointer: str, message: str, place: str) -> Node:
        found = self.root
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
