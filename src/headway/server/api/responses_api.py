"""POST /v1/responses: OpenAI's Responses API without its memory, as a chat request. Nothing is stored here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from headway.server.api.api_errors import ApiError, bad_request
from headway.server.api.api_translation import ChatMessages, Renaming, TranslatedRequest, given, record_by_type
from headway.server.api.record_fields import ApiRecord
from headway.server.api.requests import MAX_MESSAGES

LOGPROBS = "message.output_text.logprobs"
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
"""What `include` may name. Thoughts are answered as they are, so there is nothing to encrypt."""
_Neutral = dict[str, tuple[Any, ...]]
_Status = Literal["in_progress", "completed", "incomplete"]


# ---- input items ----------------------------------------------------------------------------------------------------


class TextPart(ApiRecord, kw_only=True):
    """Text of a message, written by a client or by a model."""

    NEUTRAL: ClassVar[_Neutral] = {"prompt_cache_breakpoint": (None,)}

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: Any = None


class RefusalPart(ApiRecord, kw_only=True):
    """A model's answer that it will not answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """It is text like any other for the model."""
        return self.refusal


class MessageItem(ApiRecord, kw_only=True):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Any]
    type: Literal["message"] = "message"
    id: str | None = None
    status: _Status | None = None
    phase: str | None = None


class FunctionCallItem(ApiRecord, kw_only=True):
    """A call that the model made earlier."""

    NEUTRAL: ClassVar[_Neutral] = {"namespace": (None,), "caller": (None, {"type": "direct"})}

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: _Status | None = None
    namespace: Any = None
    caller: Any = None


class FunctionCallOutputItem(ApiRecord, kw_only=True):
    """What the client's function answered."""

    NEUTRAL: ClassVar[_Neutral] = {"namespace": (None,), "caller": (None, {"type": "direct"})}

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Any]
    id: str | None = None
    name: str | None = None
    status: _Status | None = None
    namespace: Any = None
    caller: Any = None


class ReasoningItem(ApiRecord, kw_only=True):
    """What the model thought before it answered."""

    NEUTRAL: ClassVar[_Neutral] = {"encrypted_content": (None, "")}

    type: Literal["reasoning"]
    summary: list[Any] | None = None
    content: list[Any] | None = None
    id: str | None = None
    status: _Status | None = None
    encrypted_content: Any = None


_Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
_PARTS: Mapping[str, type[TextPart | RefusalPart]] = {
    "input_text": TextPart,
    "output_text": TextPart,
    "text": TextPart,
    "refusal": RefusalPart,
}
_THOUGHTS: Mapping[str, type[TextPart]] = {"reasoning_text": TextPart, "summary_text": TextPart}
_ITEMS: Mapping[str, type[_Item]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
}


# ---- the request ----------------------------------------------------------------------------------------------------


class FunctionTool(ApiRecord, kw_only=True):
    """A function that the model may call."""

    NEUTRAL: ClassVar[_Neutral] = {
        "defer_loading": (None, False),
        "allowed_callers": (None, ["direct"]),
        "output_schema": (None,),
    }

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Any = None
    allowed_callers: Any = None
    output_schema: Any = None


class NamedTool(ApiRecord, kw_only=True):
    """`tool_choice`: this function and no other."""

    type: Literal["function"]
    name: str


class AllowedTools(ApiRecord, kw_only=True):
    """`tool_choice`: some of the functions."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[Any]


class PlainFormat(ApiRecord, kw_only=True):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(ApiRecord, kw_only=True):
    """JSON of a schema."""

    type: Literal["json_schema"]
    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextConfig(ApiRecord, kw_only=True):
    """What the text of an answer looks like."""

    NEUTRAL: ClassVar[_Neutral] = {"verbosity": (None, "medium")}

    format: dict[str, Any] | None = None
    verbosity: Any = None


class ReasoningConfig(ApiRecord, kw_only=True):
    """How much the model thinks, and whether its thoughts are told as a summary. They are told in full then too."""

    NEUTRAL: ClassVar[_Neutral] = {"context": (None, "auto"), "mode": (None, "standard")}

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Any = None
    mode: Any = None


class ResponseStreamOptions(ApiRecord, kw_only=True):
    """What a stream carries besides its events."""

    NEUTRAL: ClassVar[_Neutral] = {"include_obfuscation": (None, False)}

    include_obfuscation: Any = None


class ResponsesRequest(TranslatedRequest, kw_only=True):
    """The body."""

    NEUTRAL: ClassVar[_Neutral] = {
        "background": (None, False),
        "conversation": (None,),
        "previous_response_id": (None,),
        "prompt": (None,),
        "context_management": (None, []),
        "moderation": (None,),
        "image": (None,),
        "access_programs": (None,),
        "prompt_cache_options": (None,),
        "prompt_cache_retention": (None, "in_memory"),
        "service_tier": (None, "auto", "default"),
        "truncation": (None, "disabled"),
    }

    input: str | list[Any]
    model: str | None = None
    instructions: str | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    reasoning: ReasoningConfig | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    top_k: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    store: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    background: Any = None
    conversation: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    image: Any = None
    access_programs: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None
    truncation: Any = None

    def check_supported(self, path: str = "") -> None:
        """Refuse what is not supported, here and in the records inside."""
        super().check_supported(path)
        if self.store:
            raise bad_request(
                "'store' must be false: nothing is stored by this server.", param="store", code="unsupported_field"
            )
        for name in ("text", "reasoning", "stream_options"):
            record = getattr(self, name)
            if record is not None:
                record.check_supported(f"{name}.")
        if self.stream_options is not None and not self.stream:
            raise bad_request("'stream_options' needs 'stream': true.", param="stream_options")
        for name in self.include or ():
            if name not in INCLUDED:
                raise bad_request(
                    f"'include' may have {' and '.join(INCLUDED)}, not {name[:80]!r}.",
                    param="include",
                    code="unsupported_field",
                )

    @property
    def wants_logprobs(self) -> bool:
        """`top_logprobs` alone asks for them too, as OpenAI has it."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def wants_summary(self) -> bool:
        """Whether thoughts are told as a summary, which is what most clients show."""
        reasoning = self.reasoning
        return reasoning is not None and (reasoning.summary or reasoning.generate_summary) is not None


# ---- the translation ------------------------------------------------------------------------------------------------

RESPONSES_NAMES = Renaming(
    (r"messages\b.*", "input"),
    (r"max(_completion)?_tokens\b", "max_output_tokens"),
    (r"response_format\.json_schema\b", "text.format"),
    (r"response_format\b", "text.format"),
    (r"reasoning_effort\b", "reasoning.effort"),
    (r"(tools\[\d+\])\.function\b", r"\1"),
    (r"tool_choice\.function\b", "tool_choice"),
    (r"tool_choice\.allowed_tools\b", "tool_choice"),
)
"""Where the client finds what chat refuses."""


def chat_fields_of_response(request: ResponsesRequest) -> dict[str, Any]:
    """The same request to /v1/chat/completions."""
    request.check_supported()
    reasoning = request.reasoning
    logprobs = {"logprobs": True, "top_logprobs": request.top_logprobs or 0} if request.wants_logprobs else {}
    fields = {
        "model": request.model,
        "messages": _messages(request),
        "tools": _tools(request.tools) or None,
        "tool_choice": None if request.tool_choice is None else _tool_choice(request.tool_choice),
        "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": _response_format(request.text),
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "reasoning_effort": None if reasoning is None else reasoning.effort,
        "user": request.user,
        "stop": request.stop,
        "seed": request.seed,
        "top_k": request.top_k,
        "min_tokens": request.min_tokens,
        "ignore_eos": request.ignore_eos,
    }
    return given(fields) | logprobs | request.shared_fields()


def not_stored(response_id: str) -> ApiError:
    """404 for whatever asks for an earlier answer."""
    return ApiError(
        404,
        f"There is no response '{response_id[:80]}': this server stores none. Send the whole conversation as 'input'.",
        code="not_stored",
    )


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    messages = ChatMessages()
    if request.instructions:
        messages.add_text("system", [request.instructions])
    if isinstance(request.input, str):
        messages.add_text("user", [request.input])
        return messages.written()
    if len(request.input) > MAX_MESSAGES:
        raise bad_request(f"'input' has {len(request.input)} items; there may be {MAX_MESSAGES}.", param="input")
    for index, value in enumerate(request.input):
        path = f"input[{index}]"
        item = record_by_type(value, path, _ITEMS, default="message")
        match item:
            case MessageItem():
                role = "system" if item.role == "developer" else item.role
                messages.add_text(role, _texts(item.content, f"{path}.content", _PARTS))
            case FunctionCallItem():
                messages.add_call(item.call_id, item.name, item.arguments)
            case FunctionCallOutputItem():
                messages.add_result(item.call_id, "\n".join(_texts(item.output, f"{path}.output", _PARTS)))
            case ReasoningItem():
                thoughts = _texts(item.content or [], f"{path}.content", _THOUGHTS)
                messages.add_thoughts("".join(thoughts or _texts(item.summary or [], f"{path}.summary", _THOUGHTS)))
    return messages.written()


def _texts(content: str | list[Any], path: str, kinds: Mapping[str, type[TextPart | RefusalPart]]) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [record_by_type(part, f"{path}[{index}]", kinds).text for index, part in enumerate(content)]


def _tools(tools: list[Any] | None) -> list[dict[str, Any]]:
    found = [
        record_by_type(tool, f"tools[{index}]", {"function": FunctionTool}) for index, tool in enumerate(tools or ())
    ]
    return [
        {
            "type": "function",
            "function": {"name": tool.name}
            | given({"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}),
        }
        for tool in found
    ]


def _tool_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(choice, str):
        return choice
    kinds: Mapping[str, type[NamedTool | AllowedTools]] = {"function": NamedTool, "allowed_tools": AllowedTools}
    record = record_by_type(choice, "tool_choice", kinds)
    if isinstance(record, NamedTool):
        return _named(record)
    allowed = [
        _named(record_by_type(tool, f"tool_choice.tools[{index}]", {"function": NamedTool}))
        for index, tool in enumerate(record.tools)
    ]
    return {"type": "allowed_tools", "allowed_tools": {"mode": record.mode, "tools": allowed}}


def _named(tool: NamedTool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name}}


def _response_format(text: TextConfig | None) -> dict[str, Any] | None:
    if text is None or text.format is None:
        return None
    kinds: Mapping[str, type[PlainFormat | SchemaFormat]] = {
        "text": PlainFormat,
        "json_object": PlainFormat,
        "json_schema": SchemaFormat,
    }
    record = record_by_type(text.format, "text.format", kinds)
    if isinstance(record, PlainFormat):
        return {"type": record.type}
    schema = {"name": record.name, "schema": record.schema}
    return {
        "type": "json_schema",
        "json_schema": schema | given({"description": record.description, "strict": record.strict}),
    }
