"""Renders a conversation with tools as the text of a prompt.

If the chat template renders tools, it gets them in OpenAI's shape, and earlier calls with arguments as objects. If it
does not, the tool format writes them as plain text: the tools into the system message, calls into the assistant's text,
and results as messages of the user.

The arguments of a call that was cut off are not a JSON object. The conversation goes on anyway: the template gets their
text unchanged, or an empty object if it cannot render text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headway.errors import InvalidRequestError
from headway.structured.tool_call_formats import ToolFormat, tool_format_for
from headway.structured.tool_schemas import MAX_NESTING, Tool, ToolCall, is_too_deep
from headway.tokenizer import Tokenizer
from headway.tokenizer.chat_template import check_messages

Message = Mapping[str, Any]

_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of a continued message while the template runs, which may trim the text and write more after it."""
_RENDERS_TOOLS = re.compile(r"\btools\b")
_SHORT_IDS = re.compile(r"id\s*\|\s*length\s*!=\s*9")
"""Mistral's templates refuse ids of calls that have not 9 letters and digits."""


def chat_text(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] = (),
    tool_format: ToolFormat | None = None,
    continue_final_message: bool = False,
    **template_options: Any,
) -> str:
    """The prompt's text. `template_options` are as in `Tokenizer.apply_chat_template`. Messages are in OpenAI's shape;
    what is wrong with them raises `InvalidRequestError`. Without a format, the one that fits the template is taken.
    With `continue_final_message` the text ends where the last message does."""
    if continue_final_message:
        marked = _with_mark(check_messages(messages))
        template_options["add_generation_prompt"] = False
        return _up_to_mark(chat_text(tokenizer, marked, tools=tools, tool_format=tool_format, **template_options))
    has_calls = any(_is_of_tools(message) for message in messages)
    if not tools and not has_calls:
        return tokenizer.apply_chat_template(messages, **template_options)
    checked = _with_objects(check_messages(messages))
    source = tokenizer.chat_template_for(has_tools=bool(tools)) or ""
    if renders_tools(source):
        if tools:
            template_options["tools"] = [_for_template(tool) for tool in tools]
        if _SHORT_IDS.search(source):
            checked = _with_short_ids(checked)
        return _render(tokenizer, checked, template_options)
    tool_format = tool_format or tool_format_for(source)
    checked = _as_text(checked, tool_format)
    if tools:
        checked = _with_system(checked, tool_format.instructions(tools))
    return tokenizer.apply_chat_template(checked, **template_options)


def renders_tools(template: str) -> bool:
    """Whether a chat template writes tools into the prompt by itself."""
    return bool(_RENDERS_TOOLS.search(template))


def _render(tokenizer: Tokenizer, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
    """Run a template that writes calls itself. Some templates iterate over arguments, which fails on text."""
    whole = _with_whole_calls(messages)
    if whole == messages:
        return tokenizer.apply_chat_template(messages, **options)
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except InvalidRequestError:
        return tokenizer.apply_chat_template(whole, **options)


def _is_of_tools(message: object) -> bool:
    return isinstance(message, Mapping) and (bool(message.get("tool_calls")) or message.get("role") == "tool")


def _with_mark(messages: Sequence[Message]) -> list[Message]:
    return [*messages[:-1], {**messages[-1], "content": _text(messages[-1]) + _CONTINUED}]


def _up_to_mark(rendered: str) -> str:
    """The template's text before the mark, without trailing spaces if the template trims them."""
    place = rendered.rfind(_CONTINUED.strip())
    if place < 0:
        raise InvalidRequestError(
            "the model's chat template does not write the last message, so it cannot be continued",
            param="continue_final_message",
        )
    before = rendered[:place]
    return before if rendered.startswith(_CONTINUED, place) else before.rstrip()


def tools_from(definitions: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Tools in OpenAI's shape, {"type": "function", "function": {"name": ..., "parameters": ...}}, as records."""
    return [_tool_from(index, definition) for index, definition in enumerate(definitions)]


def _tool_from(index: int, definition: object) -> Tool:
    path = f"tools[{index}]"
    function = definition.get("function") if isinstance(definition, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{path} needs 'function', an object with a name", param=f"{path}.function")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(f"{path}.function needs a name", param=f"{path}.function.name")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidRequestError(
            f"{path}.function.parameters must be a JSON schema, an object", param=f"{path}.function.parameters"
        )
    return Tool(
        name=name,
        description=function.get("description"),
        parameters=None if parameters is None else dict(parameters),
        strict=bool(function.get("strict")),
    )


def _for_template(tool: Tool) -> dict[str, Any]:
    """The tool with all of its keys, because templates read them without checking that they exist."""
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


# ---- earlier calls --------------------------------------------------------------------------------------------------


def _calls_of(message: Message, path: str) -> list[dict[str, Any]]:
    """The calls of a message, with their arguments as objects."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, Sequence):
        raise InvalidRequestError(f"{path}.tool_calls must be a list", param=f"{path}.tool_calls")
    return [_with_object(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(calls)]


def _with_object(call: object, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{path} needs 'function', an object with a name and arguments", param=path)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _object_or_text(arguments)
    elif not isinstance(arguments, Mapping) or is_too_deep(arguments):
        field = f"{path}.function.arguments"
        raise InvalidRequestError(
            f"'{field}' must be JSON of an object, at most {MAX_NESTING} levels deep.", param=field
        )
    return {**call, "function": {**function, "arguments": arguments}}


def _object_or_text(arguments: str) -> Mapping[str, Any] | str:
    """The JSON object in the text; or the text itself, if it is not one or is too deep for a template."""
    try:
        found = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, Mapping) and not is_too_deep(found) else arguments


def _with_whole_calls(messages: Sequence[Message]) -> list[Message]:
    """The same messages, with empty arguments in place of those that are text."""
    return [
        {**message, "tool_calls": [_whole(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _whole(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": {}}} if isinstance(function["arguments"], str) else call


def _with_objects(messages: Sequence[Message]) -> list[Message]:
    return [
        {**message, "tool_calls": _calls_of(message, f"messages[{index}]")} if message.get("tool_calls") else message
        for index, message in enumerate(messages)
    ]


def _with_short_ids(messages: Sequence[Message]) -> list[Message]:
    changed: list[Message] = []
    for message in messages:
        copy = dict(message)
        if copy.get("tool_calls"):
            copy["tool_calls"] = [{**call, "id": _short_id(call.get("id"))} for call in copy["tool_calls"]]
        if "tool_call_id" in copy:
            copy["tool_call_id"] = _short_id(copy["tool_call_id"])
        changed.append(copy)
    return changed


def _short_id(given: object) -> str:
    text = str(given)
    return text if len(text) == 9 and text.isalnum() else hashlib.sha256(text.encode()).hexdigest()[:9]


# ---- for templates without tools ------------------------------------------------------------------------------------


def _as_text(messages: Sequence[Message], tool_format: ToolFormat) -> list[Message]:
    """Calls and results as text. Results that follow each other are one message, because templates may insist on turns
    that alternate."""
    written: list[Message] = []
    after_result = False
    for message in messages:
        calls = message.get("tool_calls") or ()
        if message.get("role") == "tool":
            text = tool_format.write_result(_text(message))
            if after_result:
                text = f"{written.pop()['content']}\n{text}"
            written.append({"role": "user", "content": text})
        elif calls:
            text = _written(calls, tool_format)
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            written.append({**rest, "content": "\n".join(filter(None, (_text(message), text)))})
        else:
            written.append(message)
        after_result = message.get("role") == "tool"
    return written


def _written(calls: Sequence[Message], tool_format: ToolFormat) -> str:
    """Earlier calls in the format. One that reads arguments, to write them otherwise, cannot write broken ones."""
    try:
        return tool_format.write([_tool_call(call) for call in calls])
    except InvalidRequestError:
        return tool_format.write([_tool_call(_whole(dict(call))) for call in calls])


def _tool_call(call: Message) -> ToolCall:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    return ToolCall(name, arguments if isinstance(arguments, str) else _to_json(arguments))


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _with_system(messages: Sequence[Message], text: str) -> list[Message]:
    """Append text to the system message, or add one with this text."""
    if messages and messages[0].get("role") == "system":
        return [{**messages[0], "content": f"{_text(messages[0])}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _text(message: Message) -> str:
    """The text of a message, whose parts `check_messages` has joined."""
    return message.get("content") or ""
