"""Grammars as clients write them: what they mean as Lark."""

from __future__ import annotations

import pytest
from llguidance.gbnf_to_lark import gbnf_to_lark

from headway.structured.notations import (
    MAX_TRANSLATED_CHARS,
    NotationError,
    as_lark,
    num_intersections,
    regex_in_lark,
)
from tests.unit.structured.matching import BYTES, is_whole, matcher_of

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
