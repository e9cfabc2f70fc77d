"""Schemas for the grammar: what they allow after rewriting, what is refused, and how fast."""

from __future__ import annotations

import contextlib
import json
import random
import time
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from headway.errors import InvalidRequestError
from headway.loader import open_checkpoint
from headway.loader.embedded import embedded_model_path
from headway.structured.compile_grammar import LIMITS
from headway.structured.json_pattern import PatternError, none_of, opposite_pattern, portable_pattern
from headway.structured.json_schema import prepare_schema
from tests.attacks.structured_inputs import hostile_schemas

PATH = "response_format.json_schema.schema"


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    text = open_checkpoint(embedded_model_path()).tokenizer()
    return LLTokenizer(text.backend.to_str(), eos_token=list(text.eos_token_ids))


def matcher_of(tokenizer: LLTokenizer, schema: Any) -> LLMatcher:
    grammar = LLMatcher.grammar_from_json_schema(prepare_schema(schema, path=PATH))
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def allows(tokenizer: LLTokenizer, schema: Any, text: str) -> bool:
    matcher = matcher_of(tokenizer, schema)
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def refusal(schema: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        prepare_schema(schema, path=PATH)
    assert caught.value.param is not None and str(caught.value).startswith(caught.value.param)
    return caught.value


SHAPE = {
    "type": "object",
    "properties": {name: {"type": "number"} for name in ("radius", "length", "width")},
    "oneOf": [{"required": ["radius"]}, {"required": ["length", "width"]}],
}
PETS = {
    "oneOf": [
        {
            "type": "object",
            "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}},
            "required": ["kind"],
        },
        {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]},
        {"type": "null"},
    ]
}
TREE = {
    "$ref": "#/$defs/n",
    "$defs": {"n": {"oneOf": [{"type": "array", "items": {"$ref": "#/$defs/n"}}, {"const": 1}]}},
}
CARD = {
    "type": "object",
    "properties": {"card": {"type": "integer"}, "address": {"type": "string"}},
    "additionalProperties": False,
    "dependentRequired": {"card": ["address"]},
}
PLACE = {
    "type": "object",
    "properties": {"country": {"enum": ["US", "NL"]}, "zip": {"type": "string"}},
    "required": ["country", "zip"],
    "additionalProperties": False,
    "if": {"properties": {"country": {"const": "US"}}},
    "then": {"properties": {"zip": {"pattern": "^[0-9]{5}$"}}},
    "else": {"properties": {"zip": {"pattern": "^[A-Z]{2}$"}}},
}
DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_2019 = "https://json-schema.org/draft/2019-09/schema"
BOTH = {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "additionalProperties": False}
CASES: dict[str, tuple[Any, list[str], list[str]]] = {
    "anything": (True, ["1", '{"a":[]}'], []),
    "oneOf by types": ({"oneOf": [{"type": "string"}, {"type": "null"}]}, ['"a"', "null"], ["1"]),
    "oneOf by required names": (
        SHAPE,
        ['{"radius":1}', '{"length":1,"width":2}'],
        ['{"length":1}', '{"length":1,"radius":1,"width":2}'],
    ),
    "oneOf by a constant": (PETS, ['{"kind":"cat","lives":9}', '{"kind":"dog"}', "null"], ['{"lives":9}']),
    "oneOf that recurs": (TREE, ["1", "[1,[1,[]]]"], ["2"]),
    "oneOf of a value and its type": ({"oneOf": [{"type": "string"}, {"enum": ["a", 1]}]}, ['"b"', "1"], ['"a"']),
    "oneOf of overlapping ranges": (
        {"type": "integer", "oneOf": [{"maximum": 5}, {"minimum": 3}]},
        ["2", "6"],
        ["3", "4", "5"],
    ),
    "oneOf with a shared type": (
        {"oneOf": [{"type": ["string", "null"]}, {"type": ["integer", "null"]}]},
        ['"a"', "1"],
        ["null"],
    ),
    "oneOf by patterns": (
        {"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^b"}]},
        ['"a"', '"b"'],
        ['"c"'],
    ),
    "not required": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "not": {"required": ["a"]}},
        ["{}", '{"b":1}'],
        ['{"a":1}'],
    ),
    "not enum": ({"type": "string", "not": {"enum": ["no", "none"]}}, ['"non"', '"yes"', '""'], ['"no"', '"none"']),
    "not type": ({"not": {"type": "string"}}, ["1", "[]"], ['"a"']),
    "not a pattern": ({"type": "string", "not": {"pattern": "^[ .]+$"}}, ['"a"', '". a"'], ['". ."', '" \\n"']),
    "not a range": ({"type": "integer", "not": {"minimum": 3}}, ["2"], ["3"]),
    "if": (
        PLACE,
        ['{"country":"US","zip":"12345"}', '{"country":"NL","zip":"AB"}'],
        ['{"country":"US","zip":"AB"}', '{"country":"NL","zip":"12345"}'],
    ),
    "dependentRequired": (CARD, ["{}", '{"address":"x"}', '{"card":1,"address":"x"}'], ['{"card":1}']),
    "minProperties": (BOTH | {"minProperties": 2}, ['{"a":1,"c":1}'], ['{"a":1}', "{}"]),
    "maxProperties": (BOTH | {"maxProperties": 1}, ['{"c":1}', "{}"], ['{"a":1,"b":2}']),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^[a-z]$"}}, ['{"a":1}'], ['{"aa":1}']),
    "uniqueItems": (
        {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True},
        ["[]", '["a","c"]'],
        ['["a","a"]'],
    ),
    "contains": ({"type": "array", "contains": {"const": 1}}, ["[1,2]"], ["[]", "[2]"]),
    "an unknown format": ({"type": "string", "format": "topic"}, ['"x"'], []),
    "a format beside an enum": ({"enum": ["never"], "format": "date"}, ['"never"'], []),
    "unknown keywords": ({"type": "integer", "x-guidance": {"lenient": True}, "nullable": True}, ["1"], ["null"]),
    "draft 4 bounds": (
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "type": "integer",
            "minimum": 1,
            "exclusiveMinimum": True,
        },
        ["2"],
        ["1"],
    ),
    "draft 7 ignores what stands beside $ref": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {"s": {"type": "string"}},
            "items": {"$ref": "#/definitions/s", "maxLength": 1},
            "type": "array",
        },
        ['["abc"]'],
        ["[1]"],
    ),
    "2020 does not": (
        {"$defs": {"s": {"type": "string"}}, "items": {"$ref": "#/$defs/s", "maxLength": 1}, "type": "array"},
        ['["a"]'],
        ['["abc"]'],
    ),
    "tuples": ({"type": "array", "items": [{"type": "integer"}], "additionalItems": False}, ["[1]", "[]"], ["[1,1]"]),
    "an escaped name is the same name": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
        ['{"a":1,"b":"x"}'],
        ['{"\\u0061":"x"}'],
    ),
    "\\W without foreign letters": ({"type": "string", "pattern": "^\\W$"}, ['"-"'], ['"é"', '"a"']),
    "a large maximum": ({"type": "array", "maxItems": 10**9, "items": {"type": "integer"}}, ["[1]"], []),
    "unevaluatedProperties": (
        {
            "type": "object",
            "allOf": [{"properties": {"a": {}}}],
            "properties": {"b": {}},
            "unevaluatedProperties": False,
        },
        ['{"a":1,"b":1}', '{"b":1}'],
        ['{"c":1}'],
    ),
    "unevaluatedItems behind a list of draft 2019-09": (
        {"$schema": DRAFT_2019, "items": [{"type": "string"}], "unevaluatedItems": False},
        ['["a"]', "[]"],
        ['["a","b"]', "[1]"],
    ),
    "unevaluatedItems behind a list and other items": (
        {"$schema": DRAFT_2019, "items": [True], "additionalItems": {"type": "null"}, "unevaluatedItems": False},
        ["[1,null]"],
        ["[1,1]"],
    ),
    "unevaluatedItems behind prefixItems": (
        {"type": "array", "prefixItems": [{"type": "string"}], "unevaluatedItems": {"type": "null"}},
        ['["a",null]'],
        ['["a",1]'],
    ),
    "unevaluatedProperties beside patterns": (
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "unevaluatedProperties": False},
        ['{"a1":1}', "{}"],
        ['{"a1":"x"}', '{"b":1}'],
    ),
    "unevaluatedProperties beside patterns of a part": (
        {
            "type": "object",
            "unevaluatedProperties": False,
            "$ref": "#/$defs/a",
            "$defs": {"a": {"patternProperties": {"^a": {"type": "integer"}}}},
            "properties": {"b": {}},
        },
        ['{"b":0,"a1":1}', '{"b":0}'],
        ['{"a1":"x"}', '{"c":1}'],
    ),
    "unevaluatedProperties beside a part that takes all": (
        {"type": "object", "allOf": [{"additionalProperties": {"type": "null"}}], "unevaluatedProperties": False},
        ['{"b":null}'],
        ['{"b":1}'],
    ),
    "an anchor": (
        {"$defs": {"a": {"$anchor": "x", "type": "null"}}, "items": {"$ref": "#x"}, "type": "array"},
        ["[null]"],
        ["[1]"],
    ),
    "an anchor of draft 7": (
        {
            "$schema": DRAFT_7,
            "definitions": {"a": {"$id": "#x", "type": "null"}},
            "items": {"$ref": "#x"},
            "type": "array",
        },
        ["[null]"],
        ["[1]"],
    ),
    "an identifier of draft 4": (
        {
            "$schema": DRAFT_4,
            "definitions": {"a": {"id": "x.json", "type": "null"}},
            "items": {"$ref": "x.json"},
            "type": "array",
        },
        ["[null]"],
        ["[1]"],
    ),
    "a URN": (
        {
            "$id": "urn:a:b",
            "$defs": {"a": {"$id": "urn:x:1", "type": "null"}},
            "items": {"$ref": "urn:x:1"},
            "type": "array",
        },
        ["[null]"],
        ["[1]"],
    ),
    "its own identifier": (
        {
            "$id": "http://a/b.json",
            "type": "array",
            "items": {"$ref": "http://a/b.json#/$defs/n"},
            "$defs": {"n": {"type": "null"}},
        },
        ["[null]"],
        ["[1]"],
    ),
    "an identifier within an identifier": (
        {
            "$id": "http://a/root.json",
            "type": "array",
            "items": {"$ref": "folder/item.json"},
            "$defs": {
                "item": {
                    "$id": "folder/item.json",
                    "anyOf": [{"$ref": "#/$defs/n"}, {"$ref": "other.json#it"}],
                    "$defs": {
                        "n": {"const": 1},
                        "o": {"$id": "other.json", "$defs": {"i": {"$anchor": "it", "const": 2}}},
                    },
                },
                "n": {"const": 3},
            },
        },
        ["[1,2]"],
        ["[3]"],
    ),
    "a reference that starts at a branch's own identifier": (
        {
            "$defs": {"n": {"type": "string"}},
            "oneOf": [
                {"$id": "a.json", "$defs": {"n": {"type": "null"}}, "allOf": [{"$ref": "#/$defs/n"}]},
                {"type": "string"},
            ],
        },
        ["null", '"a"'],
        ["1"],
    ),
    "an identifier where there is no schema": (
        {"enum": [{"$id": "x.json"}], "$defs": {"a": {"$id": "x.json", "type": "null"}}, "allOf": [{"type": "object"}]},
        ['{"$id":"x.json"}'],
        ["null"],
    ),
    "a branch that matches nothing": ({"anyOf": [False, {"type": "null"}]}, ["null"], ["1"]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_schema_allows(tokenizer: LLTokenizer, name: str) -> None:
    schema, good, bad = CASES[name]
    for text in good:
        assert allows(tokenizer, schema, text), text
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        if name != "tuples":  # which stand in a schema of a later draft
            kind(schema).validate(json.loads(text))
    for text in bad:
        assert not allows(tokenizer, schema, text), text


LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
DEEP: dict[str, Any] = {}
for _ in range(1000):
    DEEP = {"items": DEEP}
LAUGHS = {f"a{at}": {"allOf": [{"$ref": f"#/$defs/a{at + 1}"}] * 10} for at in range(20)} | {"a20": {"type": "string"}}
REFUSED: dict[str, tuple[Any, str, str]] = {
    "remote reference": ({"$ref": "http://a/b"}, ".$ref", "leaves the schema"),
    "an anchor to nowhere": ({"$ref": "#x"}, ".$ref", "leads nowhere"),
    "one anchor twice": ({"$defs": {one: {"$anchor": "x"} for one in "ab"}, "$ref": "#x"}, ".$ref", "several"),
    "one identifier twice": ({"$defs": {one: {"$id": "urn:x"} for one in "ab"}, "$ref": "urn:x"}, ".$ref", "several"),
    "a reference that is no URI": ({"$ref": "http://["}, ".$ref", "leaves the schema"),
    "unevaluatedItems beside contains": ({"contains": True, "unevaluatedItems": False}, ".unevaluatedItems", "beside"),
    "reference to nowhere": ({"$ref": "#/$defs/x"}, ".$ref", "leads nowhere"),
    "reference to itself": ({"$ref": "#"}, "", "no JSON value"),
    "references in a circle": (LOOP, "", "no JSON value"),
    "recursion without an end": (
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        "",
        "no JSON value",
    ),
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
    "properties is no object": ({"properties": []}, ".properties", "is an object"),
    "a schema is a string": ({"items": "a"}, ".items", "object or a boolean"),
    "empty enum": ({"enum": []}, ".enum", "not empty"),
    "no alternatives": ({"anyOf": []}, ".anyOf", "not empty"),
    "negative length": ({"minLength": -1}, ".minLength", "0 or more"),
    "minItems": ({"minItems": 10**9}, ".minItems", "at most"),
    "minLength": ({"minLength": 10**9}, ".minLength", "at most"),
    "minimum": ({"minimum": "1"}, ".minimum", "is a number"),
    "required but forbidden": (
        {"type": "object", "required": ["a"], "additionalProperties": False},
        "",
        "no JSON value",
    ),
    "contradicting lengths": ({"type": "string", "minLength": 2, "maxLength": 1}, "", "no JSON value"),
    "large constant": ({"const": 2**53 + 1}, ".const", "2^53"),
    "lookahead": ({"pattern": "^(?=a)b"}, ".pattern", "lookahead"),
    "back reference": ({"pattern": "(a)\\1"}, ".pattern", "back reference"),
    "repetitions": ({"pattern": "(a{1,1000}){1,1000}"}, ".pattern", "states"),
    "one repetition": ({"pattern": "a{1,100000}"}, ".pattern", "100000"),
    "open group": ({"patternProperties": {"(a": {}}}, ".patternProperties.(a", "not closed"),
    "oneOf of equals": (
        {"properties": {"a": {"oneOf": [{"type": "object", "title": "x"}, {"type": "object", "minProperties": 1}]}}},
        ".properties.a.oneOf",
        "told apart",
    ),
    "uniqueItems over strings": (
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        ".uniqueItems",
        "listed values",
    ),
    "not without an opposite": ({"not": {"multipleOf": 2}}, ".not", "opposite"),
    "dynamic reference": ({"$dynamicRef": "#a"}, ".$dynamicRef", "not supported"),
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
    start = time.process_time()
    error = refusal(schema)
    assert time.process_time() - start < 1
    assert error.param == PATH + place
    assert reason in str(error)


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


def walk(tokenizer: LLTokenizer, matcher: LLMatcher, chance: random.Random) -> str | None:
    tokens: list[int] = []
    for _ in range(40):
        if matcher.is_accepting() and (matcher.is_stopped() or chance.random() < 0.5):
            return tokenizer.decode_bytes(tokens).decode()
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        bits[tokenizer.eos_tokens] = 0
        allowed = np.flatnonzero(bits)
        closing = [one for one in map(int, allowed[:100]) if tokenizer.decode_bytes([one])[:1] in (b'"', b"}", b"]")]
        tokens.append(chance.choice(closing) if closing else int(allowed[chance.randrange(len(allowed))]))
        assert matcher.consume_token(tokens[-1]), matcher.get_error()
    return None


def test_answers_to_random_schemas_are_valid(tokenizer: LLTokenizer) -> None:
    chance = random.Random(3)
    checked = 0
    for _ in range(100):
        schema = random_schema(chance, 2)
        try:
            prepared = prepare_schema(schema, path=PATH)
        except InvalidRequestError:
            continue
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(prepared), log_level=0, limits=LIMITS)
        if matcher.is_error():
            continue
        answer = walk(tokenizer, matcher, chance)
        if answer is not None:
            checked += 1
            jsonschema.Draft202012Validator(schema).validate(json.loads(answer))
    assert checked > 20


@pytest.mark.parametrize(("name", "schema"), hostile_schemas(), ids=[name for name, _ in hostile_schemas()])
def test_hostile_schemas_are_answered_at_once(name: str, schema: Any) -> None:
    start = time.process_time()
    with contextlib.suppress(InvalidRequestError):
        prepare_schema(schema, path=PATH)
    assert time.process_time() - start < 1


def test_required_that_is_no_list_is_refused_beside_min_properties() -> None:
    for required in (1, True, "a", {"a": 1}):
        with pytest.raises(InvalidRequestError, match="required"):
            prepare_schema({"minProperties": 1, "properties": {"a": {}}, "required": required}, path="schema")
