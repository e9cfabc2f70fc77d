"""Makes the branches of `oneOf` disjoint, so that it may be read as `anyOf`: no value may fit two of them.

A branch is tightened if needed: names that only another branch requires are left out, a property that distinguishes
the branches is required, shared types and values are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headway.structured.schema_nodes import Node, Schema, type_of, value_key
from headway.structured.schema_views import SchemaViews, View


def tell_apart(sets: SchemaViews, rest: Node, members: list[Node]) -> list[list[Schema]] | None:
    """For each branch, the schemas that it must satisfy besides so that it shares no value with another branch.

    A branch may be tightened, but its values must not fit any other branch as that branch was given.
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
    return None


def _listed_in(view: View, value: Any) -> bool:
    return view.keys is None or value_key(value) in view.keys
