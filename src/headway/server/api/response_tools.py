"""Translates tools of `/v1/responses` into chat functions, and names their calls as the client named the tools.

A tool in a namespace becomes a function called `NAMESPACE__NAME`, as in vLLM. A custom tool, whose input is free text,
becomes a function with the single argument `input`. Calls are returned with the namespace, or with the text.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import msgspec

from headway.server.api.api_errors import bad_request
from headway.server.api.api_translation import given, leave_out_hosted_tool, record_by_type
from headway.server.api.record_fields import ApiRecord
from headway.server.api.tool_definitions import MAX_TOOLS

HOSTED_TOOLS = frozenset(
    {
        *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
        *("file_search", "code_interpreter", "image_generation", "mcp", "tool_search", "programmatic_tool_calling"),
        *("computer", "computer_use_preview", "local_shell", "shell", "apply_patch"),
    }
)
"""Types of tools that OpenAI runs itself, or whose format only its models were trained on."""
CUSTOM_INPUT = "input"
"""Name of the single argument of a custom tool's function."""


class _Tool(ApiRecord, kw_only=True):
    """Fields that functions and custom tools share."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {"allowed_callers": (None, ["direct"])}
    UNUSED: ClassVar[frozenset[str]] = frozenset({"defer_loading"})

    name: str
    description: str | None = None
    defer_loading: bool | None = None
    """Every tool is shown to the model at once, because there is no search for tools here."""
    allowed_callers: Any = None


class FunctionTool(_Tool, kw_only=True):
    """A function that the model may call."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {**_Tool.NEUTRAL, "output_schema": (None,)}

    type: Literal["function"]
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: Any = None


class CustomFormat(ApiRecord, kw_only=True):
    """The format of a custom tool's input."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(_Tool, kw_only=True):
    """A tool whose input is text."""

    type: Literal["custom"]
    format: CustomFormat | None = None


class NamespaceTool(ApiRecord, kw_only=True):
    """A group of tools whose names share a prefix."""

    type: Literal["namespace"]
    name: str
    tools: list[Any]
    description: str | None = None


@dataclass(frozen=True)
class SentTool:
    """A tool that the client sent, and its path in the body."""

    tool: FunctionTool | CustomTool
    path: str
    namespace: str | None = None

    @property
    def flat_name(self) -> str:
        """The name that the model sees."""
        return flat_name(self.tool.name, self.namespace)

    @property
    def is_custom(self) -> bool:
        """Whether the tool is a custom tool, with text as its input."""
        return isinstance(self.tool, CustomTool)

    def as_chat(self) -> dict[str, Any]:
        """Return the tool's definition in a chat request."""
        tool = self.tool
        if isinstance(tool, CustomTool):
            described = given({"description": _with_grammar(tool)})
            return {"type": "function", "function": {"name": self.flat_name, "parameters": _INPUT_SCHEMA} | described}
        described = given({"description": tool.description, "parameters": tool.parameters, "strict": tool.strict})
        return {"type": "function", "function": {"name": self.flat_name} | described}


_INPUT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}
_KINDS: Mapping[str, type[FunctionTool | CustomTool | NamespaceTool]] = {
    "function": FunctionTool,
    "custom": CustomTool,
    "namespace": NamespaceTool,
}
_IN_NAMESPACE: Mapping[str, type[FunctionTool | CustomTool]] = {"function": FunctionTool, "custom": CustomTool}


def flat_name(name: str, namespace: str | None) -> str:
    """Return the function name of a tool that may be in a namespace."""
    return f"{namespace}__{name}" if namespace else name


def sent_tools(tools: Sequence[Any] | None, *, must_call: bool = False) -> list[SentTool]:
    """Return all tools of a request. Hosted tools are left out; if a tool must be called they raise 400."""
    found = list(_unfolded(tools or (), must_call=must_call))
    for name, number in Counter(tool.flat_name for tool in found).items():
        if number > 1:
            second = [tool for tool in found if tool.flat_name == name][1]
            raise bad_request(f"'{second.path}.name' makes a second tool called {name!r}.", param=f"{second.path}.name")
    return found


def _unfolded(tools: Sequence[Any], *, must_call: bool) -> Iterator[SentTool]:
    number = len(tools)
    _check_number(number)
    for index, value in enumerate(tools):
        path = f"tools[{index}]"
        kind = value.get("type") if isinstance(value, dict) else None
        if kind in HOSTED_TOOLS:
            leave_out_hosted_tool(kind, path, must_call=must_call)
            continue
        tool = record_by_type(value, path, _KINDS)
        if not isinstance(tool, NamespaceTool):
            yield SentTool(tool, path)
            continue
        number += len(tool.tools)
        _check_number(number)
        for place, inner in enumerate(tool.tools):
            inner_path = f"{path}.tools[{place}]"
            yield SentTool(record_by_type(inner, inner_path, _IN_NAMESPACE), inner_path, tool.name)


def _check_number(number: int) -> None:
    """Raise 400 for too many tools, because each one takes time to process."""
    if number > MAX_TOOLS:
        raise bad_request(f"'tools' has {number} tools; there may be {MAX_TOOLS}.", param="tools")


def _with_grammar(tool: CustomTool) -> str | None:
    """Return the tool's description with its grammar: inside JSON the grammar cannot be enforced, only described."""
    form = tool.format
    if form is None or not form.definition:
        return tool.description
    words = f"The input must match this {form.syntax or 'lark'} grammar:\n{form.definition}"
    return "\n\n".join(filter(None, (tool.description, words)))


def custom_input(arguments: str) -> str:
    """Return a custom tool's input text from the arguments of its function. The arguments may be cut off."""
    for ending in ("", '"}', "}"):
        with contextlib.suppress(msgspec.DecodeError):
            return str(msgspec.json.decode(arguments + ending, type=dict[str, Any]).get(CUSTOM_INPUT, ""))
    return ""


def custom_arguments(text: str) -> str:
    """Return the arguments of a custom tool's function for this input text."""
    return msgspec.json.encode({CUSTOM_INPUT: text}).decode()


# ---- tool_choice ----------------------------------------------------------------------------------------------------


class NamedTool(ApiRecord, kw_only=True):
    """A `tool_choice` that requires this tool."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedTools(ApiRecord, kw_only=True):
    """A `tool_choice` that allows only some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[Any]


_CHOICES: Mapping[str, type[NamedTool | AllowedTools]] = {
    "function": NamedTool,
    "custom": NamedTool,
    "allowed_tools": AllowedTools,
}
_NAMED: Mapping[str, type[NamedTool]] = {"function": NamedTool, "custom": NamedTool}


def must_call(choice: str | dict[str, Any] | None) -> bool:
    """Whether `tool_choice` requires a call of any tool."""
    return choice == "required" or (isinstance(choice, dict) and choice.get("mode") == "required")


def chat_tool_choice(choice: str | dict[str, Any], tools: Sequence[SentTool]) -> str | dict[str, Any]:
    """Return the `tool_choice` of a chat request."""
    if isinstance(choice, str):
        return choice
    record = record_by_type(choice, "tool_choice", _CHOICES)
    if isinstance(record, NamedTool):
        return _named(record, tools)
    allowed = [
        _named(record_by_type(tool, f"tool_choice.tools[{index}]", _NAMED), tools)
        for index, tool in enumerate(record.tools)
    ]
    return {"type": "allowed_tools", "allowed_tools": {"mode": record.mode, "tools": allowed}}


def _named(choice: NamedTool, tools: Sequence[SentTool]) -> dict[str, Any]:
    """Return the chat form of a named tool. The namespace may be left out if the name is unique without it."""
    name = flat_name(choice.name, choice.namespace)
    known = {tool.flat_name for tool in tools}
    if name not in known and choice.namespace is None:
        inside = [tool.flat_name for tool in tools if tool.tool.name == choice.name]
        name = inside[0] if len(inside) == 1 else name
    return {"type": "function", "function": {"name": name}}
