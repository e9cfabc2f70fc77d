"""Translates the input items of `/v1/responses` into messages of a chat request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from headway.server.api.api_errors import bad_request
from headway.server.api.api_translation import ChatMessages, given, record_by_type
from headway.server.api.record_fields import ApiRecord, check_nesting
from headway.server.api.response_tools import custom_arguments, flat_name
from headway.server.limits import LIMITS

_Neutral = dict[str, tuple[Any, ...]]
_Status = Literal["in_progress", "completed", "incomplete", "failed"]
LOCAL_SHELL = "local_shell"
"""Name of the function that represents OpenAI's shell tool in a conversation."""


# ---- content --------------------------------------------------------------------------------------------------------


class TextPart(ApiRecord, kw_only=True):
    """Text of a message, written by a client or by a model."""

    NEUTRAL: ClassVar[_Neutral] = {"prompt_cache_breakpoint": (None,)}
    UNUSED: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs", "parsed"})

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None
    """The text as parsed by OpenAI's client, which sends it back with the text."""
    prompt_cache_breakpoint: Any = None


class RefusalPart(ApiRecord, kw_only=True):
    """A model's refusal to answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """The refusal, which the model reads as ordinary text."""
        return self.refusal


_PARTS: Mapping[str, type[TextPart | RefusalPart]] = {
    "input_text": TextPart,
    "output_text": TextPart,
    "text": TextPart,
    "refusal": RefusalPart,
}
_THOUGHTS: Mapping[str, type[TextPart]] = {"reasoning_text": TextPart, "summary_text": TextPart, "text": TextPart}


# ---- items ----------------------------------------------------------------------------------------------------------


class _Item(ApiRecord, kw_only=True):
    """Fields that all items share."""

    UNUSED: ClassVar[frozenset[str]] = frozenset({"id", "status"})

    id: str | None = None
    status: _Status | None = None


class MessageItem(_Item, kw_only=True):
    """A turn of the conversation."""

    UNUSED: ClassVar[frozenset[str]] = _Item.UNUSED | {"phase"}

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Any]
    type: Literal["message"] = "message"
    phase: str | None = None


class _CallItem(_Item, kw_only=True):
    """Fields that calls and their results share."""

    NEUTRAL: ClassVar[_Neutral] = {"caller": (None, {"type": "direct"})}

    call_id: str
    namespace: str | None = None
    caller: Any = None


class FunctionCallItem(_CallItem, kw_only=True):
    """A call that the model made earlier."""

    UNUSED: ClassVar[frozenset[str]] = _Item.UNUSED | {"parsed_arguments"}

    type: Literal["function_call"]
    name: str
    arguments: str
    parsed_arguments: Any = None
    """The arguments as parsed by OpenAI's client."""


class CustomToolCallItem(_CallItem, kw_only=True):
    """A call of a custom tool, which has text instead of arguments."""

    type: Literal["custom_tool_call"]
    name: str
    input: str


class CallOutputItem(_CallItem, kw_only=True):
    """The result of a call of a function or custom tool."""

    UNUSED: ClassVar[frozenset[str]] = _Item.UNUSED | {"name", "namespace"}

    type: Literal["function_call_output", "custom_tool_call_output"]
    output: str | list[Any]
    name: str | None = None


class ShellCallItem(_Item, kw_only=True):
    """A command that one of OpenAI's models made the client run."""

    type: Literal["local_shell_call"]
    action: dict[str, Any]
    call_id: str | None = None


class ShellOutputItem(_Item, kw_only=True):
    """The output of the command. `id` is that of the call."""

    type: Literal["local_shell_call_output"]
    output: str
    call_id: str | None = None


class ReasoningItem(_Item, kw_only=True):
    """The model's reasoning before its answer. Encrypted reasoning comes from other servers and is left out."""

    UNUSED: ClassVar[frozenset[str]] = _Item.UNUSED | {"encrypted_content"}

    type: Literal["reasoning"]
    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: str | None = None


class WebSearchItem(_Item, kw_only=True):
    """A web search made by another server. Items do not have its results, so it is left out of the prompt."""

    UNUSED: ClassVar[frozenset[str]] = _Item.UNUSED | {"action"}

    type: Literal["web_search_call"]
    action: dict[str, Any] | None = None


_AnyItem = (
    MessageItem
    | FunctionCallItem
    | CustomToolCallItem
    | CallOutputItem
    | ShellCallItem
    | ShellOutputItem
    | ReasoningItem
    | WebSearchItem
)
_ITEMS: Mapping[str, type[_AnyItem]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": CallOutputItem,
    "custom_tool_call": CustomToolCallItem,
    "custom_tool_call_output": CallOutputItem,
    "local_shell_call": ShellCallItem,
    "local_shell_call_output": ShellOutputItem,
    "reasoning": ReasoningItem,
    "web_search_call": WebSearchItem,
}


def chat_messages(instructions: str | None, items: str | Sequence[Any] | None) -> list[dict[str, Any]]:
    """Return the instructions and items as the messages of a chat request."""
    messages = ChatMessages()
    if instructions:
        messages.add_text("system", [instructions])
    if isinstance(items, str):
        messages.add_text("user", [items])
        return messages.written()
    items = items or ()
    if len(items) > LIMITS.max_messages:
        raise bad_request(f"'input' has {len(items)} items; there may be {LIMITS.max_messages}.", param="input")
    for index, value in enumerate(items):
        _add(messages, record_by_type(value, f"input[{index}]", _ITEMS, default="message"), f"input[{index}]")
    return messages.written()


def _add(messages: ChatMessages, item: _AnyItem, path: str) -> None:
    match item:
        case MessageItem():
            role = "system" if item.role == "developer" else item.role
            messages.add_text(role, _texts(item.content, f"{path}.content", _PARTS))
        case FunctionCallItem():
            messages.add_call(item.call_id, flat_name(item.name, item.namespace), item.arguments)
        case CustomToolCallItem():
            messages.add_call(item.call_id, flat_name(item.name, item.namespace), custom_arguments(item.input))
        case CallOutputItem():
            messages.add_result(item.call_id, "\n".join(_texts(item.output, f"{path}.output", _PARTS)))
        case ShellCallItem():
            messages.add_call(item.call_id or item.id or "", LOCAL_SHELL, _shell_arguments(item, path))
        case ShellOutputItem():
            messages.add_result(item.call_id or item.id or "", item.output)
        case ReasoningItem():
            thoughts = _texts(item.content or [], f"{path}.content", _THOUGHTS)
            messages.add_thoughts("".join(thoughts or _texts(item.summary or [], f"{path}.summary", _THOUGHTS)))
        case WebSearchItem():
            pass


def _shell_arguments(item: ShellCallItem, path: str) -> str:
    check_nesting(item.action, f"{path}.action")
    shown = ("command", "working_directory", "timeout_ms", "env", "user")
    return msgspec.json.encode(given({name: item.action.get(name) for name in shown})).decode()


def _texts(content: str | list[Any], path: str, kinds: Mapping[str, type[TextPart | RefusalPart]]) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [record_by_type(part, f"{path}[{index}]", kinds).text for index, part in enumerate(content)]
