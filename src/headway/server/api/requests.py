"""The requests of the OpenAI API that this server accepts, with vLLM's extra fields.

The records are strict: types must match, and unknown fields are refused. OpenAI fields that are not supported are
declared all the same, because clients send them with neutral values (`"audio": null`); any other value is refused.
Fields of `SamplingParams` and `RequestOptions` are not repeated here, nor are their ranges: see `record_fields`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from headway.sampling_params import Pooling
from headway.server.api.api_errors import bad_request
from headway.server.api.chat_messages import ChatMessage, check_continuation, check_messages
from headway.server.api.record_fields import ApiRecord, check_nesting, struct_fields
from headway.server.api.response_format import ResponseFormat, StructuredOutputs
from headway.server.api.tool_definitions import ToolChoice, ToolDefinition, check_tool_choice, check_tools

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(ApiRecord, kw_only=True):
    """What a stream carries besides text."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {"include_obfuscation": (None, False)}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Any = None


if TYPE_CHECKING:

    class _RecordFields(ApiRecord, kw_only=True):
        def __getattr__(self, name: str) -> Any: ...

else:  # the fields of `SamplingParams` and `RequestOptions` that a body may set
    _RecordFields = msgspec.defstruct("_RecordFields", struct_fields(), bases=(ApiRecord,), kw_only=True)


class GenerationRequest(_RecordFields, kw_only=True):
    """Fields and checks that chat and plain completions share."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "logits_processors": (None, []),
        "kv_transfer_params": (None, {}),
        "mm_processor_kwargs": (None, {}),
        "vllm_xargs": (None, {}),
        "request_id": (None,),
    }
    REPLACED: ClassVar[dict[str, str]] = {
        "guided_json": "structured_outputs.json",
        "guided_regex": "structured_outputs.regex",
        "guided_choice": "structured_outputs.choice",
        "guided_grammar": "structured_outputs.grammar",
        "guided_json_object": "structured_outputs.json_object",
        "guided_whitespace_pattern": "structured_outputs.whitespace_pattern",
    }
    UNUSED: ClassVar[frozenset[str]] = frozenset(
        {
            *("metadata", "safety_identifier", "prompt_cache_key", "service_tier"),
            "guided_decoding_backend",
        }
    )

    model: str | None = None
    service_class: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json_object: Any = None
    guided_whitespace_pattern: Any = None
    guided_decoding_backend: str | None = None
    """Accepted and ignored: this server has one backend for guided decoding."""
    logits_processors: Any = None
    kv_transfer_params: Any = None
    mm_processor_kwargs: Any = None
    vllm_xargs: Any = None
    request_id: Any = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
    """Keep only this many of the prompt's last tokens; -1 keeps as many as fit."""
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    store: bool | None = None

    def check_supported(self, path: str = "") -> None:
        """Refuse what is not supported, here and in the records inside."""
        super().check_supported(path)
        if self.store:
            raise bad_request(
                "'store' must be false: nothing is stored by this server.", param="store", code="unsupported_field"
            )
        kept = self.truncate_prompt_tokens
        if kept is not None and kept != -1 and kept < 1:
            raise bad_request("'truncate_prompt_tokens' must be -1 or at least 1.", param="truncate_prompt_tokens")
        if self.stream_options is not None:
            if not self.stream:
                raise bad_request("'stream_options' needs 'stream': true.", param="stream_options")
            self.stream_options.check_supported("stream_options.")
        if self.response_format is not None:
            self.response_format.check_supported(f"{path}response_format.")
        if self.structured_outputs is not None:
            self.structured_outputs.check_supported(f"{path}structured_outputs.")
            if self.response_format is not None and self.response_format.type != "text":
                raise bad_request(
                    "'structured_outputs' and 'response_format' both say what the answer must look like; send one of "
                    "them.",
                    param="structured_outputs",
                )

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every event of a stream has the token counts so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions."""

    REPLACED: ClassVar[dict[str, str]] = {
        **GenerationRequest.REPLACED,
        "functions": "tools",
        "function_call": "tool_choice",
    }
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GenerationRequest.NEUTRAL,
        "modalities": (None, ["text"]),
        "audio": (None,),
        "prediction": (None,),
        "verbosity": (None, "medium"),
        "web_search_options": (None,),
        "moderation": (None,),
        "chat_template": (None,),
        "documents": (None, []),
        "echo": (None, False),
        "include_reasoning": (None, True),
    }
    UNUSED: ClassVar[frozenset[str]] = GenerationRequest.UNUSED | {"prompt_cache_options", "prompt_cache_retention"}

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    moderation: Any = None
    chat_template: Any = None
    documents: Any = None
    echo: Any = None
    include_reasoning: Any = None

    def check_supported(self, path: str = "") -> None:
        """Refuse what is not supported, in the messages and tools too."""
        super().check_supported(path)
        check_tools(self.tools or (), f"{path}tools")
        check_tool_choice(self.tool_choice, self.tools or ())
        check_messages(self.messages, path)
        if self.continue_final_message:
            check_continuation(self.messages, self.add_generation_prompt)
        check_nesting(self.chat_template_kwargs or {}, f"{path}chat_template_kwargs")


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {**GenerationRequest.NEUTRAL, "prompt_embeds": (None,)}

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    suffix: str | None = None
    """The text after the gap that the completion is to fill."""
    prompt_embeds: Any = None

    def check_supported(self, path: str = "") -> None:
        """Refuse what is not supported, and fields that cannot be combined."""
        super().check_supported(path)
        for name in ("echo", "truncate_prompt_tokens") if self.suffix else ():
            if getattr(self, name):
                raise bad_request(f"'{name}' does not go with 'suffix'.", param=name)


class EmbeddingRequest(ApiRecord, kw_only=True):
    """POST /v1/embeddings."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    """Keep only this many numbers of each vector."""
    pooling: Pooling | None = None
    """Whether a vector is the mean of the prompt's hidden states or the last of them."""
    normalize: bool | None = None
    """Whether vectors are scaled to length 1, which is the default."""
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    service_class: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None

    def as_completion(self) -> CompletionRequest:
        """Return the completion request that makes the engine read these prompts."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in _OF_COMPLETIONS} | {"max_tokens": 1}
        return CompletionRequest(prompt=self.input, **fields)


_OF_COMPLETIONS = (
    *("model", "user", "priority", "cache_salt", "service_class"),
    *("add_special_tokens", "truncate_prompt_tokens"),
)


class TokenizeRequest(ApiRecord, kw_only=True):
    """POST /tokenize: the tokens of a text, or of a conversation as the model would see it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolDefinition] | None = None
    return_token_strs: bool | None = None
    """Whether each token is also returned as the vocabulary spells it."""

    def check_supported(self, path: str = "") -> None:
        """Require exactly one of `prompt` and `messages`, and refuse fields that belong to the other one."""
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("Give either 'prompt' or 'messages'.", param="prompt")
        if self.messages is not None and self.add_special_tokens:
            raise bad_request("'add_special_tokens' goes with 'prompt' only.", param="add_special_tokens")
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"):
            if self.prompt is not None and getattr(self, name) is not None:
                raise bad_request(f"'{name}' goes with 'messages' only.", param=name)
        check_tools(self.tools or (), f"{path}tools")
        check_messages(self.messages or [], path)
        if self.continue_final_message:
            check_continuation(self.messages or [], self.add_generation_prompt)
        check_nesting(self.chat_template_kwargs or {}, f"{path}chat_template_kwargs")


class DetokenizeRequest(ApiRecord, kw_only=True):
    """POST /detokenize: the text of tokens."""

    tokens: list[int]
    model: str | None = None
