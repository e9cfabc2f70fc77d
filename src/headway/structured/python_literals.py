"""Python literals in tool calls: their grammar, made from a JSON schema, and a reader that turns them into JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headway.structured.grammars import LarkRules, inline_schema, one_of, regex_quote, spaces, terminal
from headway.structured.output_pieces import CallArguments, Reading, TextStream
from headway.structured.tool_schemas import without_references

_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "$defs", "definitions"})
_HEX = "[0-9a-fA-F]"
_NO_SURROGATE = rf"([0-9a-ce-fA-CE-F]{_HEX}{{3}}|[dD][0-7]{_HEX}{{2}})"
_ESCAPE = rf"\\([\\'\x22nrt]|x{_HEX}{{2}}|u{_NO_SURROGATE}|U000[1-9a-fA-F]{_HEX}{{4}})"
_STRING = rf"('([^'\\\x00-\x1f\x7f]|{_ESCAPE})*'|\x22([^\x22\\\x00-\x1f\x7f]|{_ESCAPE})*\x22)"
_INTEGER = r"-?(0|[1-9][0-9]*)"
_SCALARS = {
    "string": _STRING,
    "integer": _INTEGER,
    "number": rf"{_INTEGER}(\.[0-9]+)?([eE][+\-]?[0-9]+)?",
    "boolean": "(True|False)",
    "null": "None",
}
_COMMA = terminal(f"{spaces()},{spaces()}")
_COLON = terminal(f"{spaces()}:{spaces()}")
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_JSON_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}


class PythonLiterals:
    """Rules for the literals that a schema allows. A schema with a keyword that is not known here gets JSON's spelling
    for the whole value, which the reader takes as well."""

    def __init__(self, rules: LarkRules) -> None:
        self._rules = rules

    def value(self, schema: Mapping[str, Any]) -> str:
        inlined = without_references(schema, schema)
        return self._value(inlined) if _is_known(inlined) else inline_schema(schema)

    def anything(self) -> str:
        """Any literal, nested ones included."""
        if not self._rules.has("py_any"):
            scalar = terminal("|".join(_SCALARS[kind] for kind in ("string", "number", "boolean", "null")))
            self._rules.add("py_any", f"{scalar} | py_list | py_dict")
            self._rules.add("py_list", f'"[" {repeated("py_any")} "]"')
            self._rules.add("py_dict", f'"{{" {repeated(f"{terminal(_STRING)} {_COLON} py_any")} "}}"')
        return "py_any"

    def comma_list(self, items: Sequence[str], *, required: Sequence[bool]) -> str:
        """What matches the items in their order with commas between them, where some may be missing; "" for none."""
        starts: list[str] = []
        rest = ""
        for item, must in zip(reversed(items), reversed(required)):
            # Alternatives differ by the first item that is there: behind it, each one brings its comma.
            starts = [f"{item} {rest}"] + ([] if must else starts)
            rest = self._rules.add_new("py_rest", f"({_COMMA} {item}){'' if must else '?'} {rest}")
        if not starts:
            return ""
        return one_of(starts) if any(required) else f"({' | '.join(starts)})?"

    def _value(self, schema: Mapping[str, Any]) -> str:
        """What matches the literals of a known schema."""
        if "anyOf" in schema:
            return one_of(self._value(one) for one in schema["anyOf"])
        if "enum" in schema or "const" in schema:
            return terminal("|".join(_spellings(schema.get("enum", [schema.get("const")]))))
        match schema.get("type"):
            case None:
                return self.anything()
            case list() as kinds:
                return one_of(self._value({"type": kind}) for kind in kinds)
            case "array":
                return self._rules.add_new("py_list", f'"[" {repeated(self._value(schema.get("items", {})))} "]"')
            case "object":
                return self._rules.add_new("py_dict", f'"{{" {self._pairs(schema)} "}}"')
            case kind:
                return terminal(_SCALARS[kind])

    def _pairs(self, schema: Mapping[str, Any]) -> str:
        properties = schema.get("properties") or {}
        if not properties:
            others = schema.get("additionalProperties", True)
            if others is False:
                return ""
            value = self._value(others) if isinstance(others, Mapping) else self.anything()
            return repeated(f"{terminal(_STRING)} {_COLON} {value}")
        pairs = [
            self._rules.add_new("py_pair", f"{terminal('|'.join(_spellings([name])))} {_COLON} {self._value(one)}")
            for name, one in properties.items()
        ]
        required = schema.get("required") or ()
        return self.comma_list(pairs, required=[name in required for name in properties])


def repeated(item: str) -> str:
    return f"({item} ({_COMMA} {item})*)?"


def _is_known(schema: object) -> bool:
    if not isinstance(schema, Mapping):
        return False
    words = schema.keys() - _ANNOTATIONS
    if words == {"anyOf"}:
        options = schema["anyOf"]
        return isinstance(options, list) and bool(options) and all(map(_is_known, options))
    if words & {"enum", "const"}:
        values = schema.get("enum", [schema.get("const")])
        if not isinstance(values, list) or not values:
            return False
        return words <= {"enum", "const", "type"} and all(isinstance(one, str | int | None) for one in values)
    match schema.get("type"):
        case list() as kinds:
            return words == {"type"} and bool(kinds) and all(_is_known({"type": kind}) for kind in kinds)
        case "array":
            return words <= {"type", "items"} and _is_known(schema.get("items", {}))
        case "object":
            properties = schema.get("properties") or {}
            required = schema.get("required") or []
            others = schema.get("additionalProperties", False)
            return (
                isinstance(properties, Mapping)
                and isinstance(required, list)
                and words <= {"type", "properties", "required", "additionalProperties"}
                and all(isinstance(name, str) and name in properties for name in required)
                and all(map(_is_known, properties.values()))
                and (isinstance(others, bool) or _is_known(others))
            )
        case None:
            return not words
        case kind:
            return words == {"type"} and isinstance(kind, str) and kind in _SCALARS


def _spellings(values: Sequence[str | int | None]) -> list[str]:
    """Regexes of constants; strings may stand in quotes of either kind."""
    found: list[str] = []
    for value in values:
        found.append(regex_quote(repr(value)))
        if isinstance(value, str):
            found.append(regex_quote(json.dumps(value, ensure_ascii=False)))
    return list(dict.fromkeys(found))


class PythonReader:
    """Reads the keyword arguments of one call, and emits them as the JSON text of an object.

    Each method returns False if the text is not what it reads, or the answer ended within it.
    """

    _SIMPLE_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}  # noqa: RUF012
    _HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}  # noqa: RUF012
    _PLAIN_IN_STRING = re.compile(r"[^'\"\\]+")
    _WORD = re.compile(r"[^\s,=:()\[\]{}'\"]+")
    _CLOSINGS = {"[": "]", "(": ")", "{": "}"}  # noqa: RUF012

    def __init__(self, stream: TextStream, index: int) -> None:
        self._stream = stream
        self._index = index

    def keywords(self) -> Reading[bool]:
        """Arguments up to the closing parenthesis, which is left unread."""
        stream = self._stream
        self._emit("{")
        separator = ""
        while True:
            yield from stream.skip_space()
            following = yield from stream.peek()
            if following == ")":
                self._emit("}")
                return True
            if following == "," and separator:
                stream.take(1)
                yield from stream.skip_space()
            name = yield from self._word()
            yield from stream.skip_space()
            if not name or not (yield from stream.literal("=")):
                return False
            self._emit(f"{separator}{json.dumps(name, ensure_ascii=False)}: ")
            separator = ", "
            if not (yield from self._value()):
                return False

    def _value(self) -> Reading[bool]:
        stream = self._stream
        yield from stream.skip_space()
        following = yield from stream.peek()
        if following in ("'", '"') and following:
            return (yield from self._string())
        if following in self._CLOSINGS:
            return (yield from self._collection(self._CLOSINGS[following]))
        word = yield from self._word()
        if word:
            self._emit(_json_of_word(word))
        return bool(word)

    def _collection(self, closing: str) -> Reading[bool]:
        """A list, tuple or dict."""
        stream = self._stream
        stream.take(1)
        is_dict = closing == "}"
        self._emit("{" if is_dict else "[")
        separator = ""
        while True:
            yield from stream.skip_space()
            if (yield from stream.peek()) == "," and separator:
                stream.take(1)
                yield from stream.skip_space()
            if (yield from stream.peek()) == closing:
                stream.take(1)
                self._emit("}" if is_dict else "]")
                return True
            self._emit(separator)
            separator = ", "
            if is_dict and not (yield from self._key()):
                return False
            if not (yield from self._value()):
                return False

    def _key(self) -> Reading[bool]:
        """A key of a dict with its colon; JSON knows only strings there."""
        stream = self._stream
        if (yield from stream.peek()) in ("'", '"'):
            if not (yield from self._string()):
                return False
        else:
            word = yield from self._word()
            self._emit(json.dumps(_JSON_WORDS.get(word, word), ensure_ascii=False))
        yield from stream.skip_space()
        if not (yield from stream.literal(":")):
            return False
        self._emit(": ")
        return True

    def _word(self) -> Reading[str]:
        """A name, number or constant: up to a character that ends it."""
        stream = self._stream
        while True:
            found = self._WORD.match(stream.rest)
            if found and found.end() < len(stream.rest):
                return stream.take(found.end())
            if stream.rest and not found:
                return ""
            if not (yield from stream.more()):
                return stream.take(len(stream.rest))

    def _string(self) -> Reading[bool]:
        stream = self._stream
        quote = stream.take(1)
        self._emit('"')
        while following := (yield from stream.peek()):
            if following == quote:
                stream.take(1)
                self._emit('"')
                return True
            if following == "\\":
                if not (yield from self._escape()):
                    return False
            elif found := self._PLAIN_IN_STRING.match(stream.rest):
                self._emit_in_string(stream.take(found.end()))
            else:
                self._emit_in_string(stream.take(1))
        return False

    def _escape(self) -> Reading[bool]:
        stream = self._stream
        if not (yield from stream.at_least(2)):
            stream.take(1)
            return False
        kind = stream.rest[1]
        length = self._HEX_LENGTHS.get(kind, 0)
        if not (yield from stream.at_least(2 + length)):
            stream.take(len(stream.rest))
            return False
        digits = stream.rest[2 : 2 + length]
        if length and re.fullmatch(f"{_HEX}+", digits) and int(digits, 16) < 0x110000:
            stream.take(2 + length)
            # Halves of a surrogate pair are joined by the reader of the JSON text.
            self._emit(f"\\u{int(digits, 16):04x}" if length < 8 else json.dumps(chr(int(digits, 16)))[1:-1])
            return True
        stream.take(2)
        plain = kind in "'\"\\/"
        self._emit_in_string(kind if plain else self._SIMPLE_ESCAPES.get(kind, f"\\{kind}"))
        return True

    def _emit(self, text: str) -> None:
        if text:
            self._stream.emit(CallArguments(self._index, text))

    def _emit_in_string(self, text: str) -> None:
        self._emit(json.dumps(text, ensure_ascii=False)[1:-1])


def _json_of_word(word: str) -> str:
    if word in _JSON_WORDS:
        return _JSON_WORDS[word]
    if _JSON_NUMBER.fullmatch(word):
        return word
    try:
        number = int(word, 0) if not set(word) & set(".eE") or word[:2] in ("0x", "0X") else float(word)
        return json.dumps(number, allow_nan=False)
    except ValueError:
        return json.dumps(word, ensure_ascii=False)
