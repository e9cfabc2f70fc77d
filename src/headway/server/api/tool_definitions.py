"""The tools of a request, and the choice of those that the model may or must call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec

from headway.server.api.api_errors import ApiError, bad_request
from headway.server.api.record_fields import ApiRecord, check_nesting
from headway.structured.tool_schemas import Tool

MAX_TOOLS = 512
MAX_TOOL_BYTES = 2**20
"""Largest size of all tools of a request together, as JSON."""
MAX_NAME_CHARS = 128
"""Anthropic's limit. OpenAI allows 64, but the name of a namespace may precede the tool's name."""
TOOL_NAME = re.compile(rf"[a-zA-Z0-9_.:-]{{1,{MAX_NAME_CHARS}}}")


class FunctionDefinition(ApiRecord, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """The JSON schema of the arguments object; None allows any object."""
    strict: bool | None = None
    """Arguments always follow a given schema, so this has no effect on tools that have one."""


class ToolDefinition(ApiRecord, kw_only=True):
    """Something that the model may call. Only functions are supported."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {"custom": (None,)}
    UNUSED: ClassVar[frozenset[str]] = frozenset({"cache_control", "defer_loading"})

    type: str = "function"
    function: FunctionDefinition | None = None
    custom: Any = None
    cache_control: dict[str, Any] | None = None
    defer_loading: bool | None = None

    def check_supported(self, path: str = "") -> None:
        """Require a function with a name; its parameters, if given, must be the schema of an object."""
        if self.type != "function":
            raise bad_request(
                f"'{path}type' is {self.type[:40]!r}; only tools of type 'function' are supported.",
                param=f"{path}type",
                code="unsupported_field",
            )
        super().check_supported(path)
        if self.function is None:
            raise bad_request(f"'{path}function' is required.", param=f"{path}function")
        if not TOOL_NAME.fullmatch(self.function.name):
            raise bad_request(
                f"'{path}function.name' must have 1 to {MAX_NAME_CHARS} letters, digits, or any of _ - . : and no "
                "others.",
                param=f"{path}function.name",
            )
        if self.function.parameters is not None:
            _check_parameters(self.function.parameters, f"{path}function.parameters")

    def as_tool(self) -> Tool:
        """Return the tool in the form that prompts and grammars use. The definition must have been checked."""
        function = self.function
        assert function is not None
        return Tool(
            name=function.name,
            description=function.description,
            parameters=function.parameters,
            strict=bool(function.strict),
        )


def _check_parameters(schema: dict[str, Any], path: str) -> None:
    check_nesting(schema, path)
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise bad_request(f"'{path}.type' must be 'object': arguments have names.", param=f"{path}.type")
    if not isinstance(schema.get("properties", {}), dict):
        raise bad_request(f"'{path}.properties' must be an object of schemas.", param=f"{path}.properties")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise bad_request(f"'{path}.required' must be a list of names.", param=f"{path}.required")


def check_tools(tools: Sequence[ToolDefinition], path: str) -> None:
    """Check all tools. Their number and size are checked first, because each tool takes time to check."""
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"'{path}' has {len(tools)} tools; there may be {MAX_TOOLS}.", param=path)
    places: dict[str, int] = {}
    for index, tool in enumerate(tools):
        tool.check_supported(f"{path}[{index}].")
        name = tool.as_tool().name
        if name in places:
            field = f"{path}[{index}].function.name"
            raise bad_request(f"'{field}' is {name!r}, as is that of '{path}[{places[name]}]'.", param=field)
        places[name] = index
    size = len(msgspec.json.encode(tools))
    if size > MAX_TOOL_BYTES:
        raise bad_request(f"'{path}' has {size} bytes of JSON; there may be {MAX_TOOL_BYTES}.", param=path)


class FunctionName(ApiRecord, kw_only=True):
    """One of the tools."""

    name: str


class NamedToolChoice(ApiRecord, kw_only=True, tag_field="type", tag="function"):
    """The function that must be called."""

    function: FunctionName


class AllowedTools(ApiRecord, kw_only=True):
    """Those of the tools that may be called now. The prompt has all of them, so its cached prefix stays."""

    mode: Literal["auto", "required"]
    tools: list[NamedToolChoice]


class AllowedToolChoice(ApiRecord, kw_only=True, tag_field="type", tag="allowed_tools"):
    """Some of the tools."""

    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolChoice


def check_tool_choice(choice: ToolChoice | None, tools: Sequence[ToolDefinition]) -> None:
    """Refuse a choice of tools that the request does not have. Choices that require no call need no tools."""
    if choice in (None, "none", "auto"):
        return
    if not tools:
        raise bad_request("'tool_choice' asks for a call, and there are no 'tools'.", param="tool_choice")
    known = {tool.as_tool().name for tool in tools}
    if isinstance(choice, NamedToolChoice) and choice.function.name not in known:
        raise _unknown_tool(choice.function.name, "tool_choice.function.name")
    if isinstance(choice, AllowedToolChoice):
        path = "tool_choice.allowed_tools.tools"
        if not choice.allowed_tools.tools:
            raise bad_request(f"'{path}' must not be empty.", param=path)
        for index, tool in enumerate(choice.allowed_tools.tools):
            if tool.function.name not in known:
                raise _unknown_tool(tool.function.name, f"{path}[{index}].function.name")


def _unknown_tool(name: str, path: str) -> ApiError:
    return bad_request(f"'{path}' is {name[:64]!r}, which none of the 'tools' is called.", param=path)
