"""From what a request asks for to a grammar's text: what is refused before any work, and what the text says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from headway.errors import InvalidRequestError
from headway.sampling_params import StructuredOutputsParams
from headway.structured.grammars import (
    MAX_CHOICE_CHARS,
    MAX_CHOICES,
    MAX_GRAMMAR_CHARS,
    MAX_REGEX_CHARS,
    check_bounds,
    grammar_of,
    inline_grammar,
)
from headway.structured.json_schema import MAX_SCHEMA_BYTES
from tests.unit.structured.matching import BYTES, is_whole, matcher_of

OUT_OF_BOUNDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a long regex": ("regex", {"regex": "a" * (MAX_REGEX_CHARS + 1)}, "at most 8192 characters"),
    "a long grammar": ("grammar", {"grammar": "a" * (MAX_GRAMMAR_CHARS + 1)}, "at most"),
    "a long schema": ("json", {"json": " " * (MAX_SCHEMA_BYTES + 1)}, "at most"),
    "many choices": ("choice", {"choice": ["a"] * (MAX_CHOICES + 1)}, "at most 4096 texts"),
    "long choices": ("choice", {"choice": ["a" * MAX_CHOICE_CHARS, "b"]}, "characters together"),
    "a long pattern": ("whitespace_pattern", {"json": {}, "whitespace_pattern": " " * 9_000}, "at most"),
    "half a pair in a regex": ("regex", {"regex": "\ud800"}, "surrogate"),
    "half a pair in a grammar": ("grammar", {"grammar": 'start: "\udc00"'}, "surrogate"),
    "half a pair in a schema": ("json", {"json": '{"const":"\ud800"}'}, "surrogate"),
    "half a pair in a choice": ("choice", {"choice": ["a", "\ud800", "\udc00"]}, "surrogate"),
    "half a pair in a pattern": ("whitespace_pattern", {"json": {}, "whitespace_pattern": "\ud800"}, "surrogate"),
}


@pytest.mark.parametrize("name", OUT_OF_BOUNDS)
def test_what_is_out_of_bounds_is_refused_before_any_work(name: str) -> None:
    field, values, reason = OUT_OF_BOUNDS[name]
    structured = StructuredOutputsParams(**values)
    for refuse in (check_bounds, grammar_of):
        with pytest.raises(InvalidRequestError, match=reason) as caught:
            refuse(structured)
        assert caught.value.param == f"structured_outputs.{field}"


@pytest.mark.parametrize(
    "values",
    [
        {"json": {"type": "null"}},
        {"json_object": True},
        {"json_object": True, "whitespace_pattern": " "},
        {"choice": ["a", "b"]},
        {"regex": "a/b|c"},
        {"grammar": 'start: "a"'},
        {"grammar": '%llguidance {}\nstart: "a"'},
        {"grammar": 'root ::= "a"'},
    ],
    ids=str,
)
def test_each_grammar_may_stand_inside_another(values: dict[str, Any]) -> None:
    inner = inline_grammar(grammar_of(StructuredOutputsParams(**values)))
    assert not LLMatcher.validate_grammar(f'start: "(" inner ")"\ninner: {inner}\n')


NESTED = {"a": [1, {"b": [[{"c": {"d": []}}]]}], "e": {}}


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        *((json.dumps(NESTED, indent=indent), True) for indent in (None, 0, 2, 4, "\t")),
        (json.dumps(NESTED, separators=(",", ":")), True),
        (json.dumps(NESTED, indent=2).replace("\n", "\r\n"), True),
        ('{\n\n  "a": 1\n\n}', True),
        ('{ "a" : 1 }', True),
        ('{"a":  1}', False),
        ('{"a":\n\n\n1}', False),
        ('{"a":\n' + " " * 33 + "1}", False),
    ],
)
def test_blanks_in_json_are_those_that_models_write(text: str, is_allowed: bool) -> None:
    grammar = grammar_of(StructuredOutputsParams(json={"type": "object"}))
    assert is_whole(matcher_of(BYTES, grammar), list(text.encode())) is is_allowed


def test_a_pattern_of_ones_own_says_which_blanks_there_are() -> None:
    grammar = grammar_of(StructuredOutputsParams(json={"type": "object"}, whitespace_pattern=r"\x20{3}"))
    assert is_whole(matcher_of(BYTES, grammar), list(b"{   }"))
