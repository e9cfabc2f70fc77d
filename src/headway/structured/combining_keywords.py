"""Rewrites the keywords that combine schemas of one value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.structured.one_of import tell_apart
from headway.structured.schema_complements import InexpressibleError, complement
from headway.structured.schema_nodes import Node, Schema, TooComplexError
from headway.structured.schema_writing import Handler, UnsupportedError, Writing, unsupported

MAX_DEPENDENCIES = 6  # each doubles the alternatives


def _all_of(writing: Writing, value: Any) -> None:
    members = [writing.node.child(one, "allOf", at) for at, one in enumerate(writing.listed("allOf"))]
    alone = len(members) == 1 and not writing.constrains_besides("allOf")
    rewriter = writing.rewriter
    writing.parts += [rewriter.rewrite(one) if alone else rewriter.inline(one) for one in members]


def _any_of(writing: Writing, value: Any) -> None:
    writing.parts.append(
        {"anyOf": [writing.beside(one, "anyOf", at) for at, one in enumerate(writing.listed("anyOf"))]}
    )


def _one_of(writing: Writing, value: Any) -> None:
    """Write `oneOf` as `anyOf`, once no value can fit two branches."""
    members = [writing.node.child(one, "oneOf", at) for at, one in enumerate(writing.listed("oneOf"))]
    if len(members) == 1:
        writing.parts.append(writing.beside(members[0].schema, "oneOf", 0))
        return
    options: list[Schema] = []
    for at, (member, more) in enumerate(zip(members, _told_apart(writing, members), strict=True)):
        if False in more:
            continue
        if not more:
            options.append(writing.beside(member.schema, "oneOf", at))
            continue
        extra = [writing.rewriter.rewrite(member.child(one)) for one in more]
        options.append({"allOf": [writing.rewriter.inline(member), *extra]})
    writing.parts.append({"anyOf": options} if options else False)


def _told_apart(writing: Writing, members: list[Node]) -> list[list[Schema]]:
    """The additional schemas of each branch. If the schema may be loosened, `oneOf` may be read as `anyOf`."""
    rewriter = writing.rewriter
    try:
        tightened = tell_apart(rewriter.sets, writing.without("oneOf"), members)
        if tightened is not None:
            return tightened
        writing.decline(
            "the branches of 'oneOf' cannot be distinguished; use 'anyOf', or require what differs", "oneOf"
        )
    except (UnsupportedError, TooComplexError) as error:
        if rewriter.loosened is None:
            raise
        rewriter.loosened.append(f"{writing.node.path}.oneOf is read as anyOf: {error}")
        return [[] for _ in members]


def _not(writing: Writing, value: Any) -> None:
    writing.parts.append(_opposite(writing, value, "not"))


def _opposite(writing: Writing, value: Any, key: str) -> Schema:
    try:
        return complement(writing.rewriter.sets, writing.node.child(value, key))
    except InexpressibleError:
        writing.decline(f"'{key}' is not supported here: the opposite of this schema cannot be expressed", key)


def _if(writing: Writing, value: Any) -> None:
    if not writing.schema.keys() & {"then", "else"}:
        return
    then, otherwise, holds = (
        writing.rewriter.inline(writing.node.child(writing.schema.get(key, True), key))
        for key in ("then", "else", "if")
    )
    fails = _opposite(writing, value, "if")
    writing.parts.append({"anyOf": [{"allOf": [holds, then]}, {"allOf": [fails, otherwise]}]})


def _dependencies(key: str) -> Handler:
    """Write a dependency: an object without the trigger, or with everything it requires."""

    def write(writing: Writing, value: Any) -> None:
        asked = writing.mapping(key)
        if len(asked) > MAX_DEPENDENCIES:
            writing.decline(f"'{key}' has {len(asked)} triggers, at most {MAX_DEPENDENCIES} are taken", key)
        for name, needs in asked.items():
            names = [needs] if isinstance(needs, str) else needs  # a single name: draft 3 and its readers
            if isinstance(names, list):
                if not all(isinstance(one, str) for one in names):
                    writing.refuse(f"'{key}' lists names", key, name)
                then: list[Schema] = [{"required": [name, *names]}]
            else:
                then = [{"required": [name]}, writing.rewriter.inline(writing.node.child(needs, key, name))]
            writing.parts.append({"anyOf": [{"properties": {name: False}}, {"allOf": then}]})

    return write


def _reference(writing: Writing, value: Any) -> None:
    writing.parts.append(writing.rewriter.inline(writing.node.child({"$ref": value})))


HANDLERS: Mapping[str, Handler] = {
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    **{key: _dependencies(key) for key in ("dependencies", "dependentRequired", "dependentSchemas")},
    "$ref": _reference,
    **{key: unsupported(key) for key in ("$dynamicRef", "$recursiveRef", "extends", "disallow")},
}
