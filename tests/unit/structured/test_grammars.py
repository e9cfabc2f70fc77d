"""From what a request asks for to a grammar's text: what is refused before any work, what the text says, and
what grammars as clients write them mean as Lark."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

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
from headway.structured.notations import (
    MAX_TRANSLATED_CHARS,
    NotationError,
    as_lark,
    num_intersections,
    regex_in_lark,
)
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


# --------------------------------------------------------------------------------------- as clients write grammars
LIST = """# a list
root ::= item+ fooBar
item ::= "- " [^\\r\\n\\x0b]+ ws # with a comment
ws ::= [ \\t\\n]*
fooBar ::= (ws "x" | "y"{2,3}) expr
expr ::= "(" expr ")" |
  digit-1 | loose
digit-1 ::= [0-9]
loose ::= root
"""


def rules(lark: str) -> list[str]:
    return [line for line in lark.splitlines() if line]


def test_gbnf_is_translated_as_llguidance_does() -> None:
    assert rules(as_lark(LIST)) == rules(gbnf_to_lark(LIST))


@pytest.mark.parametrize("lark", ['start: "a"', '  start : "a"', '%llguidance {}\nstart: "a"', 'x: "a"\n\n start: x'])
def test_lark_is_left_as_it_is(lark: str) -> None:
    assert as_lark(lark) == lark


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("root ::= a", "'a' not found"),
        ('item ::= "a"', "No 'root'"),
        ("root ::= " + "(" * 5_000, "nested too deeply"),
        ("# \n" * MAX_TRANSLATED_CHARS, "at most 65,536 characters"),
        ('root ::= "a', "end of input"),
    ],
)
def test_what_cannot_be_translated(grammar: str, reason: str) -> None:
    with pytest.raises(NotationError, match=reason):
        as_lark(grammar)


@pytest.mark.parametrize(
    ("lark", "number"),
    [
        ("A: /a/ & /b/ & /c/", 2),
        ('A: "&" & "\\"&" # & "\n// &\nB: /&\\/&/', 1),
        ("# /\nA: /a/ & /b/", 1),
        ("A: /a\n&/ & /b/", 1),
        ('A: "&', 0),
        ('A: "\n& B', 1),
    ],
)
def test_intersections_are_counted_outside_of_texts(lark: str, number: int) -> None:
    assert num_intersections(lark) == number


@pytest.mark.parametrize(
    ("regex", "text"),
    [("a/b", "a/b"), ("a\\/b", "a/b"), ("[/]", "/"), ("\\\\/", "\\/"), ("a\nb", "a\nb"), ("\\\n", "\n")],
)
def test_a_regex_between_slashes_means_the_same(regex: str, text: str) -> None:
    assert is_whole(matcher_of(BYTES, f"start: /{regex_in_lark(regex)}/"), list(text.encode()))


def test_a_regex_that_ends_with_a_backslash_is_refused() -> None:
    assert regex_in_lark("a\\\\") == "a\\\\"
    with pytest.raises(NotationError, match="backslash"):
        regex_in_lark("a\\")
