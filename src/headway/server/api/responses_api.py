"""Translates OpenAI's Responses API (/v1/responses) into chat requests. No response is stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from headway.server.api.api_errors import ApiError, bad_request
from headway.server.api.api_translation import TranslatedRequest, given, record_by_type
from headway.server.api.field_names import Renaming
from headway.server.api.record_fields import ONE_ANSWER_NAMES, ApiRecord, sampling_struct_fields, sampling_values
from headway.server.api.response_items import chat_messages
from headway.server.api.response_tools import chat_tool_choice, must_call, sent_tools

LOGPROBS = "message.output_text.logprobs"
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
"""Values that `include` may have. Reasoning is returned as plain text, so nothing is encrypted."""
_Neutral = dict[str, tuple[Any, ...]]


# ---- the request ----------------------------------------------------------------------------------------------------


class PlainFormat(ApiRecord, kw_only=True):
    """A format of any text or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(ApiRecord, kw_only=True):
    """A format of JSON that follows a schema."""

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
    """How much the model thinks, and whether a summary of its thoughts is returned. That contains all of them."""

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


class InputTokensRequest(TranslatedRequest, kw_only=True):
    """What counts for the prompt."""

    NEUTRAL: ClassVar[_Neutral] = {
        "conversation": (None,),
        "previous_response_id": (None,),
        "personality": (None,),
        "truncation": (None, "disabled"),
    }

    input: str | list[Any]
    model: str | None = None
    instructions: str | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    conversation: Any = None
    previous_response_id: Any = None
    personality: Any = None
    truncation: Any = None

    def check_supported(self, path: str = "") -> None:
        """Refuse what is not supported, here and in the records inside."""
        super().check_supported(path)
        for name in ("text", "reasoning"):
            record = getattr(self, name)
            if record is not None:
                record.check_supported(f"{name}.")


if TYPE_CHECKING:

    class _SamplingFields(InputTokensRequest, kw_only=True):
        def __getattr__(self, name: str) -> Any: ...

else:  # the fields of `SamplingParams` that a body may set, under the same names as in a chat request
    _SamplingFields = msgspec.defstruct(
        "_SamplingFields", sampling_struct_fields(ONE_ANSWER_NAMES), bases=(InputTokensRequest,), kw_only=True
    )


class ResponsesRequest(_SamplingFields, kw_only=True):
    """The body."""

    NEUTRAL: ClassVar[_Neutral] = {
        **InputTokensRequest.NEUTRAL,
        "background": (None, False),
        "prompt": (None,),
        "context_management": (None, []),
        "moderation": (None,),
        "image": (None,),
        "access_programs": (None,),
    }
    UNUSED: ClassVar[frozenset[str]] = frozenset(
        {
            *("metadata", "client_metadata", "safety_identifier", "service_tier", "max_tool_calls"),
            *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        }
    )

    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    """It limits the calls of hosted tools, which this server does not have."""
    structured_outputs: dict[str, Any] | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    client_metadata: dict[str, Any] | None = None
    user: str | None = None
    store: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    background: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    image: Any = None
    access_programs: Any = None

    def check_supported(self, path: str = "") -> None:
        """Refuse what is not supported, in `store`, `stream_options` and `include` too."""
        super().check_supported(path)
        if self.store:
            raise bad_request(
                "'store' must be false: nothing is stored by this server.", param="store", code="unsupported_field"
            )
        if self.stream_options is not None:
            self.stream_options.check_supported("stream_options.")
            if not self.stream:
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
        """Whether log-probabilities are requested. `top_logprobs` alone is enough, as in OpenAI's API."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def wants_summary(self) -> bool:
        """Whether reasoning is also returned as a summary, which is the part that most clients show."""
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
"""Maps field names in the chat request's errors to those in the client's body."""


def chat_fields_of_response(request: ResponsesRequest) -> dict[str, Any]:
    """Return the fields of the equivalent chat request."""
    logprobs = {"logprobs": True, "top_logprobs": request.top_logprobs or 0} if request.wants_logprobs else {}
    fields = {
        "max_completion_tokens": request.max_output_tokens,
        "structured_outputs": request.structured_outputs,
        "user": request.user,
    }
    return chat_fields_of_input(request) | given(fields) | sampling_values(request, ONE_ANSWER_NAMES) | logprobs


def chat_fields_of_input(request: InputTokensRequest) -> dict[str, Any]:
    """Return only those chat fields that the prompt depends on."""
    request.check_supported()
    reasoning, choice = request.reasoning, request.tool_choice
    tools = sent_tools(request.tools, must_call=must_call(choice))
    fields = {
        "model": request.model,
        "messages": chat_messages(request.instructions, request.input),
        "tools": [tool.as_chat() for tool in tools] or None,
        "tool_choice": None if choice is None else chat_tool_choice(choice, tools),
        "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": _response_format(request.text),
        "reasoning_effort": None if reasoning is None else reasoning.effort,
        "chat_template_kwargs": request.chat_template_kwargs,
    }
    return given(fields) | request.shared_fields()


def response_names(request: InputTokensRequest) -> Renaming:
    """Return the renaming rules for this request, which has been translated successfully before."""
    return RESPONSES_NAMES.at([tool.path for tool in sent_tools(request.tools)])


def not_stored(response_id: str) -> ApiError:
    """Return a 404 for a request that refers to an earlier response."""
    return ApiError(
        404,
        f"There is no response '{response_id[:80]}': this server stores none. Send the whole conversation as 'input'.",
        code="not_stored",
    )


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
