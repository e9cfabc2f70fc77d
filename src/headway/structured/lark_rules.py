"""Put together grammars in llguidance's dialect of Lark: quoting, and rules that collect the rules they refer to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

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
        return "\n".join(["%llguidance {}", *self._rules.values(), ""])


def regex_quote(text: str) -> str:
    """A regex that matches `text` alone, as it stands between slashes."""
    quoted = (_REGEX_CONTROLS.get(one) or (f"\\{one}" if one in _REGEX_SIGNS else one) for one in text)
    return "".join(quoted)


def terminal(regex: str) -> str:
    return f"/{regex}/"


def spaces(least: int = 0) -> str:
    """A regex of whitespace where its amount is left to the model."""
    return f"{SPACE}{{{least},{MOST_SPACES}}}"


def inline_schema(schema: Mapping[str, Any]) -> str:
    """A schema inside a grammar; its `$ref`s are resolved within it."""
    return f"%json {json.dumps(schema, ensure_ascii=True)}"


def inline_grammar(grammar: str) -> str:
    """A whole grammar, with its own `start`, inside another one."""
    return f"%lark {{\n{grammar}\n}}"


def special_tokens(ids: Iterable[int]) -> str:
    return f"<[{','.join(map(str, sorted(ids)))}]>"


def one_of(alternatives: Iterable[str]) -> str:
    found = list(alternatives)
    return found[0] if len(found) == 1 else f"( {' | '.join(found)} )"
