"""What a request says its answer must look like: tools and which of them to call, a schema, a regular expression."""

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
"""Of all tools of a request together, as JSON."""
MAX_NAME_CHARS = 128
"""As Anthropic has it. OpenAI allows 64, but the name of a namespace may stand before that."""
TOOL_NAME = re.compile(rf"[a-zA-Z0-9_.:-]{{1,{MAX_NAME_CHARS}}}")


# ---- tools ----------------------------------------------------------------------------------------------------------


class FunctionDefinition(ApiRecord, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of an object; None: any object."""
    strict: bool | None = None
    """Arguments always follow the schema, so this changes nothing for those that have one."""


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
        """A function with a name and, where there are any, parameters that are an object's."""
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
        """The same for prompts and grammars. Its definition has been checked."""
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
    """How many and how large first: each of them takes some time."""
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
    """A choice must be of tools that there are. Without tools, those that ask for no call are harmless."""
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


# ---- the form of the text -------------------------------------------------------------------------------------------


class JsonSchemaFormat(ApiRecord, kw_only=True):
    """A schema and its name. Answers follow the schema with and without `strict`."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(ApiRecord, kw_only=True):
    """Free text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None
    """With `json_object`, in the form of some other servers."""

    def check_supported(self, path: str = "") -> None:
        """Each schema goes with its type."""
        if self.json_schema is not None and self.type != "json_schema":
            raise bad_request(
                f"'{path}json_schema' needs '{path}type' to be 'json_schema'.", param=f"{path}json_schema"
            )
        if self.schema is not None and self.type != "json_object":
            hint = f" Send '{path}json_schema.schema'." if self.type == "json_schema" else ""
            raise bad_request(f"'{path}schema' goes with the type 'json_object' only.{hint}", param=f"{path}schema")
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema is None):
            name = f"{path}json_schema" if self.json_schema is None else f"{path}json_schema.schema"
            raise bad_request(f"'{name}' is required.", param=name)
        given = self.given_schema
        if given is not None:
            check_nesting(given, f"{path}{self.schema_path}")

    @property
    def given_schema(self) -> dict[str, Any] | None:
        """The schema, in whichever of its places."""
        return self.schema if self.json_schema is None else self.json_schema.schema

    @property
    def schema_path(self) -> str:
        """Where that is."""
        return "schema" if self.json_schema is None else "json_schema.schema"


class StructuredOutputs(ApiRecord, kw_only=True):
    """vLLM's field for what a text must match: one of these."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None

    def check_supported(self, path: str = "") -> None:
        """One kind of constraint, not two."""
        given = self.given
        if len(given) != 1:
            raise bad_request(
                f"'{path[:-1]}' must have exactly one of 'json', 'regex', 'choice', 'grammar' and 'json_object'; it "
                f"has {len(given)}.",
                param=path[:-1],
            )
        if isinstance(self.json, dict):
            check_nesting(self.json, f"{path}json")
        for name in self.options:
            if "json" not in given and "json_object" not in given:
                raise bad_request(f"'{path}{name}' goes with 'json' and 'json_object' only.", param=f"{path}{name}")

    @property
    def given(self) -> dict[str, Any]:
        """The kinds that are given, with their values."""
        return self._said(("json", "regex", "choice", "grammar", "json_object"))

    @property
    def options(self) -> dict[str, Any]:
        """What is given besides."""
        return self._said(("disable_any_whitespace", "whitespace_pattern"))

    def _said(self, names: Sequence[str]) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None and value is not False}
