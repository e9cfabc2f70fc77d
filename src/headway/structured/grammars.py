"""Turns `StructuredOutputsParams` into the text of a grammar for llguidance. Pure: needs no tokenizer.

Everything that bounds the work of compiling is checked here, so it runs wherever a request comes in (the server's
threads, a caller's thread), and the engine gets only what it can compile quickly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from headway.errors import InvalidRequestError
from headway.sampling_params import StructuredOutputsParams
from headway.structured.json_schema import MAX_SCHEMA_BYTES, prepare_schema
from headway.structured.notations import NotationError, as_lark, num_intersections, regex_in_lark

OWN_GRAMMAR = "%llguidance {}\n"
"""The beginning of grammars that Headway writes; grammars from requests never begin so."""
MAX_GRAMMAR_CHARS = 256 * 1024
MAX_REGEX_CHARS = 8 * 1024
MAX_CHOICES = 4096
MAX_CHOICE_CHARS = 64 * 1024
MAX_INTERSECTIONS = 4
"""The most `&` operators in a grammar. With up to five regexes at once llguidance's limits hold, and a step takes some
30 ms at most; with twenty it takes seconds, and with thirty it may never end."""

WHITESPACE = r"\x20|(\r?\n){1,2}(\x20{0,32}|\x09{1,8})"
"""Between the tokens of JSON, what models write there: a space, or an indented line, perhaps behind an empty one. Where
more is allowed, a small model at temperature 1 wastes a quarter of a short answer's tokens."""


_MAX_CHARS = {
    "json": MAX_SCHEMA_BYTES,
    "regex": MAX_REGEX_CHARS,
    "grammar": MAX_GRAMMAR_CHARS,
    "whitespace_pattern": MAX_REGEX_CHARS,
}


def check_bounds(structured: StructuredOutputsParams) -> None:
    """Refuse fields that are too long or are not text. This must run before the fields are read or rewritten."""
    for name, most in _MAX_CHARS.items():
        text = getattr(structured, name)
        if text is not None:
            if len(text) > most:
                raise _too_long(name, most, "characters")
            _check_text(name, text)
    choices = structured.choice or ()
    if len(choices) > MAX_CHOICES:
        raise _too_long("choice", MAX_CHOICES, "texts")
    if sum(map(len, choices)) > MAX_CHOICE_CHARS:
        raise _too_long("choice", MAX_CHOICE_CHARS, "characters together")
    _check_text("choice", "\n".join(choices))


def grammar_of(structured: StructuredOutputsParams) -> str:
    """The grammar of an answer. Raises `InvalidRequestError` that names the field, or the place in a schema."""
    check_bounds(structured)
    if structured.json is not None:
        return json_grammar(prepare_schema(_text(structured.json), path="structured_outputs.json"), structured)
    if structured.json_object:
        return json_grammar('{"type":"object"}', structured)
    if structured.choice is not None:
        return choice_grammar(structured.choice)
    if structured.regex is not None:
        return _from_request(f"start: {terminal(_read('regex', structured.regex, regex_in_lark))}\n")
    assert structured.grammar is not None
    return _lark(structured.grammar)


def json_grammar(schema: str, structured: StructuredOutputsParams) -> str:
    """The grammar of a schema that `prepare_schema` has checked."""
    whitespace = "" if structured.disable_any_whitespace else structured.whitespace_pattern or WHITESPACE
    grammar = f"{OWN_GRAMMAR}start: {inline_schema(json.loads(schema), whitespace=whitespace)}\n"
    return grammar if structured.whitespace_pattern is None else _from_request(grammar)


def choice_grammar(choices: Any) -> str:
    """One of several texts."""
    return f"{OWN_GRAMMAR}start: " + " | ".join(json.dumps(text) for text in dict.fromkeys(choices))


def _lark(grammar: str) -> str:
    """Lark as it is, GBNF and EBNF translated."""
    path = "structured_outputs.grammar"
    if grammar.lstrip().startswith("{"):
        raise InvalidRequestError(f"{path} must be Lark, GBNF or EBNF; a JSON schema goes into 'json'", param=path)
    lark = _read("grammar", grammar, as_lark)
    if num_intersections(lark) > MAX_INTERSECTIONS:
        raise InvalidRequestError(f"{path} may use '&' at most {MAX_INTERSECTIONS} times", path)
    return _from_request(lark)


def _read(name: str, text: str, reader: Callable[[str], str]) -> str:
    try:
        return reader(text)
    except NotationError as error:
        path = f"structured_outputs.{name}"
        raise InvalidRequestError(f"{path} cannot be read: {error}", param=path) from None


def _from_request(grammar: str) -> str:
    """Make sure that a request's grammar is not taken for one of Headway's. Line numbers stay the same."""
    return f" {grammar}" if grammar.startswith(OWN_GRAMMAR) else grammar


def _text(schema: Any) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(
            f"structured_outputs.{name} holds half of a surrogate pair, which is no text", f"structured_outputs.{name}"
        ) from None


def _too_long(name: str, most: int, unit: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"structured_outputs.{name} may have at most {most} {unit}", f"structured_outputs.{name}"
    )


# ---- grammars of formats --------------------------------------------------------------------------------------------

SPACES = " \t\r\n"
SPACE = r"[ \t\r\n]"
MOST_SPACES = 8
"""Whitespace that a grammar allows in one place; an endless run of it would be valid, and use up the tokens."""
ANY_TEXT = r"(?s:.*)"
SOME_TEXT = r"(?s:.+)"

_REGEX_SIGNS = frozenset("\\.+*?()|[]{}^$#&-~/\"'")
_REGEX_CONTROLS = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


class LarkRules:
    """The rules of one grammar, in order of their definition."""

    def __init__(self, special_token_ids: Mapping[str, int]) -> None:
        self.special_token_ids = special_token_ids
        self._rules: dict[str, str] = {}

    def add(self, name: str, body: str, *, lazy: bool = False) -> str:
        """Define a rule, and return its name."""
        if name in self._rules:
            raise ValueError(f"the grammar has a rule '{name}' already")
        self._rules[name] = f"{name}[lazy]: {body}" if lazy else f"{name}: {body}"
        return name

    def add_new(self, prefix: str, body: str) -> str:
        """Define a rule under a name of its own."""
        return self.add(f"{prefix}_{len(self._rules)}", body)

    def has(self, name: str) -> bool:
        return name in self._rules

    def text(self) -> str:
        return OWN_GRAMMAR + "\n".join([*self._rules.values(), ""])


def regex_quote(text: str) -> str:
    """A regex that matches `text` alone, as it stands between slashes."""
    quoted = (_REGEX_CONTROLS.get(one) or (f"\\{one}" if one in _REGEX_SIGNS else one) for one in text)
    return "".join(quoted)


def terminal(regex: str) -> str:
    return f"/{regex}/"


def spaces(least: int = 0) -> str:
    """A regex of whitespace where its amount is left to the model."""
    return f"{SPACE}{{{least},{MOST_SPACES}}}"


def inline_schema(schema: Mapping[str, Any], *, whitespace: str = WHITESPACE) -> str:
    """A schema inside a grammar; its `$ref`s are resolved within it. `whitespace` is a regex, or empty: none."""
    options = {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
    guided = {**schema, "x-guidance": {**schema.get("x-guidance", {}), **options}}
    return f"%json {json.dumps(guided, ensure_ascii=True)}"


def inline_grammar(grammar: str) -> str:
    """A whole grammar, with its own `start`, inside another one."""
    return f"%lark {{\n{grammar}\n}}"


def special_tokens(ids: Iterable[int]) -> str:
    return f"<[{','.join(map(str, sorted(ids)))}]>"


def one_of(alternatives: Iterable[str]) -> str:
    found = list(alternatives)
    return found[0] if len(found) == 1 else f"( {' | '.join(found)} )"
