"""Turn a JSON schema into one that llguidance compiles and that allows nothing the given one forbids.

`prepare_schema` bounds the input, follows its references, and rewrites keywords that llguidance does not support. The
result allows the same values (exact) or fewer (tightened). A keyword for which neither works is refused, with its JSON
path, or left out on demand. `docs/results/structured_output.md` says what each rewriting gains on real schemas.

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
    oneOf                                  anyOf once no value can fit two branches; branches are tightened if needed
    not, if/then/else                      by the opposite of type, const, enum, required and properties; a part without
                                           one (bounds, lengths, items) is passed over
    dependencies, dependentRequired,       either without the trigger or with what it asks for (at most 6 triggers)
    dependentSchemas
    minProperties                          0, 1, or over required names
    maxProperties                          where no name is optional
    propertyNames                          listed names, any names, or one pattern
    unevaluatedProperties,                 as additionalProperties and items, where no other schema is applied beside
    unevaluatedItems
    refused, or left out where a schema    contains, uniqueItems, $dynamicRef, lookaround and back references,
    may be loosened                        patternProperties that overlap, oneOf whose branches may overlap
    refused                                $ref to other documents, draft 3, what is no schema
    all other keywords                     annotations: dropped

Strings are written without \\u escapes: llguidance compares the names of properties as they are spelled, so an escape
would let a listed name pass as another one.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from headway.errors import InvalidRequestError
from headway.structured import combining_keywords, container_keywords, value_keywords
from headway.structured.schema_nodes import TooComplexError
from headway.structured.schema_references import refuse
from headway.structured.schema_writing import Rewriter

MAX_SCHEMA_BYTES = 256 * 1024
MAX_DEPTH = 64
MAX_VALUES = 30_000  # JSON values in a schema

HANDLERS = {**value_keywords.HANDLERS, **container_keywords.HANDLERS, **combining_keywords.HANDLERS}
_OPTIONS = {"json_allowed_escapes": 'nrbtf\\"'}


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
        emitted = Rewriter(document, path, HANDLERS, loosened).document()
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
