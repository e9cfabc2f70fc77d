"""Check the regular expressions of a schema and write them so that every reading of them agrees.

`pattern` is ECMA-262, llguidance reads Rust's dialect, and checkers in Python read a third one. `portable_pattern`
refuses what cannot be matched without backtracking, bounds the cost, and narrows the classes whose meaning differs:
a negated class (`\\W`, `\\D`, `[^\\w]`) leaves out what any of the three dialects counts as a letter or digit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_PATTERN_CHARS = 4096
# States of the automaton, roughly: repetition counts multiply what they repeat.
MAX_PATTERN_WEIGHT = 20_000
MAX_REPEAT = 5_000
# Of words to be excluded: the pattern nests as deep as they are long.
MAX_WORD_CHARS = 60
MAX_WORDS_CHARS = 8_000

_COUNT = re.compile(r"\{(\d{1,9})(?:(,)(\d{0,9}))?\}")
_NO_LEAST = re.compile(r"\{,\d*\}")  # Python counts from 0, ECMA-262 takes it as text
_GROUP_NAME = re.compile(r"\?(?:P?<[A-Za-z_]\w*>|:)")
_WIDE = {"w": r"\p{L}\p{N}\p{M}_", "d": r"\p{N}", "s": r"\s\x1c-\x1f"}
_HEX = re.compile(r"x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]{1,6}\}")
_PROPERTY = re.compile(r"[pP](?:\{[A-Za-z_=]{1,40}\}|[LMNPSZC])")
_ONE_CLASS = re.compile(r"\^\[((?:[^\]\\]|\\.)+)\]([+*])\$")
_META = frozenset("\\.+*?()|[]{}^$/-#&~ \"'`<>=!:,;@%_")


class PatternError(ValueError):
    """A pattern that is malformed, too large, or needs what a finite automaton cannot do."""


def portable_pattern(pattern: str) -> str:
    """Return the pattern in llguidance's dialect, matching no more than it does in ECMA-262 or Python."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise PatternError(f"the pattern has {len(pattern):,} characters, at most {MAX_PATTERN_CHARS:,} are taken")
    return _Scanner(pattern).read()


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def read(self) -> str:
        out, weight = self._alternatives(0)
        if self.at < len(self.text):
            raise PatternError("the pattern has a ')' too many")
        if weight > MAX_PATTERN_WEIGHT:
            raise PatternError(f"the pattern's repetitions amount to {weight:,} states, at most {MAX_PATTERN_WEIGHT:,}")
        return out

    def _alternatives(self, depth: int) -> tuple[str, int]:
        if depth > 32:
            raise PatternError("the pattern's groups are nested more than 32 deep")
        parts: list[str] = []
        weight = 1
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at] == "|":
                self.at += 1
                parts.append("|")
                continue
            anchor = self.text[self.at] in "^$"
            atom, cost = self._atom(depth)
            atom, cost, repeated = self._repeat(atom, cost)
            if repeated and anchor:
                raise PatternError("a repeated anchor is not supported")
            parts.append(atom)
            weight += cost
        return "".join(parts), weight

    def _repeat(self, atom: str, cost: int) -> tuple[str, int, bool]:
        if self.at >= len(self.text):
            return atom, cost, False
        char = self.text[self.at]
        count = _COUNT.match(self.text, self.at)
        if char in "*+?":
            self.at += 1
            atom += char
        elif count is not None:
            low = int(count[1])
            high = low if count[2] is None else int(count[3]) if count[3] else None
            if max(low, high or 0) > MAX_REPEAT:
                raise PatternError(f"the pattern repeats {count[0]}, at most {MAX_REPEAT:,} times are taken")
            if high is not None and high < low:
                raise PatternError(f"the pattern's repetition {count[0]} is out of order")
            self.at = count.end()
            atom += count[0]
            cost *= max(low, high or 0, 1)
        else:
            return atom, cost, False
        if self.text[self.at : self.at + 1] == "?":  # lazy: the set of matches is the same
            self.at += 1
        if self.text[self.at : self.at + 1] in {"*", "+", "?"} or _COUNT.match(self.text, self.at):
            raise PatternError("the pattern has two repetitions in a row")
        return atom, cost, True

    def _atom(self, depth: int) -> tuple[str, int]:
        char = self.text[self.at]
        if char == "(":
            return self._group(depth)
        if char == "[":
            return self._class(), 1
        if char == "\\":
            return self._escape(negated=None), 1
        if char in "*+?":
            raise PatternError(f"the pattern has nothing to repeat before '{char}'")
        if _NO_LEAST.match(self.text, self.at):
            raise PatternError("a repetition without a lower bound is read in two ways; write '{0,…}'")
        self.at += 1
        return ("\\" + char if char in "{}]" else char), 1

    def _group(self, depth: int) -> tuple[str, int]:
        self.at += 1
        if self.text.startswith("?", self.at):
            named = _GROUP_NAME.match(self.text, self.at)
            if named is None:
                kinds = {"?=": "lookahead", "?!": "lookahead", "?<=": "lookbehind", "?<!": "lookbehind"}
                kind = next((name for mark, name in kinds.items() if self.text.startswith(mark, self.at)), None)
                what = f"a {kind}" if kind else f"a group '({self.text[self.at : self.at + 2]}…'"
                raise PatternError(f"{what} in a pattern is not supported")
            self.at = named.end()
        inner, weight = self._alternatives(depth + 1)
        if self.at >= len(self.text):
            raise PatternError("the pattern has a '(' that is not closed")
        self.at += 1
        return f"(?:{inner})", weight

    def _escape(self, *, negated: bool | None) -> str:
        """Read one escape; `negated` says in which kind of class it stands (None: outside)."""
        self.at += 1
        if self.at >= len(self.text):
            raise PatternError("the pattern ends with a backslash")
        char = self.text[self.at]
        coded = _HEX.match(self.text, self.at)
        property_name = _PROPERTY.match(self.text, self.at)
        if coded is not None:
            self.at = coded.end()
            value = int(coded[0].strip("xu{}"), 16)
            if value > 0x10FFFF or 0xD800 <= value < 0xE000:
                raise PatternError(f"\\{coded[0]} in a pattern is no character")
            return f"\\x{{{value:x}}}"
        if property_name is not None:
            self.at = property_name.end()
            return "\\" + property_name[0]
        self.at += 1
        if char in "wds":
            return _WIDE[char] if negated else "\\" + char
        if char in "WDS":
            if negated:  # not a non-letter: the narrow class, written as a class would need an intersection
                raise PatternError(f"\\{char} inside a negated class is not supported")
            return f"[^{_WIDE[char.lower()]}]"
        if char in "nrtfv":
            return "\\" + char
        if char in _META:
            return "\\" + char if char not in " \"'`<>=!:,;@%_/" else char
        if char == "0":
            return "\\x00"
        if char.isdigit():
            raise PatternError("a back reference in a pattern is not supported")
        if char == "b" and negated is not None:
            return "\\x08"
        raise PatternError(f"the escape \\{char} in a pattern is not supported")

    def _class(self) -> str:
        self.at += 1
        negated = self.text.startswith("^", self.at)
        self.at += negated
        parts: list[str] = []
        while True:
            if self.at >= len(self.text):
                raise PatternError("the pattern has a '[' that is not closed")
            char = self.text[self.at]
            if char == "]":
                self.at += 1
                break
            if char == "\\":
                parts.append(self._escape(negated=negated))
                continue
            self.at += 1
            parts.append("-" if char == "-" else re.escape(char) if char in "[&~^" else char)
        if not parts:
            raise PatternError("an empty class in a pattern is not supported")
        return f"[{'^' if negated else ''}{_with_plain_hyphens(parts)}]"


def _with_plain_hyphens(parts: list[str]) -> str:
    """Join the members of a class: a hyphen that is no range (`[a-z-9]`, `[\\w-x]`) is written as an escape."""
    out: list[str] = []
    at = 0
    while at < len(parts):
        part = parts[at]
        if part == "-":
            out.append("\\-")
            at += 1
        elif at + 2 < len(parts) and parts[at + 1] == "-" and not _is_set(part) and not _is_set(parts[at + 2]):
            high = "\\-" if parts[at + 2] == "-" else parts[at + 2]
            out.append(f"{part}-{high}")
            at += 3
        else:
            out.append(part)
            at += 1
    return "".join(out)


def _is_set(part: str) -> bool:
    return part[:2] in {"\\w", "\\d", "\\s", "\\p", "\\P", "[^"}


def opposite_pattern(pattern: str) -> str | None:
    """Return a pattern for what this one does not match, if it only says which characters there are."""
    simple = _ONE_CLASS.fullmatch(pattern)
    if simple is None or simple[1].startswith("^"):
        return None
    try:
        outside = portable_pattern(f"[^{simple[1]}\\n]")  # "$" also matches before a last newline in Python
    except PatternError:
        return None
    return f"^$|{outside}" if simple[2] == "+" else outside


def none_of(words: Iterable[str]) -> str | None:
    """Return a pattern for every string except these, unless they are too long or too many."""
    tree: dict[str, dict] = {}
    size = 0
    for word in words:
        size += len(word)
        if len(word) > MAX_WORD_CHARS or size > MAX_WORDS_CHARS:
            return None
        node = tree
        for char in word:
            node = node.setdefault(char, {})
        node["end"] = {}
    return f"^{_outside(tree)}$"


def _outside(node: dict[str, dict]) -> str:
    chars = [char for char in node if char != "end"]
    listed = "".join(map(_plain, chars))
    other = f"[^{listed}][\\s\\S]*" if chars else "[\\s\\S]+"
    options = [other, *(_plain(char) + _outside(node[char]) for char in chars)]
    if "end" not in node:
        options.append("")
    return f"(?:{'|'.join(options)})"


def _plain(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"
