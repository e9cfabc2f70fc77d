"""How models write tool calls: one description per format.

A description is a sequence of parts: texts, markers, whitespace, the tool's name, its arguments. The grammar that
forces the format, the parser of outputs and the writer of earlier calls are all derived from it, so that they cannot
disagree. To add a format, add its description to `TOOL_FORMATS`, and what its chat template shows to `_TEMPLATE_SIGNS`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeAlias

from headway.structured.grammars import SPACES
from headway.structured.tool_arguments import ArgumentsFormat, JsonArguments, PythonArguments, XmlParameters
from headway.structured.tool_schemas import Tool, ToolCall


@dataclass(frozen=True)
class Text:
    """Exactly this text."""

    text: str


@dataclass(frozen=True)
class Marker:
    """A text that is a special token in some vocabularies. An `optional` one is read, but never written."""

    text: str
    optional: bool = False


@dataclass(frozen=True)
class Extra:
    """A text that some models add: read, but never written."""

    text: str


@dataclass(frozen=True)
class Space:
    """Whitespace of any amount; `written` is what models were trained on."""

    written: str = ""


@dataclass(frozen=True)
class Name:
    """The name of the tool."""


@dataclass(frozen=True)
class Arguments:
    form: ArgumentsFormat


Part: TypeAlias = Text | Marker | Extra | Space | Name | Arguments


@dataclass(frozen=True)
class PartsMatch:
    """Where a match of parts ends in the text, and which tool it names."""

    end: int
    name: str


@dataclass(frozen=True)
class Undecided:
    """More text must decide whether parts match."""


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes its calls: `opening`, calls with `between` between them, `closing`.

    Without an opening, each call stands on its own, and text may come between calls. `only_at_start`: calls have no
    marker, so what distinguishes them from text is that they stand at the start of the output.
    """

    name: str
    call: tuple[Part, ...]
    between: tuple[Part, ...]
    opening: tuple[Part, ...] = ()
    closing: tuple[Part, ...] = ()
    only_at_start: bool = False
    result: tuple[str, str] = ("", "")

    @property
    def is_list(self) -> bool:
        """Whether all calls stand together, in one list."""
        return self.only_at_start or bool(self.opening)

    @property
    def head(self) -> tuple[Part, ...]:
        """The beginning of a call: up to what follows the name."""
        return self.call[: self.call.index(Name()) + 2]

    @property
    def tail(self) -> tuple[Part, ...]:
        return self.call[len(self.head) :]

    @property
    def trigger(self) -> Marker:
        """The marker at which text ends and calls begin; only formats that are not `only_at_start` have one."""
        first = (self.opening + self.call)[0]
        if not isinstance(first, Marker):
            raise ValueError(f"format '{self.name}' begins with no marker")
        return first

    @property
    def marked(self) -> ToolFormat:
        """The same format, in which calls begin with a marker that is optional otherwise."""
        opening = [replace(part, optional=False) if isinstance(part, Marker) else part for part in self.opening]
        return replace(self, opening=tuple(opening))

    @property
    def markers(self) -> tuple[str, ...]:
        parts = (*self.opening, *self.call, *self.between, *self.closing)
        return tuple(dict.fromkeys(part.text for part in parts if isinstance(part, Marker)))

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Earlier calls as the model would have written them."""
        if not calls:
            return ""
        separator = "".join(map(_written, self.between))
        texts = ["".join(_written(part, call) for part in self.call) for call in calls]
        return "".join([*map(_written, self.opening), separator.join(texts), *map(_written, self.closing)])

    def write_result(self, content: str) -> str:
        """Write the result of a call, for templates that have no role for results."""
        return f"{self.result[0]}{content}{self.result[1]}"

    def instructions(self, tools: Sequence[Tool]) -> str:
        """Text that describes the tools to the model, for templates that do not."""
        described = "\n".join(json.dumps(_description(tool), ensure_ascii=False) for tool in tools)
        example = ToolCall("function-name", '{"parameter-name": "value"}')
        return (
            "You may call functions to help with the user's request. These are the functions, as JSON schemas:\n"
            f"<tools>\n{described}\n</tools>\n\n"
            "To call a function, answer in exactly this form, with its own name and parameters:\n"
            f"{self.write([example])}\n\n"
            f"To call several functions at once, write:\n{self.write([example, example])}"
        )


def _json_call(arguments_key: str, *extra: Part) -> tuple[Part, ...]:
    """`{"name": "f", "arguments": {...}}`, in this order of keys."""
    return (
        *(Text("{"), Space(), *extra, Text('"name"'), Space(), Text(":"), Space(" "), Text('"'), Name(), Text('"')),
        *(Space(), Text(","), Space(" "), Text(f'"{arguments_key}"'), Space(), Text(":"), Space(" ")),
        *(Arguments(JsonArguments()), Space(), Text("}")),
    )


_RESPONSE_TAGS = ("<tool_response>\n", "\n</tool_response>")

_FORMATS = (
    ToolFormat(
        "hermes",
        call=(Marker("<tool_call>"), Space("\n"), *_json_call("arguments"), Space("\n"), Marker("</tool_call>")),
        between=(Space("\n"),),
        result=_RESPONSE_TAGS,
    ),
    ToolFormat(
        "llama3_json",
        opening=(Marker("<|python_tag|>", optional=True), Space()),
        call=_json_call("parameters", Extra('"type": "function", ')),
        between=(Space(), Text(";"), Space(" ")),
        only_at_start=True,
    ),
    ToolFormat(
        "mistral",
        opening=(Marker("[TOOL_CALLS]"), Space(" "), Text("["), Space()),
        call=_json_call("arguments"),
        between=(Space(), Text(","), Space(" ")),
        closing=(Space(), Text("]")),
        result=("[TOOL_RESULTS] ", "[/TOOL_RESULTS]"),
    ),
    ToolFormat(
        "mistral_args",
        call=(Marker("[TOOL_CALLS]"), Name(), Marker("[ARGS]"), Arguments(JsonArguments())),
        between=(),
        result=("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ),
    ToolFormat(
        "qwen3_coder",
        call=(
            *(Marker("<tool_call>"), Space("\n"), Text("<function="), Name(), Text(">"), Space("\n")),
            *(Arguments(XmlParameters()), Space(), Text("</function>"), Space("\n"), Marker("</tool_call>")),
        ),
        between=(Space("\n"),),
        result=_RESPONSE_TAGS,
    ),
    ToolFormat(
        "pythonic",
        opening=(Marker("<|python_start|>", optional=True), Space(), Text("["), Space()),
        call=(Name(), Text("("), Space(), Arguments(PythonArguments()), Space(), Text(")")),
        between=(Space(), Text(","), Space(" ")),
        closing=(Space(), Text("]"), Marker("<|python_end|>", optional=True)),
        only_at_start=True,
    ),
)
USUAL_TOOL_FORMAT = "hermes"
"""The format for models whose chat template shows none."""
TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType({one.name: one for one in _FORMATS})

# What the chat templates of a format's models contain, the more telling ones first. All texts of a row must be there.
_TEMPLATE_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("hermes", ("<tool_call>",)),
    ("mistral_args", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("pythonic", ("<|python_start|>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('"parameters": dictionary of argument name',)),
)


def shown_tool_format(chat_template: str | None) -> ToolFormat | None:
    """The format that a model's chat template shows, if it is one of those known here."""
    template = chat_template or ""
    found = (name for name, signs in _TEMPLATE_SIGNS if all(sign in template for sign in signs))
    name = next(found, None)
    return None if name is None else TOOL_FORMATS[name]


def tool_format_for(chat_template: str | None) -> ToolFormat:
    """The format that a model's chat template shows; `hermes` where it shows none."""
    return shown_tool_format(chat_template) or TOOL_FORMATS[USUAL_TOOL_FORMAT]


def _written(part: Part, call: ToolCall | None = None) -> str:
    match part:
        case Text(text):
            return text
        case Marker(text, optional):
            return "" if optional else text
        case Space(text):
            return text
        case Extra():
            return ""
        case Name():
            return call.name if call else ""
        case Arguments(form):
            return form.write(call.arguments) if call else ""


def match_parts(
    parts: Sequence[Part], text: str, *, names: Sequence[str], ended: bool, at: int = 0, name: str = ""
) -> PartsMatch | Undecided | None:
    """Match parts without arguments from `at` on. None: they are not there.

    If several ways are possible, the first one counts. While it is undecided the result is too, so that later text
    never changes a result.
    """
    if not parts:
        return PartsMatch(at, name)
    part, rest = parts[0], parts[1:]
    match part:
        case Space():
            end = len(text) - len(text[at:].lstrip(SPACES))
            return match_parts(rest, text, names=names, ended=ended, at=end, name=name)
        case Name():
            options = [(one, one) for one in names]
        case Extra(wanted) | Marker(wanted, True):
            options = [(wanted, name), ("", name)]
        case Text(wanted) | Marker(wanted):
            options = [(wanted, name)]
        case Arguments():
            raise ValueError("arguments are read, not matched")
    for wanted, called in options:
        there = text[at : at + len(wanted)]
        if there == wanted:
            end = at + len(wanted)
            found = match_parts(rest, text, names=names, ended=ended, at=end, name=called)
            if found is not None:
                return found
        elif wanted.startswith(there) and not ended:
            return Undecided()
    return None


def _description(tool: Tool) -> dict[str, object]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}
