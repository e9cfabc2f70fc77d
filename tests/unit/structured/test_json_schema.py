"""Schemas for the grammar: what they allow after rewriting, what is refused, and how fast. Keywords that are
not supported: refused with their path, or left out."""

from __future__ import annotations

import contextlib
import json
import logging
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from headway.errors import InvalidRequestError
from headway.sampling_params import StructuredOutputsParams
from headway.structured.compile_grammar import compile_grammar
from headway.structured.compiler_errors import plain_reason
from headway.structured.grammars import grammar_of
from headway.structured.json_pattern import PatternError, none_of, opposite_pattern, portable_pattern
from headway.structured.json_schema import prepare_schema
from headway.structured.pattern_matching import share_no_string
from headway.structured.tool_schemas import Tool, log_loosened, prepared_tool
from tests.unit.structured.matching import BYTES, embedded_vocabulary, is_whole, matcher_of, soon, walk

PATH = "response_format.json_schema.schema"
STRING, INTEGER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
OBJECT, ARRAY = {"type": "object"}, {"type": "array"}
CLOSED = OBJECT | {"additionalProperties": False}
SHAPE = OBJECT | {
    "properties": {name: {"type": "number"} for name in ("radius", "length", "width")},
    "oneOf": [{"required": ["radius"]}, {"required": ["length", "width"]}],
}
PETS = {
    "oneOf": [
        OBJECT | {"properties": {"kind": {"const": "cat"}, "lives": INTEGER}, "required": ["kind"]},
        OBJECT | {"properties": {"kind": {"const": "dog"}}, "required": ["kind"]},
        NULL,
    ]
}
TREE = {"$ref": "#/$defs/n", "$defs": {"n": {"oneOf": [ARRAY | {"items": {"$ref": "#/$defs/n"}}, {"const": 1}]}}}
CARD = CLOSED | {"properties": {"card": INTEGER, "address": STRING}, "dependentRequired": {"card": ["address"]}}
PLACE = CLOSED | {
    "properties": {"country": {"enum": ["US", "NL"]}, "zip": STRING},
    "required": ["country", "zip"],
    "if": {"properties": {"country": {"const": "US"}}},
    "then": {"properties": {"zip": {"pattern": "^[0-9]{5}$"}}},
    "else": {"properties": {"zip": {"pattern": "^[A-Z]{2}$"}}},
}
DRAFT_4 = {"$schema": "http://json-schema.org/draft-04/schema#"}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
DRAFT_2019 = {"$schema": "https://json-schema.org/draft/2019-09/schema"}
SHORT = {"$ref": "#/$defs/s", "maxLength": 1}
BOTH = CLOSED | {"properties": {"a": {}, "b": {}, "c": {}}}
SOME_PATTERNS = {"patternProperties": {"^a": INTEGER}}
# A schema, what it allows, and what it does not.
CASES: dict[str, tuple[Any, list[str], list[str]]] = {
    "anything": (True, ["1", '{"a":[]}'], []),
    "oneOf by types": ({"oneOf": [STRING, NULL]}, ['"a"', "null"], ["1"]),
    "oneOf by required names": (
        SHAPE,
        ['{"radius":1}', '{"length":1,"width":2}'],
        ['{"length":1}', '{"length":1,"radius":1,"width":2}'],
    ),
    "oneOf by a constant": (PETS, ['{"kind":"cat","lives":9}', '{"kind":"dog"}', "null"], ['{"lives":9}']),
    "oneOf that recurs": (TREE, ["1", "[1,[1,[]]]"], ["2"]),
    "oneOf of a value and its type": ({"oneOf": [STRING, {"enum": ["a", 1]}]}, ['"b"', "1"], ['"a"']),
    "oneOf with a shared type": (
        {"oneOf": [{"type": ["string", "null"]}, {"type": ["integer", "null"]}]},
        ['"a"', "1"],
        ["null"],
    ),
    "oneOf by patterns": ({"oneOf": [STRING | {"pattern": "^a"}, STRING | {"pattern": "^b"}]}, ['"a"', '"b"'], ['"c"']),
    "not required": (
        OBJECT | {"properties": {"a": {}, "b": {}}, "not": {"required": ["a"]}},
        ["{}", '{"b":1}'],
        ['{"a":1}'],
    ),
    "not enum": (STRING | {"not": {"enum": ["no", "none"]}}, ['"non"', '"yes"', '""'], ['"no"', '"none"']),
    "not type": ({"not": STRING}, ["1", "[]"], ['"a"']),
    "not a pattern": (STRING | {"not": {"pattern": "^[ .]+$"}}, ['"a"', '". a"'], ['". ."', '" \\n"']),
    "if": (
        PLACE,
        ['{"country":"US","zip":"12345"}', '{"country":"NL","zip":"AB"}'],
        ['{"country":"US","zip":"AB"}', '{"country":"NL","zip":"12345"}'],
    ),
    "dependentRequired": (CARD, ["{}", '{"address":"x"}', '{"card":1,"address":"x"}'], ['{"card":1}']),
    "minProperties": (BOTH | {"minProperties": 1}, ['{"a":1,"c":1}', '{"b":1}'], ["{}"]),
    "maxProperties": (OBJECT | {"maxProperties": 1}, ['{"c":1}', "{}"], ['{"a":1,"b":2}']),
    "propertyNames": (OBJECT | {"propertyNames": {"pattern": "^[a-z]$"}}, ['{"a":1}'], ['{"aa":1}']),
    "propertyNames that are listed": (OBJECT | {"propertyNames": {"enum": ["a", "b"]}}, ['{"b":1}', "{}"], ['{"c":1}']),
    "propertyNames that are strings": (OBJECT | {"propertyNames": STRING}, ['{"b":1}'], ["1"]),
    "uniqueItems of one": (ARRAY | {"maxItems": 1, "uniqueItems": True}, ["[]", '["a"]'], ['["a","a"]']),
    "uniqueItems that need not be": (ARRAY | {"uniqueItems": False}, ["[1,1]"], []),
    "an unknown format": (STRING | {"format": "topic"}, ['"x"'], []),
    "a format beside an enum": ({"enum": ["never"], "format": "date"}, ['"never"'], []),
    "unknown keywords": (INTEGER | {"x-guidance": {"lenient": True}, "nullable": True}, ["1"], ["null"]),
    "draft 4 bounds": (DRAFT_4 | INTEGER | {"minimum": 1, "exclusiveMinimum": True}, ["2"], ["1"]),
    "draft 7 ignores what stands beside $ref": (
        DRAFT_7 | ARRAY | {"$defs": {"s": STRING}, "items": SHORT},
        ['["abc"]'],
        ["[1]"],
    ),
    "2020 does not": (ARRAY | {"$defs": {"s": STRING}, "items": SHORT}, ['["a"]'], ['["abc"]']),
    "tuples": (ARRAY | {"items": [INTEGER], "additionalItems": False}, ["[1]", "[]"], ["[1,1]"]),
    "an escaped name is the same name": (
        OBJECT | {"properties": {"a": INTEGER}, "additionalProperties": STRING},
        ['{"a":1,"b":"x"}'],
        ['{"\\u0061":"x"}'],
    ),
    "\\W without foreign letters": (STRING | {"pattern": "^\\W$"}, ['"-"'], ['"é"', '"a"']),
    "a large maximum": (ARRAY | {"maxItems": 10**9, "items": INTEGER}, ["[1]"], []),
    "unevaluatedProperties": (
        OBJECT | {"properties": {"b": {}}, "unevaluatedProperties": False},
        ['{"b":1}', "{}"],
        ['{"c":1}'],
    ),
    "unevaluatedItems behind a list of draft 2019-09": (
        DRAFT_2019 | {"items": [STRING], "unevaluatedItems": False},
        ['["a"]', "[]"],
        ['["a","b"]', "[1]"],
    ),
    "unevaluatedItems behind a list and other items": (
        DRAFT_2019 | {"items": [True], "additionalItems": NULL, "unevaluatedItems": False},
        ["[1,null]"],
        ["[1,1]"],
    ),
    "unevaluatedItems behind prefixItems": (
        ARRAY | {"prefixItems": [STRING], "unevaluatedItems": NULL},
        ['["a",null]'],
        ['["a",1]'],
    ),
    "unevaluatedProperties beside patterns": (
        OBJECT | SOME_PATTERNS | {"unevaluatedProperties": False},
        ['{"a1":1}', "{}"],
        ['{"a1":"x"}', '{"b":1}'],
    ),
    "an identifier where there is no schema": (
        {"enum": [{"$id": "x.json"}], "$defs": {"a": {"$id": "x.json"} | NULL}, "allOf": [OBJECT]},
        ['{"$id":"x.json"}'],
        ["null"],
    ),
    "a branch that matches nothing": ({"anyOf": [False, NULL]}, ["null"], ["1"]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_schema_allows(name: str) -> None:
    schema, good, bad = CASES[name]
    vocabulary = embedded_vocabulary()
    start = matcher_of(vocabulary, LLMatcher.grammar_from_json_schema(prepare_schema(schema, path=PATH)))
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    for text in good:
        assert is_whole(start.deep_copy(), vocabulary.tokenize_str(text)), text
        if name != "tuples":  # which stand in a schema of a later draft
            kind(schema).validate(json.loads(text))
    for text in bad:
        assert not is_whole(start.deep_copy(), vocabulary.tokenize_str(text)), text


LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
DEEP: dict[str, Any] = {}
for _ in range(1000):
    DEEP = {"items": DEEP}
LAUGHS = {f"a{at}": {"allOf": [{"$ref": f"#/$defs/a{at + 1}"}] * 10} for at in range(20)} | {"a20": {"type": "string"}}
REFUSED: dict[str, tuple[Any, str, str]] = {
    "remote reference": ({"$ref": "http://a/b"}, ".$ref", "leaves the schema"),
    "an anchor": ({"$defs": {"a": {"$anchor": "x"}}, "$ref": "#x"}, ".$ref", "only JSON pointers"),
    "an identifier": ({"$defs": {"a": {"$id": "urn:x"}}, "$ref": "urn:x"}, ".$ref", "leaves the schema"),
    "a reference in an identified schema": (
        {"$id": "a", "items": {"$id": "b", "items": {"$ref": "#/$defs/n"}, "$defs": {"n": NULL}}, "$defs": {"n": {}}},
        ".items.items.$ref",
        "identifier of its own",
    ),
    "a reference beside an identifier": ({"items": {"$id": "b", "$ref": "#"}}, ".items.$ref", "identifier of its own"),
    "a reference that is no URI": ({"$ref": "http://["}, ".$ref", "leaves the schema"),
    "contains": ({"contains": True}, ".contains", "'contains' is not supported"),
    "uniqueItems": ({"items": {"enum": [1, 2]}, "uniqueItems": True}, ".uniqueItems", "'uniqueItems' is not supported"),
    "unevaluatedItems beside others": (
        {"allOf": [True], "unevaluatedItems": False},
        ".unevaluatedItems",
        "beside 'allOf'",
    ),
    "unevaluatedProperties beside others": (
        {"properties": {"a": {"$ref": "#", "unevaluatedProperties": False}}},
        ".properties.a.unevaluatedProperties",
        "beside '$ref'",
    ),
    "minProperties": (BOTH | {"minProperties": 2}, ".minProperties", "above 1 is not supported"),
    "maxProperties": (BOTH | {"maxProperties": 1}, ".maxProperties", "beside optional names is not supported"),
    "propertyNames": ({"propertyNames": {"maxLength": 3}}, ".propertyNames", "are not supported"),
    "not a range": ({"items": INTEGER | {"not": {"minimum": 3}}}, ".items.not", "'not' is not supported here"),
    "if of a range": ({"if": {"minimum": 3}, "then": {"multipleOf": 2}}, ".if", "'if' is not supported here"),
    "oneOf of overlapping ranges": (INTEGER | {"oneOf": [{"maximum": 5}, {"minimum": 3}]}, ".oneOf", "distinguished"),
    "reference to nowhere": ({"$ref": "#/$defs/x"}, ".$ref", "leads nowhere"),
    "reference to itself": ({"$ref": "#"}, "", "no JSON value"),
    "references in a circle": (LOOP, "", "no JSON value"),
    "recursion without an end": ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]} | OBJECT, "", "no JSON value"),
    "billion laughs": ({"$defs": LAUGHS, "$ref": "#/$defs/a0"}, "", "expands to"),
    "false": (False, "", "no value"),
    "a number": ("3", "", "object or a boolean"),
    "no JSON": ("{", "", "no JSON"),
    "NaN": ('{"const": NaN}', "", "NaN"),
    "a key that is a number": ({1: {}}, "", "no string"),
    "infinity": ({"minimum": float("inf")}, ".minimum", "finite"),
    "too deep": (DEEP, ".items" * 65, "nested more than"),
    "too deep as text": ("[" * 100_000, "", "no JSON"),
    "too large": ({"enum": ["x" * 300_000]}, "", "bytes"),
    "too large as text": (" " * 300_000, "", "bytes"),
    "too many values": ({"enum": list(range(40_000))}, "", "values"),
    "too many alternatives": ({"enum": list(range(3_000))}, ".enum", "3,000 entries"),
    "too many names": ({"properties": {str(at): {} for at in range(1_001)}}, ".properties", "1,000 names"),
    "half a surrogate": ({"const": "\ud800"}, ".const", "surrogate"),
    "unknown type": ({"properties": {"a": {"type": "float"}}}, ".properties.a.type", "'float' is unknown"),
    "required is no list": ({"required": 5}, ".required", "list of names"),
    **{
        f"some names, required {one!r}": (BOTH | {"minProperties": 1, "required": one}, ".required", "list of names")
        for one in (1, True, "a", {"a": 1})
    },
    "properties is no object": ({"properties": []}, ".properties", "is an object"),
    "a schema is a string": ({"items": "a"}, ".items", "object or a boolean"),
    "empty enum": ({"enum": []}, ".enum", "not empty"),
    "no alternatives": ({"anyOf": []}, ".anyOf", "not empty"),
    "negative length": ({"minLength": -1}, ".minLength", "0 or more"),
    "minItems": ({"minItems": 10**9}, ".minItems", "at most"),
    "minLength": ({"minLength": 10**9}, ".minLength", "at most"),
    "minimum": ({"minimum": "1"}, ".minimum", "is a number"),
    "required but forbidden": (CLOSED | {"required": ["a"]}, "", "no JSON value"),
    "contradicting lengths": (STRING | {"minLength": 2, "maxLength": 1}, "", "no JSON value"),
    "back reference": ({"pattern": "(a)\\1"}, ".pattern", "back reference"),
    "repetitions": ({"pattern": "(a{1,1000}){1,1000}"}, ".pattern", "states"),
    "one repetition": ({"pattern": "a{1,100000}"}, ".pattern", "100000"),
    "open group": ({"patternProperties": {"(a": {}}}, ".patternProperties.(a", "not closed"),
    "draft 3": ({"$schema": "http://json-schema.org/draft-03/schema#"}, ".$schema", "draft 3"),
    "many branches": (
        {"oneOf": [{"properties": {f"k{at}": {}}, "required": [f"k{at}"]} for at in range(400)]},
        "",
        "too many",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_and_how_fast(name: str) -> None:
    schema, place, reason = REFUSED[name]
    with soon(), pytest.raises(InvalidRequestError) as caught:
        prepare_schema(schema, path=PATH)
    assert caught.value.param == PATH + place
    assert str(caught.value).startswith(PATH + place) and reason in str(caught.value)


def test_a_pattern_is_written_for_every_dialect() -> None:
    assert portable_pattern("^[\\w-x]{2}$") == "^[\\w\\-x]{2}$"
    assert portable_pattern("[^\\d]") == "[^\\p{N}]"
    assert portable_pattern("a/{b}") == "a/\\{b\\}"
    for pattern in ("a**", "[", "(", ")", "*", "a{3,2}", "\\", "(?i)a", "\\bword", "[]", "^*"):
        with pytest.raises(PatternError):
            portable_pattern(pattern)


def test_opposites_of_patterns_and_words() -> None:
    assert opposite_pattern("^[ab]*$") == "[^ab\\n]"
    assert opposite_pattern("^a") is None
    assert none_of(["x" * 100]) is None


def test_patterns_that_share_no_string() -> None:
    assert share_no_string(["^a", "^b"])
    assert not share_no_string(["^a", "b$"])
    assert not share_no_string(["(?=a)", "^b"])


def test_a_repetition_that_dialects_read_in_two_ways_is_refused() -> None:
    with pytest.raises(PatternError, match="two ways"):
        portable_pattern("a{,3}")


# ------------------------------------------------------------------------------ left out where a tool is not strict
# Of the parameter "a", or of all: a schema, where and why it is not supported, and valid values that strictness loses.
UNSUPPORTED: dict[str, tuple[dict[str, Any], str, str, list[Any]]] = {
    "uniqueItems": (
        {"a": ARRAY | {"items": STRING, "uniqueItems": True}},
        ".uniqueItems",
        "is not supported",
        [{"a": ["x", "y"]}],
    ),
    "oneOf of equals": (
        {"a": {"oneOf": [OBJECT | {"title": "x"}, OBJECT | {"minProperties": 1}]}},
        ".oneOf",
        "distinguished",
        [{"a": {}}],
    ),
    "a lookahead": ({"a": {"pattern": "^(?=a)b"}}, ".pattern", "lookahead", [{"a": 1}]),
    "an anchor within": ({"a": {"pattern": "a$b"}}, ".pattern", "lookarounds", [{"a": 1}]),
    "an unknown property of characters": ({"a": {"pattern": "\\p{Foo}"}}, ".pattern", "not found", []),
    "contains": (
        {"a": ARRAY | {"contains": {"const": 1}, "maxContains": 1}},
        ".contains",
        "is not supported",
        [{"a": [1]}],
    ),
    "not": ({"a": {"not": {"multipleOf": 2}}}, ".not", "opposite", [{"a": 1}]),
    "a long tuple": (
        {"a": {"prefixItems": [INTEGER] * 501, "items": NULL}},
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
PARAMETERS = "tools[0].function.parameters"


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_strict_tool_is_refused_by_path_and_another_may_be_called_with_more(name: str) -> None:
    schema, place, reason, values = UNSUPPORTED[name]
    if "a" in schema:
        schema, place = {"properties": schema}, f"properties.a{place}"
    parameters = OBJECT | schema
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        prepared_tool(Tool("f", parameters=parameters, strict=True), PARAMETERS)
    assert caught.value.param == f"{PARAMETERS}.{place}"
    tool, (left_out,) = prepared_tool(Tool("f", parameters=parameters), PARAMETERS)
    assert left_out.startswith(f"{PARAMETERS}.{place}")
    start = compile_grammar(BYTES, LLMatcher.grammar_from_json_schema(json.dumps(tool.parameters)))
    for value in values:
        jsonschema.Draft202012Validator(parameters).validate(value)
        assert is_whole(start.deep_copy(), list(json.dumps(value, separators=(",", ":")).encode())), value


@pytest.mark.parametrize(
    "schema", [{"properties": {"a": {"type": "float"}}}, {"required": 1}, {"$ref": "#/$defs/x"}, {"minLength": "a"}]
)
def test_what_is_no_schema_is_refused_always(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        prepared_tool(Tool("f", parameters=schema), PARAMETERS)


def test_supported_schemas_are_not_loosened() -> None:
    schema = OBJECT | {"properties": {"a": {"oneOf": [STRING, NULL]}}}
    left_out: list[str] = []
    assert prepare_schema(schema, path="p", loosened=left_out) == prepare_schema(schema, path="p")
    assert not left_out


def test_what_is_left_out_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    log_loosened.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            log_loosened("f", tuple(f"{PARAMETERS}.{at}: no" for at in range(5)))
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


# -------------------------------------------------------------------------------------------------- random schemas
NAMES = ["a", "b", "é"]
VALUES = [0, 1, 3.5, "", "a", "é", True, None, [], ["a"], {}, {"a": 1}]


def random_schema(chance: random.Random, depth: int) -> Any:
    if depth == 0 or chance.random() < 0.2:
        kinds = ["string", "integer", "number", "boolean", "null", "object", "array"]
        return chance.choice([{"type": chance.choice(kinds)}, {"enum": chance.sample(VALUES, 3)}, {}])

    def inner() -> Any:
        return random_schema(chance, depth - 1)

    schema: dict[str, Any] = {"type": chance.choice(["object", "object", "array", "string", ["integer", "string"]])}
    options: dict[str, Any] = {
        "properties": {name: inner() for name in chance.sample(NAMES, 2)},
        "required": chance.sample(NAMES, 1),
        "additionalProperties": chance.choice([False, inner()]),
        "items": inner(),
        "maxItems": 2,
        "pattern": chance.choice(["^a", "\\W", "^[ab]*$"]),
        "minimum": 1,
        "oneOf": [inner(), inner()],
        "anyOf": [inner(), inner()],
        "allOf": [inner()],
        "not": inner(),
        "if": inner(),
        "then": inner(),
        "dependentRequired": {"a": ["b"]},
        "minProperties": 1,
        "uniqueItems": True,
    }
    return schema | {key: options[key] for key in chance.sample(sorted(options), 5)}


def test_answers_to_random_schemas_are_valid() -> None:
    chance, tokenizer, checked = random.Random(3), embedded_vocabulary(), 0
    ways_out = [tokenizer.tokenize_str(text) for text in ('"', "}", "]")]
    for _ in range(100):
        schema = random_schema(chance, 2)
        with contextlib.suppress(InvalidRequestError):
            grammar = LLMatcher.grammar_from_json_schema(prepare_schema(schema, path=PATH))
            token_ids, has_ended = walk(tokenizer, compile_grammar(tokenizer, grammar), chance, ways_out, most=40)
            if has_ended:
                checked += 1
                answer = json.loads(tokenizer.decode_bytes(token_ids))
                jsonschema.Draft202012Validator(schema).validate(answer)
    assert checked > 20
