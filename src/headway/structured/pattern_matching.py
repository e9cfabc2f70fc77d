"""What the patterns of a schema match, told by the automata that write the answers: their time is linear.

A pattern comes from a client, and so does the value that it is tried on. A matcher that backtracks, such as Python's,
could be kept busy for ever by a dozen characters.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from headway.structured.compiler_errors import plain_reason
from headway.structured.json_pattern import PatternError, portable_pattern

MAX_MATCHED_CHARS = 256
_CLASS_WORK = 5
_WIDE_CLASS = re.compile(r"\\[pPWDS]")
_LIMITS = LLParserLimits(initial_lexer_fuel=50_000, step_lexer_fuel=50_000, max_lexer_states=5_000)


def work_of(pattern: str) -> int:
    """Return what compiling a pattern takes, in simple patterns: a class of Unicode takes 0.6 ms."""
    return 1 + _CLASS_WORK * len(_WIDE_CLASS.findall(pattern))


class PatternMatching:
    """Answers about the patterns of one schema; each is compiled once."""

    def __init__(self) -> None:
        self._starts: dict[str, LLMatcher | None] = {}

    def knows(self, pattern: str) -> bool:
        """Whether a pattern has been compiled."""
        return pattern in self._starts

    def may_match(self, pattern: str, value: str) -> bool:
        """Whether a pattern may be found in a string, whichever dialect it is read in: False is certain."""
        # Dialects agree about printable ASCII: elsewhere they differ in what `\\w`, `.` and `$` match.
        if len(value) > MAX_MATCHED_CHARS or not (value.isascii() and value.isprintable()):
            return True
        if pattern not in self._starts:
            self._starts[pattern] = self._start(pattern)
        start = self._starts[pattern]
        if start is None:
            return True
        text = json.dumps(value).encode()
        matcher = start.deep_copy()
        num_read = matcher.try_consume_tokens(list(text))
        return matcher.is_error() or (num_read == len(text) and matcher.is_accepting())

    def apart(self, patterns: Iterable[str]) -> bool:
        """Whether no string matches all of these patterns: True is certain."""
        try:
            parts = [_strings(pattern) for pattern in dict.fromkeys(patterns)]
        except PatternError:
            return False
        grammar = LLMatcher.grammar_from_json_schema(json.dumps({"allOf": parts}))
        return LLMatcher.validate_grammar(grammar, limits=_LIMITS).startswith("Unsatisfiable schema")

    def _start(self, pattern: str) -> LLMatcher | None:
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(_strings(pattern)))
        except PatternError:
            return None
        matcher = LLMatcher(_bytes(), grammar, log_level=0, limits=_LIMITS)
        return None if matcher.is_error() else matcher


def compiler_fault(schema: dict[str, Any]) -> str | None:
    """Return what the grammar compiler has against a small schema; None if it takes it."""
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return plain_reason(LLMatcher.validate_grammar(grammar, limits=_LIMITS)) or None


@functools.cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


def _strings(pattern: str) -> dict[str, str]:
    return {"type": "string", "pattern": portable_pattern(pattern)}
