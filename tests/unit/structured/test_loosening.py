"""Keywords that are not supported: refused with their path, or left out where a tool need not be strict."""

from __future__ import annotations

import json
import logging
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from headway.errors import InvalidRequestError
from headway.sampling_params import StructuredOutputsParams
from headway.structured.compile_grammar import compile_grammar
from headway.structured.compiler_errors import plain_reason
from headway.structured.grammars import grammar_of
from headway.structured.json_schema import prepare_schema
from headway.structured.tool_schemas import Tool, log_loosened, prepared_tool

# A schema, where it is not supported, and valid values of which strict reading would lose some.
UNSUPPORTED: dict[str, tuple[dict[str, Any], str, list[Any]]] = {
    "uniqueItems": (
        {"properties": {"a": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}},
        "properties.a.uniqueItems",
        [{"a": ["x", "y"]}],
    ),
    "patterns that overlap": (
        {"patternProperties": {"a*": {"type": "integer"}, "aaa*": {"minimum": 1}}, "additionalProperties": False},
        "patternProperties",
        [{"aaa": 1}, {"a": 0}],
    ),
    "oneOf of equals": (
        {"properties": {"a": {"oneOf": [{"type": "object", "title": "x"}, {"type": "object", "minProperties": 1}]}}},
        "properties.a.oneOf",
        [{"a": {}}],
    ),
    "a lookahead": ({"properties": {"a": {"pattern": "^(?=a)b"}}}, "properties.a.pattern", [{"a": 1}]),
    "an anchor within": ({"properties": {"a": {"pattern": "a$b"}}}, "properties.a.pattern", [{"a": 1}]),
    "an unknown property of characters": ({"properties": {"a": {"pattern": "\\p{Foo}"}}}, "properties.a.pattern", []),
    "maxContains": (
        {"properties": {"a": {"type": "array", "contains": {"const": 1}, "maxContains": 1}}},
        "properties.a.maxContains",
        [{"a": [1]}],
    ),
    "not": ({"properties": {"a": {"not": {"multipleOf": 2}}}}, "properties.a.not", [{"a": 1}]),
    "a long tuple": (
        {"properties": {"a": {"prefixItems": [{"type": "integer"}] * 501, "items": {"type": "null"}}}},
        "properties.a.prefixItems",
        [{"a": [1, 2]}],
    ),
    "a large number": ({"properties": {"a": {"const": 2**53 + 1}}}, "properties.a.const", [{"a": 2**53 + 1}]),
    "a dynamic reference": ({"properties": {"a": {"$dynamicRef": "#a"}}}, "properties.a.$dynamicRef", []),
}


def parameters(name: str) -> dict[str, Any]:
    return {"type": "object", **UNSUPPORTED[name][0]}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_strict_tool_is_refused_by_path(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        prepared_tool(Tool("f", parameters=parameters(name), strict=True), "tools[0].function.parameters")
    assert caught.value.param == f"tools[0].function.parameters.{UNSUPPORTED[name][1]}"


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_another_tool_may_be_called_with_more(name: str) -> None:
    _, place, values = UNSUPPORTED[name]
    tool, left_out = prepared_tool(Tool("f", parameters=parameters(name)), "tools[0].function.parameters")
    assert len(left_out) == 1
    assert left_out[0].startswith(f"tools[0].function.parameters.{place}")
    tokenizer = LLTokenizer("byte")
    start = compile_grammar(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(tool.parameters)))
    for value in values:
        jsonschema.Draft202012Validator(parameters(name)).validate(value)
        matcher = start.deep_copy()
        text = list(json.dumps(value, separators=(",", ":")).encode())
        assert matcher.try_consume_tokens(text) == len(text), value
        assert matcher.is_accepting()


@pytest.mark.parametrize(
    "schema", [{"properties": {"a": {"type": "float"}}}, {"required": 1}, {"$ref": "#/$defs/x"}, {"minLength": "a"}]
)
def test_what_is_no_schema_is_refused_always(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        prepared_tool(Tool("f", parameters=schema), "tools[0].function.parameters")


def test_supported_schemas_are_not_loosened() -> None:
    schema = {"type": "object", "properties": {"a": {"oneOf": [{"type": "string"}, {"type": "null"}]}}}
    left_out: list[str] = []
    assert prepare_schema(schema, path="p", loosened=left_out) == prepare_schema(schema, path="p")
    assert not left_out


def test_what_is_left_out_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    log_loosened.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            log_loosened("f", tuple(f"tools[0].function.parameters.{at}: no" for at in range(5)))
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
        compile_grammar(LLTokenizer("byte"), grammar_of(StructuredOutputsParams(**values)))
    text = str(caught.value)
    assert reason in text
    for internal in ("%llguidance", "x-guidance", " | ", "(And", "json-schema:///"):
        assert internal not in text


def test_reasons_that_end_with_a_state() -> None:
    assert plain_reason("NoExtension at 1\n<state>\nabc") == "no text can match it"
    assert plain_reason("too large\n<non-verbose/>") == "too large"
