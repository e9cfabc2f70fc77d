"""Turns llguidance's errors about a grammar into reasons for the client who sent a part of it."""

from __future__ import annotations

import re

# The grammar with line numbers and a mark below: Headway wrote most of it.
_SHOWN_GRAMMAR = re.compile(r"^ *\d+ \| .*(?:\n +\^ *$)?\n?", re.MULTILINE)
_OWN_PLACE = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: |\n *while processing json-schema:\S*")
_SYNTAX_TREE = re.compile(r":\s+\((?:And|Or|Not|Concat|Repeat|SearchRegex|Regex|Lookahead)\b.*", re.DOTALL)


def plain_reason(text: str) -> str:
    """Return only the reason: without the grammar, the position in it, or the compiler's form of a regex."""
    text = text.split("\n<state>")[0].removesuffix("\n<non-verbose/>")
    for part in (_SHOWN_GRAMMAR, _OWN_PLACE, _SYNTAX_TREE):
        text = part.sub("", text)
    text = text.strip()
    return "no text can match it" if text.startswith("NoExtension") else text
