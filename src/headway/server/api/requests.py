"""The requests of the OpenAI API that this server takes, with vLLM's extra fields.

They are strict: types must fit and unknown fields are refused. A field of OpenAI's that is not supported is known
here all the same, because clients send it with its neutral value (`"tools": null`); any other value is refused by name.
Fields of `SamplingParams` and `RequestOptions` are not repeated here, nor are their ranges: see `record_fields`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from headway.server.api.api_errors import bad_request
from headway.server.api.record_fields import struct_fields

MAX_MESSAGES = 16_384
"""Messages of a conversation and their parts, together."""


class _Request(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    """A record that clients write. JSON has no cycles, so the garbage collector need not look at it."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields that are not supported → the values that ask for nothing."""

    def check_supported(self, path: str = "") -> None:
        """Refuse a field that asks for something this server does not do."""
        for name, neutral in self.NEUTRAL.items():
            if getattr(self, name) not in neutral:
                field = f"{path}{name}"
                raise bad_request(f"'{field}' is not supported by this server.", param=field, code="unsupported_field")


class StreamOptions(_Request, kw_only=True):
    """What a stream carries besides text."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {"include_obfuscation": (None, False)}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Any = None


if TYPE_CHECKING:

    class _RecordFields(_Request, kw_only=True):
        def __getattr__(self, name: str) -> Any: ...

else:  # what a body says of a request's `SamplingParams` and `RequestOptions`
    _RecordFields = msgspec.defstruct("_RecordFields", struct_fields(), bases=(_Request,), kw_only=True)


class GenerationRequest(_RecordFields, kw_only=True):
    """What chat and plain completions share."""

    model: str | None = None
    service_class: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def check_supported(self, path: str = "") -> None:
        """Refuse what is not supported, here and in the records inside."""
        super().check_supported(path)
        if self.stream_options is not None:
            if not self.stream:
                raise bad_request("'stream_options' needs 'stream': true.", param="stream_options")
            self.stream_options.check_supported("stream_options.")

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a count of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every event of a stream counts the tokens so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class ContentPart(_Request, kw_only=True):
    """A piece of a message. Only text is supported."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "image_url": (None,),
        "input_audio": (None,),
        "file": (None,),
        "prompt_cache_breakpoint": (None,),
    }

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    prompt_cache_breakpoint: Any = None

    def check_supported(self, path: str = "") -> None:
        """Text, and nothing else."""
        if self.type != "text" or self.text is None:
            raise bad_request(
                f"'{path}type' is {self.type[:40]!r}; only text parts are supported.",
                param=f"{path}type",
                code="unsupported_field",
            )
        super().check_supported(path)


class ChatMessage(_Request, kw_only=True):
    """One turn of a conversation."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "tool_calls": (None, []),
        "tool_call_id": (None,),
        "function_call": (None,),
        "refusal": (None,),
        "audio": (None,),
        "annotations": (None, []),
    }

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None
    refusal: Any = None
    audio: Any = None
    annotations: Any = None

    def check_supported(self, path: str = "") -> None:
        """A message is text, whole or in parts."""
        super().check_supported(path)
        if self.content is None:
            raise bad_request(f"'{path}content' is required.", param=f"{path}content")
        if isinstance(self.content, list):
            for index, part in enumerate(self.content):
                part.check_supported(f"{path}content[{index}].")

    @property
    def num_chars(self) -> int:
        """How long its text is."""
        texts = [part.text for part in self.content] if isinstance(self.content, list) else [self.content]
        return sum(len(text or "") for text in (*texts, self.name))

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it. `developer` is OpenAI's newer name of `system`."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        if isinstance(self.content, list):
            message["content"] = [{"type": "text", "text": part.text} for part in self.content]
        else:
            message["content"] = self.content
        if self.name is not None:
            message["name"] = self.name
        return message


def _check_messages(messages: list[ChatMessage], path: str) -> None:
    """How many they are first: each of them takes some time."""
    number = len(messages)
    if number <= MAX_MESSAGES:
        number += sum([len(message.content) for message in messages if isinstance(message.content, list)])
    if number > MAX_MESSAGES:
        raise bad_request(
            f"'{path}messages' has {number} messages and parts; there may be {MAX_MESSAGES}.", param=f"{path}messages"
        )
    for index, message in enumerate(messages):
        message.check_supported(f"{path}messages[{index}].")


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "tools": (None, []),
        "tool_choice": (None, "none"),
        "parallel_tool_calls": (None,),
        "functions": (None, []),
        "function_call": (None, "none"),
        "response_format": (None, {"type": "text"}),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "prediction": (None,),
        "reasoning_effort": (None,),
        "verbosity": (None,),
        "web_search_options": (None,),
        "service_tier": (None, "auto", "default"),
        "store": (None, False),
        "metadata": (None, {}),
        "safety_identifier": (None,),
        "prompt_cache_key": (None,),
        "prompt_cache_options": (None,),
        "prompt_cache_retention": (None,),
        "moderation": (None,),
        "chat_template": (None,),
        "echo": (None, False),
        "continue_final_message": (None, False),
    }

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    service_tier: Any = None
    store: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    moderation: Any = None
    chat_template: Any = None
    echo: Any = None
    continue_final_message: Any = None

    def check_supported(self, path: str = "") -> None:
        """The messages too."""
        super().check_supported(path)
        _check_messages(self.messages, path)


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "suffix": (None, ""),
        "response_format": (None, {"type": "text"}),
        "truncate_prompt_tokens": (None,),
    }

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    suffix: Any = None
    response_format: Any = None
    truncate_prompt_tokens: Any = None


class TokenizeRequest(_Request, kw_only=True):
    """POST /tokenize: the tokens of a text, or of a conversation as the model would see it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check_supported(self, path: str = "") -> None:
        """One of the two, not both, and nothing that goes with the other."""
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("Give either 'prompt' or 'messages'.", param="prompt")
        if self.messages is not None and self.add_special_tokens:
            raise bad_request("'add_special_tokens' goes with 'prompt' only.", param="add_special_tokens")
        for name in ("add_generation_prompt", "chat_template_kwargs"):
            if self.prompt is not None and getattr(self, name) is not None:
                raise bad_request(f"'{name}' goes with 'messages' only.", param=name)
        _check_messages(self.messages or [], path)


class DetokenizeRequest(_Request, kw_only=True):
    """POST /detokenize: the text of tokens."""

    tokens: list[int]
    model: str | None = None
