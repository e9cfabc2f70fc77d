"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API as chat requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from headway.server.api.api_errors import ApiError, bad_request
from headway.server.api.api_translation import ChatMessages, Renaming, TranslatedRequest, given, record_by_type
from headway.server.api.record_fields import ApiRecord, check_nesting
from headway.server.api.requests import MAX_MESSAGES

MESSAGES_PATH = "/v1/messages"
"""Where errors have Anthropic's form."""
CACHE_TTL_S = {"5m": 300.0, "1h": 3600.0}
"""How long `cache_control` pins the prompt."""
ERROR_PREFIX = "Error: "
"""Before the result of a tool that failed: chat has no field for that."""
_Neutral = dict[str, tuple[Any, ...]]


class CacheControl(ApiRecord, kw_only=True):
    """The prompt up to here is needed again soon."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


# ---- content blocks -------------------------------------------------------------------------------------------------


class _Block(ApiRecord, kw_only=True):
    """What blocks share."""

    cache_control: CacheControl | None = None


class TextBlock(_Block, kw_only=True):
    """Text."""

    NEUTRAL: ClassVar[_Neutral] = {"citations": (None, [])}

    type: Literal["text"]
    text: str
    citations: Any = None


class ThinkingBlock(_Block, kw_only=True):
    """What the model thought. Thoughts are not signed here, so any signature will do."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(_Block, kw_only=True):
    """Thoughts in a form that only Anthropic can read; they are left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(_Block, kw_only=True):
    """A call that the model made earlier."""

    NEUTRAL: ClassVar[_Neutral] = {"caller": (None, {"type": "direct"}), "toolset_name": (None,)}

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None
    toolset_name: Any = None


class ToolResultBlock(_Block, kw_only=True):
    """What the client's tool answered."""

    NEUTRAL: ClassVar[_Neutral] = {"toolset_name": (None,)}

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Any] | None = None
    is_error: bool | None = None
    toolset_name: Any = None


_B = TypeVar("_B", bound=_Block)
_AssistantBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock
_UserBlock = TextBlock | ToolResultBlock
_TEXT: Mapping[str, type[TextBlock]] = {"text": TextBlock}
_OF_USER: Mapping[str, type[_UserBlock]] = {"text": TextBlock, "tool_result": ToolResultBlock}
_OF_ASSISTANT: Mapping[str, type[_AssistantBlock]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
    "tool_use": ToolUseBlock,
}


# ---- requests -------------------------------------------------------------------------------------------------------


class MessageParam(ApiRecord, kw_only=True):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Any]


class CustomTool(ApiRecord, kw_only=True):
    """A tool of the client's."""

    NEUTRAL: ClassVar[_Neutral] = {
        "defer_loading": (None, False),
        "allowed_callers": (None, ["direct"]),
        "input_examples": (None, []),
    }

    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = "custom"
    description: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    """Arguments are always streamed as they come."""
    defer_loading: Any = None
    allowed_callers: Any = None
    input_examples: Any = None


class MessageToolChoice(ApiRecord, kw_only=True):
    """Whether tools are called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(ApiRecord, kw_only=True):
    """Whether the model thinks first. `budget_tokens` is a target, not a limit: `max_tokens` bounds thoughts too."""

    NEUTRAL: ClassVar[_Neutral] = {"display": (None, "summarized")}

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Any = None


class Metadata(ApiRecord, kw_only=True):
    """Who asks."""

    user_id: str | None = None


class JsonFormat(ApiRecord, kw_only=True):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(ApiRecord, kw_only=True):
    """How hard the model tries, and what its text looks like."""

    effort: str | None = None
    format: JsonFormat | None = None


class CountTokensRequest(TranslatedRequest, kw_only=True):
    """What counts for the prompt."""

    NEUTRAL: ClassVar[_Neutral] = {
        "mcp_servers": (None, []),
        "context_management": (None,),
        "speed": (None, "standard"),
        "user_profile_id": (None,),
        "workspace_id": (None,),
    }

    model: str
    messages: list[MessageParam]
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    cache_control: CacheControl | None = None
    mcp_servers: Any = None
    context_management: Any = None
    speed: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None

    def check_supported(self, path: str = "") -> None:
        """Refuse what is not supported, here and in the records inside."""
        super().check_supported(path)
        if self.thinking is not None:
            self.thinking.check_supported("thinking.")
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise bad_request("'output_format' is the older name of 'output_config.format'; send one of them.")


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The body."""

    NEUTRAL: ClassVar[_Neutral] = CountTokensRequest.NEUTRAL | {
        "container": (None,),
        "diagnostics": (None,),
        "inference_geo": (None,),
        "service_tier": (None, "auto", "standard_only"),
    }

    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: Metadata | None = None
    container: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    service_tier: Any = None

    def check_supported(self, path: str = "") -> None:
        """The thinking too."""
        super().check_supported(path)
        thinking = self.thinking
        if thinking is not None and thinking.type == "enabled":
            if thinking.budget_tokens is None:
                raise bad_request("'thinking.budget_tokens' is required.", param="thinking.budget_tokens")
            if not 0 < thinking.budget_tokens < self.max_tokens:
                raise bad_request(
                    "'thinking.budget_tokens' must be above 0 and below 'max_tokens'.", param="thinking.budget_tokens"
                )


# ---- the translation ------------------------------------------------------------------------------------------------

MESSAGES_NAMES = Renaming(
    (r"messages\b.*", "messages"),  # the turns of a chat have other numbers
    (r"max_completion_tokens\b", "max_tokens"),
    (r"stop\b", "stop_sequences"),
    (r"response_format\.json_schema\b", "output_config.format"),
    (r"response_format\b", "output_config.format"),
    (r"reasoning_effort\b", "output_config.effort"),
    (r"(tools\[\d+\])\.function\.parameters\b", r"\1.input_schema"),
    (r"(tools\[\d+\])\.function\b", r"\1"),
    (r"tool_choice\.function\b", "tool_choice"),
    (r"user\b", "metadata.user_id"),
    (r"cache_ttl_s\b", "cache_control"),
)
"""Where the client finds what chat refuses."""


def chat_fields_of_message(request: MessagesRequest) -> dict[str, Any]:
    """The same request to /v1/chat/completions."""
    fields = {
        "max_completion_tokens": request.max_tokens,
        "stop": request.stop_sequences,
        "temperature": request.temperature,
        "top_k": request.top_k,
        "top_p": request.top_p,
        "user": request.metadata.user_id if request.metadata is not None else None,
        "response_format": _response_format(request),
    }
    return chat_fields_of_prompt(request) | given(fields)


def chat_fields_of_prompt(request: CountTokensRequest) -> dict[str, Any]:
    """As much of it as makes the prompt."""
    request.check_supported()
    translation = _Translation(request)
    ttl_s = max(translation.ttls_s, default=None)
    config = request.output_config
    fields = {
        "model": request.model,
        "messages": translation.messages,
        "tools": translation.tools or None,
        "tool_choice": None if request.tool_choice is None else _tool_choice(request.tool_choice),
        "reasoning_effort": None if config is None else config.effort,
        "cache_ttl_s": ttl_s,
        "chat_template_kwargs": _template_options(request.thinking),
    }
    if request.tool_choice is not None and request.tool_choice.disable_parallel_tool_use is not None:
        fields["parallel_tool_calls"] = not request.tool_choice.disable_parallel_tool_use
    if translation.continues_answer:
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    return given(fields) | request.shared_fields()


class _Translation:
    """The conversation and the tools as chat has them, and how long each block wants to be cached."""

    def __init__(self, request: CountTokensRequest) -> None:
        self.ttls_s: list[float] = []
        self._note_cache(request.cache_control)
        self.tools = [self._tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or ())]
        chat = ChatMessages()
        if request.system:
            chat.add_text("system", self._texts(request.system, "system"))
        if len(request.messages) > MAX_MESSAGES:
            raise bad_request(
                f"There are {len(request.messages)} messages; there may be {MAX_MESSAGES}.", param="messages"
            )
        for index, message in enumerate(request.messages):
            self._add(chat, message, f"messages[{index}].content")
        self.messages = chat.written()
        last = self.messages[-1] if self.messages else {}
        self.continues_answer = last.get("role") == "assistant" and "tool_calls" not in last

    def _add(self, chat: ChatMessages, message: MessageParam, path: str) -> None:
        if isinstance(message.content, str):
            chat.add_text(message.role, [message.content])
        elif message.role == "assistant":
            self._add_answer(chat, message.content, path)
        elif message.role == "system":
            chat.add_text("system", self._texts(message.content, path))
        else:
            self._add_question(chat, message.content, path)

    def _add_question(self, chat: ChatMessages, content: list[Any], path: str) -> None:
        """Results of tools are messages of their own; the text between them is the user's."""
        texts: list[str] = []
        for index, block in enumerate(self._blocks(content, path, _OF_USER)):
            if isinstance(block, TextBlock):
                texts.append(block.text)
                continue
            if texts:
                chat.add_text("user", texts)
                texts = []
            result = "\n".join(self._texts(block.content or "", f"{path}[{index}].content"))
            chat.add_result(block.tool_use_id, ERROR_PREFIX + result if block.is_error else result)
        if texts or not content:
            chat.add_text("user", texts)

    def _add_answer(self, chat: ChatMessages, content: list[Any], path: str) -> None:
        texts: list[str] = []
        calls: list[ToolUseBlock] = []
        for block in self._blocks(content, path, _OF_ASSISTANT):
            match block:
                case TextBlock():
                    texts.append(block.text)
                case ThinkingBlock():
                    chat.add_thoughts(block.thinking)
                case ToolUseBlock():
                    calls.append(block)
        if texts or not calls:
            chat.add_text("assistant", texts)
        for call in calls:
            check_nesting(call.input, f"{path}.input")
            chat.add_call(call.id, call.name, msgspec.json.encode(call.input).decode())

    def _texts(self, content: str | list[Any], path: str) -> list[str]:
        return [content] if isinstance(content, str) else [block.text for block in self._blocks(content, path, _TEXT)]

    def _blocks(self, content: list[Any], path: str, kinds: Mapping[str, type[_B]]) -> Iterator[_B]:
        for index, value in enumerate(content):
            block = record_by_type(value, f"{path}[{index}]", kinds)
            self._note_cache(block.cache_control)
            yield block

    def _tool(self, value: Any, path: str) -> dict[str, Any]:
        tool = record_by_type(value, path, {"custom": CustomTool}, default="custom")
        self._note_cache(tool.cache_control)
        function = {"name": tool.name, "parameters": tool.input_schema}
        described = given({"description": tool.description, "strict": tool.strict})
        return {"type": "function", "function": function | described}

    def _note_cache(self, control: CacheControl | None) -> None:
        if control is not None:
            self.ttls_s.append(CACHE_TTL_S[control.ttl])


def _tool_choice(choice: MessageToolChoice) -> str | dict[str, Any]:
    if (choice.type == "tool") != (choice.name is not None):
        raise bad_request(
            "'tool_choice.name' goes with the type 'tool', and is required there.", param="tool_choice.name"
        )
    if choice.name is not None:
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _template_options(thinking: Thinking | None) -> dict[str, Any] | None:
    """The name that templates of models with a switch know; `adaptive` leaves it to the model."""
    if thinking is None or thinking.type == "adaptive":
        return None
    return {"enable_thinking": thinking.type == "enabled"}


def _response_format(request: CountTokensRequest) -> dict[str, Any] | None:
    config = request.output_config
    wanted = request.output_format or (None if config is None else config.format)
    if wanted is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted.schema, "strict": True}}


# ---- errors ---------------------------------------------------------------------------------------------------------

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessageErrorBody(msgspec.Struct):
    """What is wrong, in Anthropic's names."""

    type: str
    message: str


class MessageError(msgspec.Struct, tag="error"):
    """The body of every answer of these routes that is not 2xx, and the last event of a stream that failed."""

    error: MessageErrorBody
    request_id: str | None = None


def message_error(failure: ApiError, *, request_id: str | None = None) -> MessageError:
    """An error object as Anthropic's clients read it."""
    kind = _ERROR_TYPES.get(failure.status, "invalid_request_error" if failure.status < 500 else "api_error")
    return MessageError(MessageErrorBody(kind, str(failure)), request_id)
