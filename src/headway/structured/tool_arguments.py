"""Three ways in which models write the arguments of a call: JSON, a tag per parameter, Python keywords.

Each way is one class: it has the grammar that forces the form, the reader that turns it into JSON text as it is
generated, and the writer that turns JSON into it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn, Protocol

from headway.errors import InvalidRequestError
from headway.structured.grammars import ANY_TEXT, LarkRules, inline_schema, regex_quote, spaces, terminal
from headway.structured.notations import regex_in_lark
from headway.structured.output_pieces import CallArguments, Reading, TextStream
from headway.structured.python_literals import PythonLiterals, PythonReader, repeated
from headway.structured.tool_schemas import (
    Parameter,
    Tool,
    closed_schema,
    listed_values,
    parameter_list,
    type_of_value,
    without_references,
)


class ArgumentsFormat(Protocol):
    def grammar(self, rules: LarkRules, prefix: str, tool: Tool) -> str:
        """The rule body that matches the arguments of `tool`. Needed rules are added under names that begin with
        `prefix`."""

    def read(self, stream: TextStream, index: int, tool: Tool) -> Reading[None]:
        """Emit the arguments of call `index` as JSON text. Text that does not fit is left unread."""

    def write(self, arguments: str) -> str:
        """Write arguments given as JSON text."""


class JsonArguments:
    """`{"city": "Paris"}`: read by the structure of JSON, so that strings may contain any marker."""

    _IN_STRING = re.compile(r'["\\]')
    _IN_STRUCTURE = re.compile(r'["{}\[\]]')

    def grammar(self, rules: LarkRules, prefix: str, tool: Tool) -> str:
        return rules.add(f"{prefix}_json", inline_schema(closed_schema(tool)))

    def read(self, stream: TextStream, index: int, tool: Tool) -> Reading[None]:
        yield from stream.skip_space()
        if (yield from stream.peek()) != "{":
            return
        depth, in_string = 0, False
        while True:
            at = 0
            while found := (self._IN_STRING if in_string else self._IN_STRUCTURE).search(stream.rest, at):
                at = found.end()
                match found[0]:
                    case '"':
                        in_string = not in_string
                    case "\\" if at == len(stream.rest):
                        at -= 1
                        break
                    case "\\":
                        at += 1
                    case "{" | "[":
                        depth += 1
                    case _:
                        depth -= 1
                if not depth:
                    stream.emit(CallArguments(index, stream.take(at)))
                    return
            else:
                at = len(stream.rest)
            if at:
                stream.emit(CallArguments(index, stream.take(at)))
            if not (yield from stream.more()):
                return

    def write(self, arguments: str) -> str:
        return arguments


class XmlParameters:
    """`<parameter=city>`, the value on lines of its own, `</parameter>`. Strings are raw text, other values JSON."""

    _OPENING = "<parameter="
    _CLOSING = "</parameter>"
    _PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # noqa: RUF012 - a constant
    _CONSTRAINED = ("minLength", "maxLength", "pattern")

    def grammar(self, rules: LarkRules, prefix: str, tool: Tool) -> str:
        listed = parameter_list(tool)
        parts = [
            self._parameter(rules, f"{prefix}_{place}", one) + ("" if one.required else "?")
            for place, one in enumerate(listed.parameters)
        ]
        if listed.is_open:
            opening = terminal(rf"{spaces()}{self._OPENING}[^\s<>=,()\[\]{{}}\x22']{{1,64}}>")
            raw = rules.add(f"{prefix}_value", self._raw(), lazy=True)
            other = rules.add(f"{prefix}_other", f"{opening} {raw}")
            parts.append(f"{other}*")
        return rules.add(f"{prefix}_xml", " ".join(parts) or '""')

    def _parameter(self, rules: LarkRules, name: str, parameter: Parameter) -> str:
        opening = terminal(spaces() + regex_quote(f"{self._OPENING}{parameter.name}>"))
        schema = without_references(parameter.schema, parameter.schema) or parameter.schema
        texts = [_as_text(one) for one in listed_values(schema) or ()]
        newline = terminal(r"\n")
        closing = terminal(rf"\n{regex_quote(self._CLOSING)}")
        if "string" not in parameter.types:
            value = f"{newline} {inline_schema(parameter.schema)} {closing}"
        elif texts:
            value = f"{newline} {terminal('|'.join(map(regex_quote, texts)))} {closing}"
        elif any(word in schema for word in self._CONSTRAINED):
            value = rules.add(f"{name}_value", rules.add(f"{name}_VALUE".upper(), self._constrained(schema)))
        else:
            value = rules.add(f"{name}_value", self._raw(), lazy=True)
        return rules.add(name, f"{opening} {value}")

    def _raw(self) -> str:
        """Any text up to the closing tag that stands on a line of its own."""
        return terminal(rf"\n({ANY_TEXT}\n)?{regex_quote(self._CLOSING)}")

    def _constrained(self, schema: Mapping[str, Any]) -> str:
        closing = regex_quote(self._CLOSING)
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        bounds = [terminal(rf"\n(?s:.{{{least},{most}}})\n{closing}")]
        if "pattern" in schema:
            bounds.append(terminal(rf"\n{_found_anywhere(str(schema['pattern']))}\n{closing}"))
        closed_before = terminal(rf"{ANY_TEXT}\n{closing}(?s:.+)")
        return " & ".join([*bounds, f"~{closed_before}"])

    def read(self, stream: TextStream, index: int, tool: Tool) -> Reading[None]:
        listed = parameter_list(Tool(tool.name, parameters=tool.parameters))
        stream.emit(CallArguments(index, "{"))
        separator = ""
        while True:
            yield from stream.skip_space()
            if not (yield from stream.literal(self._OPENING)):
                break
            name = ""
            while part := (yield from stream.until(">")):
                name += part
            if part is not None:
                return
            stream.emit(CallArguments(index, f"{separator}{_json(name)}: "))
            separator = ", "
            types = listed.types_of(name)
            if not (yield from self._read_value(stream, index, types)):
                return
        if stream.rest:
            stream.emit(CallArguments(index, "}"))

    def _read_value(self, stream: TextStream, index: int, types: frozenset[str]) -> Reading[bool]:
        """Emit a value; False if the answer ended within it."""
        streamed = types == {"string"}
        ending = f"\n{self._CLOSING}"
        if streamed:
            stream.emit(CallArguments(index, '"'))
        # The newline before the value may be that of the closing tag: an empty value.
        if not (yield from stream.follows(ending)):
            yield from stream.literal("\n")
        value = ""
        while part := (yield from stream.until(ending)):
            if streamed:
                stream.emit(CallArguments(index, _json(part)[1:-1]))
            else:
                value += part
        if part is not None:
            stream.take(len(stream.rest))
            return False
        stream.emit(CallArguments(index, '"' if streamed else self._value(value, types)))
        return True

    def _value(self, text: str, types: frozenset[str]) -> str:
        """The JSON of a value that is a string only where its text is no other value of the right type."""
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
            if not isinstance(value, str) and type_of_value(value) & types:
                return text.strip()
        except ValueError:
            if text.strip() in self._PYTHON_WORDS and "string" not in types:
                return self._PYTHON_WORDS[text.strip()]
            return _json(text)
        return _json(text) if "string" in types else text.strip()

    def write(self, arguments: str) -> str:
        found = _arguments_object(arguments)
        return "".join(f"{self._OPENING}{name}>\n{_as_text(value)}\n{self._CLOSING}\n" for name, value in found.items())


class PythonArguments:
    """`city='Paris', days=3`: keyword arguments that are Python literals."""

    def grammar(self, rules: LarkRules, prefix: str, tool: Tool) -> str:
        listed = parameter_list(tool)
        literals = PythonLiterals(rules)
        if listed.is_open:
            one = rules.add(f"{prefix}_any", f"{terminal('[A-Za-z_][A-Za-z0-9_]{0,63}=')} {literals.anything()}")
            return rules.add(f"{prefix}_arguments", repeated(one))
        keywords = [
            rules.add(f"{prefix}_{place}", f"{terminal(regex_quote(one.name) + '=')} {literals.value(one.schema)}")
            for place, one in enumerate(listed.parameters)
        ]
        body = literals.comma_list(keywords, required=[one.required for one in listed.parameters])
        return rules.add(f"{prefix}_arguments", body or '""')

    def read(self, stream: TextStream, index: int, tool: Tool) -> Reading[None]:
        yield from PythonReader(stream, index).keywords()

    def write(self, arguments: str) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in _arguments_object(arguments).items())


def _found_anywhere(pattern: str) -> str:
    """A regex of texts in which a schema's pattern is found, as it stands between slashes."""
    slashed = regex_in_lark(pattern)
    begins, ends = slashed.startswith("^"), bool(re.search(r"(?<!\\)(\\\\)*\$$", slashed))
    inner = slashed[begins : len(slashed) - ends]
    # An anchor belongs to one alternative alone: such a pattern is left as it is, and refused where it is compiled.
    if "|" in inner and (begins or ends):
        return slashed
    return f"{'' if begins else ANY_TEXT}(?:{inner}){'' if ends else ANY_TEXT}"


def _arguments_object(arguments: str) -> dict[str, Any]:
    try:
        found = json.loads(arguments or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidRequestError("the arguments of an earlier tool call must be a JSON object", param="messages")
    return found


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else _json(value)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)
