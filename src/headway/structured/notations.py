"""Grammars as clients write them: Lark is read as it is, GBNF and EBNF are translated to it. Each text is read once."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance.gbnf_to_lark import ASTNode

MAX_TRANSLATED_CHARS = 64 * 1024
"""The limit for GBNF and EBNF. The translator is written in Python and takes 0.2 s for this many characters."""

# These expressions match to the end of an unclosed string or regex, so that they never look back: their time grows
# with the length of the text. The second one reads tokens as llguidance's lexer does.
_LARK_START = re.compile(r"^[^\S\n]*(?:%llguidance\b|start\s*:)", re.MULTILINE)
_HIDDEN = re.compile(r'(?:#|//)[^\n]*|"(?:[^"\\\n]|\\.)*"?|/(?:[^/\\]|\\.)+/?')
_TO_ESCAPE = re.compile(r"\\.|/|\n", re.DOTALL)
_ESCAPED = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}


class NotationError(ValueError):
    """A grammar or regex that cannot be read."""


def as_lark(grammar: str) -> str:
    """Return the grammar in Lark's notation, as llguidance reads it."""
    if _LARK_START.search(grammar):
        return grammar
    if len(grammar) > MAX_TRANSLATED_CHARS:
        raise NotationError(
            f"a grammar in GBNF or EBNF has at most {MAX_TRANSLATED_CHARS:,} characters; in Lark, it may be longer"
        )
    try:
        return _translated(grammar)
    except RecursionError:
        raise NotationError("its groups are nested too deeply") from None
    except Exception as error:  # the translator raises plain exceptions for what it cannot read
        raise NotationError(str(error)[:300]) from None


def num_intersections(lark: str) -> int:
    """Return how often a grammar uses the operator `&`, which may also stand in strings, regexes and comments."""
    return _HIDDEN.sub("", lark).count("&")


def regex_in_lark(regex: str) -> str:
    """Return a regex as it stands between slashes."""
    num_backslashes = len(regex) - len(regex.rstrip("\\"))
    if num_backslashes % 2:
        raise NotationError("it ends with a backslash")
    return _TO_ESCAPE.sub(lambda found: _ESCAPED.get(found[0], found[0]), regex)


def _translated(text: str) -> str:
    """Translate with llguidance's translator.

    Its search for rules that are terminals passes over all rules until nothing changes. Two passes are enough if each
    rule comes after the rules that it refers to.
    """
    from llguidance.gbnf_to_lark import GrammarParser, RuleRefNode, resolve  # 0.1 s to import: only where it is used

    rules = GrammarParser().parse(text)
    sorter = TopologicalSorter(
        {
            name: {node.name for node in _nodes(rule) if isinstance(node, RuleRefNode) and node.name in rules}
            for name, rule in rules.items()
        }
    )
    with contextlib.suppress(CycleError):  # the rules of a cycle, and those that need them, come last
        sorter.prepare()
    order: list[str] = []
    while ready := sorter.get_ready():
        order += ready
        sorter.done(*ready)
    as_written = list(rules.values())
    resolve({name: rules[name] for name in dict.fromkeys([*order, *rules])})
    return "\n".join(["%llguidance {}", *map(str, as_written), ""])


def _nodes(rule: ASTNode) -> Iterator[ASTNode]:
    pending = [rule]
    while pending:
        node = pending.pop()
        yield node
        pending += node.children()
