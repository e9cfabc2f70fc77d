"""Records of the messages of a chat request: text, tool calls, and their results."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from headway.server.api.api_errors import bad_request
from headway.server.api.record_fields import ApiRecord
from headway.server.limits import LIMITS


class ContentPart(ApiRecord, kw_only=True):
    """A piece of a message: text, or a model's words that it will not answer."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "image_url": (None,),
        "input_audio": (None,),
        "file": (None,),
        "prompt_cache_breakpoint": (None,),
    }
    UNUSED: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    type: str
    text: str | None = None
    refusal: str | None = None
    cache_control: dict[str, Any] | None = None
    """Accepted from clients that also use Anthropic's API, and ignored. `cache_ttl_s` pins a prompt here."""
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    prompt_cache_breakpoint: Any = None

    @property
    def words(self) -> str:
        """The text that the model reads."""
        return (self.refusal if self.type == "refusal" else self.text) or ""

    def check_supported(self, path: str = "") -> None:
        """Refuse parts that are not text."""
        if self.type not in ("text", "refusal"):
            raise bad_request(
                f"'{path}type' is {self.type[:40]!r}; only text parts are supported.",
                param=f"{path}type",
                code="unsupported_field",
            )
        for name in ("text", "refusal"):
            if (getattr(self, name) is not None) != (name == self.type):
                what = "is required" if name == self.type else "does not go"
                raise bad_request(f"'{path}{name}' {what} with the type '{self.type}'.", param=f"{path}{name}")
        super().check_supported(path)


class CalledFunction(ApiRecord, kw_only=True):
    """What a call says."""

    UNUSED: ClassVar[frozenset[str]] = frozenset({"parsed_arguments"})

    name: str
    arguments: str
    """A JSON object as text; "" is an empty object. The text of a call that was cut off is incomplete."""
    parsed_arguments: Any = None
    """The arguments as parsed by OpenAI's client, which sends them back with the call."""


class MessageToolCall(ApiRecord, kw_only=True):
    """A call that the model has made in an earlier turn."""

    UNUSED: ClassVar[frozenset[str]] = frozenset({"index"})

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None
    """Copied from the chunks of a stream, and ignored: only the order in the list counts."""

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates expect it, except that its arguments are still JSON text."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": "function", "function": function}


class ChatMessage(ApiRecord, kw_only=True):
    """One turn of a conversation."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "refusal": (None,),
        "audio": (None,),
        "annotations": (None, []),
    }
    REPLACED: ClassVar[dict[str, str]] = {"function_call": "tool_calls"}
    UNUSED: ClassVar[frozenset[str]] = frozenset({"parsed", "provider_specific_fields", "cache_control"})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same text as `reasoning_content`, under its newer name."""
    function_call: Any = None
    refusal: Any = None
    audio: Any = None
    annotations: Any = None
    parsed: Any = None
    """The content of an earlier answer as parsed by OpenAI's client, which sends it back with the answer."""
    provider_specific_fields: dict[str, Any] | None = None
    """Notes that litellm adds to an earlier answer. They are ignored."""
    cache_control: dict[str, Any] | None = None

    def check_supported(self, path: str = "") -> None:
        """Refuse content that is not text, calls and reasoning of other roles than the assistant, and tool results
        that name no call."""
        super().check_supported(path)
        for name in ("tool_calls", "reasoning_content", "reasoning"):
            if self.role != "assistant" and getattr(self, name):
                raise bad_request(f"'{path}{name}' goes with the role 'assistant' only.", param=f"{path}{name}")
        if self.role == "tool" and not self.tool_call_id:
            raise bad_request(f"'{path}tool_call_id' is required with the role 'tool'.", param=f"{path}tool_call_id")
        if self.role != "tool" and self.tool_call_id is not None:
            raise bad_request(f"'{path}tool_call_id' goes with the role 'tool' only.", param=f"{path}tool_call_id")
        if self.content is None and not self.tool_calls and not self.thoughts:
            raise bad_request(f"'{path}content' is required.", param=f"{path}content")
        if isinstance(self.content, list):
            for index, part in enumerate(self.content):
                part.check_supported(f"{path}content[{index}].")

    @property
    def thoughts(self) -> str | None:
        """The model's reasoning before this answer, if any."""
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    @property
    def num_parts(self) -> int:
        """Number of content parts and calls, which a template may loop over."""
        return (len(self.content) if isinstance(self.content, list) else 0) + len(self.tool_calls or ())

    @property
    def num_chars(self) -> int:
        """Number of characters of all text in the message."""
        texts = [part.words for part in self.content] if isinstance(self.content, list) else [self.content]
        calls = [text for call in self.tool_calls or () for text in (call.function.name, call.function.arguments)]
        return sum(len(text or "") for text in (*texts, *calls, self.name, self.thoughts))

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it. `developer` is OpenAI's newer name for `system`."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        if isinstance(self.content, list):
            message["content"] = [{"type": "text", "text": part.words} for part in self.content]
        else:
            message["content"] = self.content or ""
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.thoughts is not None:
            message["reasoning_content"] = self.thoughts
        return message


def check_messages(messages: list[ChatMessage], path: str) -> None:
    """Refuse messages that cannot become a prompt. Their number is checked first, because each takes time to check."""
    number = len(messages)
    if number <= LIMITS.max_messages:
        number += sum([message.num_parts for message in messages])
    if number > LIMITS.max_messages:
        raise bad_request(
            f"'{path}messages' has {number} messages and parts; there may be {LIMITS.max_messages}.",
            param=f"{path}messages",
        )
    for index, message in enumerate(messages):
        message.check_supported(f"{path}messages[{index}].")


def check_continuation(messages: list[ChatMessage], add_generation_prompt: bool | None) -> None:
    """Refuse `continue_final_message` if the last message is not the beginning of an answer."""
    if add_generation_prompt:
        raise bad_request(
            "'continue_final_message' and 'add_generation_prompt' cannot both be true: the answer either goes on with "
            "the last message, or begins after it.",
            param="continue_final_message",
        )
    if not messages:
        return
    last, path = messages[-1], f"messages[{len(messages) - 1}]"
    if last.role != "assistant":
        raise bad_request(f"'{path}.role' must be 'assistant' with 'continue_final_message'.", param=f"{path}.role")
    if last.tool_calls:
        raise bad_request(f"'{path}.tool_calls' does not go with 'continue_final_message'.", param=f"{path}.tool_calls")
