"""Patterns of clients on values of clients: certain answers are right, and no pattern takes long."""

from __future__ import annotations

import re

import pytest

from headway.structured.json_pattern import PatternError, portable_pattern
from headway.structured.json_schema import prepare_schema
from headway.structured.pattern_matching import MAX_MATCHED_CHARS, PatternMatching
from tests.unit.structured.matching import soon

VALUES = ["", "a", "b", "ab", "aab", "a1", "1", "-", "a b", '"', "\\", "a/b", "AB", "[x]", "a.b"]
PATTERNS = [
    *("a", "^a", "b$", "^a|b$", "^[a-z]+$", "^\\w\\d$", "\\W", "[^\\w]", "^$", "\\s", "^(a|b)*$", "a{2}", "^.{1,2}$"),
    *("\\\\", '"', "/", "[A-Z]", "^\\[", "\\.", "(?:a)(?<n>b)", "x*", "a+?b"),
]
BACKTRACKING = [
    *("^(((((((a+)+)+)+)+)+)+)+$", "^(a|a|a|a)*$", "^(a*)*$", "^(a|aa)+$", "(.*a){12}$", "^((a{1,4}){1,4}){1,4}$"),
    *("(a|b|ab)*c$", "^(\\w+\\s?)*$"),
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_what_they_match_elsewhere(pattern: str) -> None:
    matching = PatternMatching()
    readable = pattern.replace("(?<n>", "(?P<n>")
    assert {value for value in VALUES if matching.may_match(pattern, value)} == {
        value for value in VALUES if re.search(readable, value)
    }


@pytest.mark.parametrize(
    ("pattern", "value"),
    [
        ("^a$", "a\n"),
        ("^.$", "\r"),
        ("^\\w$", "é"),
        ("^a$", "b" * (MAX_MATCHED_CHARS + 1)),
        ("(?=a)b", "c"),
        ("(", "c"),
    ],
)
def test_where_dialects_differ_nothing_is_certain(pattern: str, value: str) -> None:
    assert PatternMatching().may_match(pattern, value)


@pytest.mark.parametrize("pattern", BACKTRACKING)
def test_no_pattern_takes_long(pattern: str) -> None:
    values = ["a" * length + "-" for length in (11, 12, 40, 250)]
    schema = {"oneOf": [{"type": "string", "pattern": pattern}, {"enum": values}]}
    with soon(0.5):
        prepare_schema(schema, path="schema")
    matching = PatternMatching()
    assert not any(matching.may_match(pattern, value) for value in values)


def test_patterns_that_share_no_string() -> None:
    matching = PatternMatching()
    assert matching.apart(["^a", "^b"])
    assert not matching.apart(["^a", "b$"])
    assert not matching.apart(["(?=a)", "^b"])


def test_a_repetition_that_dialects_read_in_two_ways_is_refused() -> None:
    with pytest.raises(PatternError, match="two ways"):
        portable_pattern("a{,3}")
