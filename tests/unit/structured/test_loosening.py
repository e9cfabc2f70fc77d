"""Keywords that are not supported: refused with their path, or left out where a tool need not be strict."""

from __future__ import annotations

import json
import logging
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from headway.errors import InvalidRequestError
from headway.sampling_params import StructuredOutputsParams
from headway.structured.compile_grammar import compile_grammar
from headway.structured.compiler_errors import plain_reason
from headway.structured.grammars import grammar_of
from headway.structured.json_schema import prepare_schema
from headway.structured.tool_schemas import Tool, log_loosened, prepared_tool
from tests.unit.structured.matching import BYTES, is_whole

# Of the parameter "a", or of all: a schema, where and why it is not supported, and valid values that strictness loses.
UNSUPPORTED: dict[str, tuple[dict[str, Any], str, str, list[Any]]] = {
    "uniqueItems": (
        {"a": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
        ".uniqueItems",
        "listed values",
        [{"a": ["x", "y"]}],
    ),
    "oneOf of equals": (
        {"a": {"oneOf": [{"type": "object", "title": "x"}, {"type": "object", "minProperties": 1}]}},
        ".oneOf",
        "told apart",
        [{"a": {}}],
    ),
    "a lookahead": ({"a": {"pattern": "^(?=a)b"}}, ".pattern", "lookahead", [{"a": 1}]),
    "an anchor within": ({"a": {"pattern": "a$b"}}, ".pattern", "lookarounds", [{"a": 1}]),
    "an unknown property of characters": ({"a": {"pattern": "\\p{Foo}"}}, ".pattern", "not found", []),
    "maxContains": (
        {"a": {"type": "array", "contains": {"const": 1}, "maxContains": 1}},
        ".maxContains",
        "is not supported",
        [{"a": [1]}],
    ),
    "not": ({"a": {"not": {"multipleOf": 2}}}, ".not", "opposite", [{"a": 1}]),
    "a long tuple": (
        {"a": {"prefixItems": [{"type": "integer"}] * 501, "items": {"type": "null"}}},
        ".prefixItems",
        "at most 500",
        [{"a": [1, 2]}],
    ),
    "a large number": ({"a": {"const": 2**53 + 1}}, ".const", "a listed number", [{"a": 2**53 + 1}]),
    "a dynamic reference": ({"a": {"$dynamicRef": "#a"}}, ".$dynamicRef", "not supported", []),
    "patterns that overlap": (
        {"patternProperties": {"a*": {"type": "integer"}, "aaa*": {"minimum": 1}}, "additionalProperties": False},
        "patternProperties",
        "not disjoint",
        [{"aaa": 1}, {"a": 0}],
    ),
}
PLACE = "tools[0].function.parameters"


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_strict_tool_is_refused_by_path_and_another_may_be_called_with_more(name: str) -> None:
    schema, place, reason, values = UNSUPPORTED[name]
    if "a" in schema:
        schema, place = {"properties": schema}, f"properties.a{place}"
    parameters = {"type": "object", **schema}
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        prepared_tool(Tool("f", parameters=parameters, strict=True), PLACE)
    assert caught.value.param == f"{PLACE}.{place}"
    tool, (left_out,) = prepared_tool(Tool("f", parameters=parameters), PLACE)
    assert left_out.startswith(f"{PLACE}.{place}")
    start = compile_grammar(BYTES, LLMatcher.grammar_from_json_schema(json.dumps(tool.parameters)))
    for value in values:
        jsonschema.Draft202012Validator(parameters).validate(value)
        assert is_whole(start.deep_copy(), list(json.dumps(value, separators=(",", ":")).encode())), value


@pytest.mark.parametrize(
    "schema", [{"properties": {"a": {"type": "float"}}}, {"required": 1}, {"$ref": "#/$defs/x"}, {"minLength": "a"}]
)
def test_what_is_no_schema_is_refused_always(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        prepared_tool(Tool("f", parameters=schema), PLACE)


def test_supported_schemas_are_not_loosened() -> None:
    schema = {"type": "object", "properties": {"a": {"oneOf": [{"type": "string"}, {"type": "null"}]}}}
    left_out: list[str] = []
    assert prepare_schema(schema, path="p", loosened=left_out) == prepare_schema(schema, path="p")
    assert not left_out


def test_what_is_left_out_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    log_loosened.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            log_loosened("f", tuple(f"{PLACE}.{at}: no" for at in range(5)))
        log_loosened("g", ())
    [record] = caplog.records
    assert "'f'" in record.getMessage()
    assert "parameters.0: no" in record.getMessage()
    assert "and 2 more" in record.getMessage()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (
            {"json": {"allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "^b"}]}},
            "Unsatisfiable schema: Regex is empty",
        ),
        (
            {"json": {"allOf": [{"patternProperties": {"a*": True}}, {"patternProperties": {"aa*": True}}]}},
            "not disjoint",
        ),
        ({"grammar": 'start: "a" foo\nx: /b/'}, 'at 1(8): unknown name: "foo"'),
        ({"grammar": "start: A\nA: /a(/"}, "at 2(4): invalid regex"),
        ({"regex": "a("}, "unclosed group"),
    ],
)
def test_the_compiler_gives_reasons_without_the_grammar(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compile_grammar(BYTES, grammar_of(StructuredOutputsParams(**values)))
    text = str(caught.value)
    assert reason in text
    for internal in ("%llguidance", "x-guidance", " | ", "(And", "json-schema:///"):
        assert internal not in text


def test_reasons_that_end_with_a_state() -> None:
    assert plain_reason("NoExtension at 1\n<state>\nabc") == "no text can match it"
    assert plain_reason("too large\n<non-verbose/>") == "too large"
