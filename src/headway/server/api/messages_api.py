"""Translates Anthropic's Messages API (/v1/messages and its count_tokens) into chat requests."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import msgspec

from headway.server.api.api_errors import ApiError, bad_request
from headway.server.api.api_translation import (
    ChatMessages,
    TranslatedRequest,
    given,
    leave_out_hosted_tool,
    record_by_type,
)
from headway.server.api.field_names import Renaming
from headway.server.api.message_blocks import (
    OF_ASSISTANT,
    OF_USER,
    TEXT,
    Block,
    CacheControl,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from headway.server.api.record_fields import ApiRecord, check_nesting
from headway.server.limits import LIMITS

CACHE_TTL_S = {"5m": 300.0, "1h": 3600.0}
"""How long each `ttl` of `cache_control` pins the prompt's blocks."""
ERROR_PREFIX = "Error: "
"""Prefix for the result of a tool that failed. Chat messages have no field for failure."""
HOSTED_TOOLS = re.compile(r"(?P<kind>web_search|web_fetch|code_execution|tool_search_tool_(regex|bm25))_\d{8}")
"""Types of the tools that Anthropic runs. Each ends with a date, which the log leaves out."""
_Neutral = dict[str, tuple[Any, ...]]
_B = TypeVar("_B", bound=Block)


# ---- requests -------------------------------------------------------------------------------------------------------


class MessageParam(ApiRecord, kw_only=True):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Any]


class CustomTool(ApiRecord, kw_only=True):
    """A tool of the client's."""

    NEUTRAL: ClassVar[_Neutral] = {
        "allowed_callers": (None, ["direct"]),
        "input_examples": (None, []),
    }
    UNUSED: ClassVar[frozenset[str]] = frozenset({"defer_loading", "eager_input_streaming"})

    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = "custom"
    description: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    """Accepted and ignored: arguments are always streamed as they are generated."""
    defer_loading: bool | None = None
    """Every tool is shown to the model at once, because there is no search for tools here."""
    allowed_callers: Any = None
    input_examples: Any = None


class MessageToolChoice(ApiRecord, kw_only=True):
    """Whether tools are called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(ApiRecord, kw_only=True):
    """Whether the model thinks first. `budget_tokens` is a target, not a limit: `max_tokens` bounds thoughts too."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None
    """With `omitted`, thinking blocks in the answer are empty. Otherwise they have the full text."""


class Metadata(ApiRecord, kw_only=True):
    """Who asks."""

    user_id: str | None = None


class ClearThinking(ApiRecord, kw_only=True):
    """An edit that selects the turns that keep their reasoning. Only keeping all of it is supported."""

    NEUTRAL: ClassVar[_Neutral] = {"keep": ("all", {"type": "all"})}

    type: Literal["clear_thinking_20251015"]
    keep: Any = None


class ContextManagement(ApiRecord, kw_only=True):
    """Edits of the conversation before it is answered."""

    edits: list[Any] | None = None

    def check_supported(self, path: str = "") -> None:
        """Refuse edits that would remove something from the prompt."""
        for index, edit in enumerate(self.edits or ()):
            record_by_type(edit, f"{path}edits[{index}]", {"clear_thinking_20251015": ClearThinking})


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
    context_management: ContextManagement | None = None
    speed: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None

    def check_supported(self, path: str = "") -> None:
        """Refuse what is not supported, here and in the records inside."""
        super().check_supported(path)
        if self.context_management is not None:
            self.context_management.check_supported("context_management.")
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise bad_request("'output_format' is the older name of 'output_config.format'; send one of them.")


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The body."""

    NEUTRAL: ClassVar[_Neutral] = CountTokensRequest.NEUTRAL | {
        "container": (None,),
        "diagnostics": (None, {"previous_message_id": None}),
        "inference_geo": (None,),
        "compaction": (None,),
        "fallbacks": (None, []),
        "fallback_credit_token": (None,),
        "billing_policy": (None, {"type": "billing_policy"}, {"type": "billing_policy", "bill_to": "self"}),
    }
    UNUSED: ClassVar[frozenset[str]] = frozenset({"service_tier"})

    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: Metadata | None = None
    container: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    service_tier: str | None = None
    compaction: Any = None
    fallbacks: Any = None
    fallback_credit_token: Any = None
    billing_policy: Any = None
    thread: dict[str, Any] | None = None

    @property
    def hides_thoughts(self) -> bool:
        """Whether thinking blocks in the answer are empty."""
        return self.thinking is not None and self.thinking.display == "omitted"

    def check_supported(self, path: str = "") -> None:
        """Refuse what is not supported, in `thread` and `thinking` too."""
        super().check_supported(path)
        if self.thread is not None:
            raise _no_threads()
        thinking = self.thinking
        if thinking is not None and thinking.type == "enabled":
            if thinking.budget_tokens is None:
                raise bad_request("'thinking.budget_tokens' is required.", param="thinking.budget_tokens")
            if not 0 < thinking.budget_tokens < self.max_tokens:
                raise bad_request(
                    "'thinking.budget_tokens' must be above 0 and below 'max_tokens'.", param="thinking.budget_tokens"
                )


def _no_threads() -> ApiError:
    """Return the error for `thread`. Its details make Anthropic's clients send whole conversations instead."""
    return ApiError(
        400,
        "'thread' is not supported: this server stores no conversations. Send the whole conversation as 'messages', "
        "with thread=False in Anthropic's Python client.",
        param="thread",
        code="unsupported_field",
        details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
    )


# ---- the translation ------------------------------------------------------------------------------------------------

MESSAGES_NAMES = Renaming(
    (r"messages\b.*", "messages"),  # the messages of the chat request are numbered differently
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
"""Maps field names in the chat request's errors to those in the client's body."""


def chat_fields_of_message(request: MessagesRequest) -> dict[str, Any]:
    """Return the fields of the equivalent chat request."""
    fields = {
        "max_completion_tokens": request.max_tokens,
        "stop": request.stop_sequences,
        "temperature": request.temperature,
        "top_k": request.top_k,
        "top_p": request.top_p,
        "user": _user(request.metadata),
        "response_format": _response_format(request),
    }
    return chat_fields_of_prompt(request) | given(fields)


def message_names(request: CountTokensRequest) -> Renaming:
    """Return the renaming rules for this request, which has been translated successfully before."""
    return MESSAGES_NAMES.at([tool.path for tool in _sent_tools(request)])


def _user(metadata: Metadata | None) -> str | None:
    """Return the user id. Some agents send ids longer than a user name may be; these are replaced by a digest."""
    user = None if metadata is None else metadata.user_id
    if user is None or len(user) <= LIMITS.max_user_chars:
        return user
    return f"sha256:{hashlib.sha256(user.encode('utf-8', 'surrogatepass')).hexdigest()}"


class _SentTool(NamedTuple):
    """A tool that the client sent, and its path in the body."""

    tool: CustomTool
    path: str

    def as_chat(self) -> dict[str, Any]:
        """Return the tool's definition in a chat request."""
        tool = self.tool
        described = given({"description": tool.description, "strict": tool.strict})
        return {"type": "function", "function": {"name": tool.name, "parameters": tool.input_schema} | described}


def _sent_tools(request: CountTokensRequest) -> list[_SentTool]:
    """Return the client's own tools. Tools that Anthropic runs are left out, or raise 400 if a tool must be called."""
    must_call = request.tool_choice is not None and request.tool_choice.type == "any"
    found = []
    for index, value in enumerate(request.tools or ()):
        path = f"tools[{index}]"
        kind = value.get("type") if isinstance(value, dict) else None
        hosted = HOSTED_TOOLS.fullmatch(kind) if isinstance(kind, str) else None
        if hosted:
            leave_out_hosted_tool(hosted["kind"], path, must_call=must_call)
        else:
            found.append(_SentTool(record_by_type(value, path, {"custom": CustomTool}, default="custom"), path))
    return found


def chat_fields_of_prompt(request: CountTokensRequest) -> dict[str, Any]:
    """Return only those chat fields that the prompt depends on."""
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
    """Builds the chat messages and tools, and collects how long each block asks to be cached."""

    def __init__(self, request: CountTokensRequest) -> None:
        self.ttls_s: list[float] = []
        self._note_cache(request.cache_control)
        sent = _sent_tools(request)
        for one in sent:
            self._note_cache(one.tool.cache_control)
        self.tools = [one.as_chat() for one in sent]
        chat = ChatMessages()
        if request.system:
            chat.add_text("system", self._texts(request.system, "system"))
        if len(request.messages) > LIMITS.max_messages:
            raise bad_request(
                f"There are {len(request.messages)} messages; there may be {LIMITS.max_messages}.", param="messages"
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
        """Add a user turn. Tool results become separate messages; the text between them becomes user messages."""
        texts: list[str] = []
        for index, block in enumerate(self._blocks(content, path, OF_USER)):
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
        for block in self._blocks(content, path, OF_ASSISTANT):
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
        return [content] if isinstance(content, str) else [block.text for block in self._blocks(content, path, TEXT)]

    def _blocks(self, content: list[Any], path: str, kinds: Mapping[str, type[_B]]) -> Iterator[_B]:
        for index, value in enumerate(content):
            block = record_by_type(value, f"{path}[{index}]", kinds)
            self._note_cache(block.cache_control)
            yield block

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
    """Return the template variable that switches thinking on or off. `adaptive` leaves the choice to the model."""
    if thinking is None or thinking.type == "adaptive":
        return None
    return {"enable_thinking": thinking.type == "enabled"}


def _response_format(request: CountTokensRequest) -> dict[str, Any] | None:
    config = request.output_config
    wanted = request.output_format or (None if config is None else config.format)
    if wanted is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted.schema, "strict": True}}
