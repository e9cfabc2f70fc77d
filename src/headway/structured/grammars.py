"""From `StructuredOutputsParams` to the text of a grammar, as llguidance compiles it. Pure: needs no tokenizer.

Everything that bounds the work of compiling is checked here, so it runs wherever a request comes in (the server's
threads, a caller's thread), and the engine gets only what it can compile quickly.
"""

from __future__ import annotations

import json
from typing import Any

from headway.errors import InvalidRequestError
from headway.sampling_params import StructuredOutputsParams
from headway.structured.json_schema import prepare_schema

MAX_GRAMMAR_CHARS = 256 * 1024
MAX_REGEX_CHARS = 8 * 1024
MAX_CHOICES = 4096
MAX_CHOICE_CHARS = 64 * 1024

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""Between the tokens of JSON. Bounded: a small model that has begun with white space may never stop."""


def grammar_of(structured: StructuredOutputsParams) -> str:
    """The grammar of an answer. Raises `InvalidRequestError` that names the field, or the place in a schema."""
    if structured.json is not None:
        return json_grammar(prepare_schema(_text(structured.json), path="structured_outputs.json"), structured)
    if structured.json_object:
        return json_grammar('{"type":"object"}', structured)
    if structured.choice is not None:
        return choice_grammar(structured.choice)
    if structured.regex is not None:
        return _regex_grammar(structured.regex)
    assert structured.grammar is not None
    return _lark(structured.grammar)


def json_grammar(schema: str, structured: StructuredOutputsParams | None = None) -> str:
    """The grammar of a schema that `prepare_schema` has checked."""
    from llguidance import LLMatcher  # 0.1 s to import: only where it is used

    options: dict[str, Any] = {"whitespace_pattern": WHITESPACE}
    if structured is not None and structured.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    elif structured is not None and structured.whitespace_pattern is not None:
        _check_length("whitespace_pattern", structured.whitespace_pattern, MAX_REGEX_CHARS)
        options = {"whitespace_pattern": structured.whitespace_pattern}
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]


def choice_grammar(choices: Any) -> str:
    """One of several texts."""
    _check_length("choice", choices, MAX_CHOICES, unit="texts")
    if sum(map(len, choices)) > MAX_CHOICE_CHARS:
        raise _too_long("choice", MAX_CHOICE_CHARS, "characters together")
    return "%llguidance {}\nstart: " + " | ".join(json.dumps(text) for text in dict.fromkeys(choices))


def _regex_grammar(regex: str) -> str:
    from llguidance import LLMatcher

    _check_length("regex", regex, MAX_REGEX_CHARS)
    return LLMatcher.grammar_from_regex(regex)


def _lark(grammar: str) -> str:
    """Lark as it is, GBNF and EBNF translated."""
    from llguidance.gbnf_to_lark import any_to_lark

    _check_length("grammar", grammar, MAX_GRAMMAR_CHARS)
    if grammar.lstrip().startswith("{"):
        raise InvalidRequestError(
            "structured_outputs.grammar must be Lark, GBNF or EBNF; a JSON schema goes into 'json'",
            param="structured_outputs.grammar",
        )
    try:
        return any_to_lark(grammar)
    except Exception as error:
        raise InvalidRequestError(
            f"structured_outputs.grammar cannot be read: {str(error)[:300]}", param="structured_outputs.grammar"
        ) from None


def _text(schema: Any) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)


def _check_length(name: str, value: Any, most: int, *, unit: str = "characters") -> None:
    if len(value) > most:
        raise _too_long(name, most, unit)


def _too_long(name: str, most: int, unit: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"structured_outputs.{name} may have at most {most} {unit}", f"structured_outputs.{name}"
    )
