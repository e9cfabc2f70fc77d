"""Writes answers of /v1/messages, as one message at the end or as Anthropic's stream of events."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from headway.server.api.api_errors import ApiError
from headway.server.api.content_blocks import Block, BlockChange, Closed, ContentBlocks, Grown, Opened
from headway.server.api.generation import Generation
from headway.server.api.message_errors import message_error
from headway.wire.messages import Delta

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class TextContent(msgspec.Struct, tag_field="type", tag="text"):
    """Text."""

    text: str


class ThinkingContent(msgspec.Struct, tag_field="type", tag="thinking"):
    """What the model thought. Thoughts are not signed here."""

    thinking: str
    signature: str = ""


class ToolUseContent(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call."""

    id: str
    name: str
    input: dict[str, Any]


MessageContent = TextContent | ThinkingContent | ToolUseContent


class MessageUsage(msgspec.Struct):
    """Counts tokens. Those of the prompt are divided into found in the cache, pinned there from now on, and others."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class Message(msgspec.Struct, tag_field="type", tag="message"):
    """The answer."""

    id: str
    model: str
    content: list[MessageContent]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    role: Literal["assistant"] = "assistant"


class TokenCount(msgspec.Struct):
    """How many tokens a prompt has."""

    input_tokens: int


class _MessageWriter:
    """What whole and streamed answers share."""

    def __init__(self, generation: Generation, model: str, *, block_size: int, hides_thoughts: bool = False) -> None:
        self._generation = generation
        self._model = model
        self._block_size = block_size
        self._hides_thoughts = hides_thoughts
        self._suffix = generation.id.rpartition("-")[2]
        self._blocks = ContentBlocks(generation.job.answer.parser())

    @property
    def _stop_reason(self) -> StopReason:
        blocks = self._blocks
        if blocks.finish_reason == "length":
            return "max_tokens"
        if isinstance(blocks.stop_reason, str):
            return "stop_sequence"
        return "tool_use" if blocks.has_calls else "end_turn"

    @property
    def _stop_sequence(self) -> str | None:
        reason = self._blocks.stop_reason
        return reason if self._stop_reason == "stop_sequence" and isinstance(reason, str) else None

    def _usage(self) -> MessageUsage:
        """Return the token counts. Only whole blocks of a prompt can be pinned; the rest counts as plain input."""
        usage = self._generation.usage
        num_prompt, num_cached = usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens
        num_pinned = 0
        if self._generation.job.options.cache_ttl_s:
            num_pinned = max(0, num_prompt // self._block_size * self._block_size - num_cached)
        return MessageUsage(num_prompt - num_cached - num_pinned, usage.completion_tokens, num_cached, num_pinned)

    def _message(self, content: list[MessageContent], *, is_complete: bool) -> Message:
        return Message(
            id=f"msg_{self._suffix}",
            model=self._model,
            content=content,
            stop_reason=self._stop_reason if is_complete else None,
            stop_sequence=self._stop_sequence if is_complete else None,
            usage=self._usage(),
        )

    def _content(self, block: Block, text: str) -> MessageContent:
        if block.kind == "text":
            return TextContent(text)
        if block.kind == "reasoning":
            return ThinkingContent("" if self._hides_thoughts else text)
        return ToolUseContent(f"toolu_{self._suffix}{block.index:02d}", block.name, _arguments(text))


def _arguments(text: str) -> dict[str, Any]:
    """Decode a call's arguments. Those of a call that was cut off are not valid JSON and become an empty object."""
    try:
        return _decode(text) if text else {}
    except (msgspec.DecodeError, RecursionError):
        return {}


class WholeMessage(_MessageWriter):
    """Collects the answer into one message."""

    async def collect(self) -> Message:
        """Wait for all choices to end, and return the message."""
        async with self._generation:
            async for deltas in self._generation:
                for delta in deltas:
                    self._blocks.take(delta)
        self._blocks.finish()
        content = [self._content(block, block.text) for block in self._blocks.blocks]
        return self._message(content, is_complete=True)


class MessageEvents(_MessageWriter):
    """Writes the answer as named events."""

    _DELTAS: ClassVar[dict[str, tuple[str, str]]] = {
        "text": ("text_delta", "text"),
        "reasoning": ("thinking_delta", "thinking"),
        "call": ("input_json_delta", "partial_json"),
    }

    def begin(self) -> bytes:
        """Return the first events, with an empty message. The number of cached tokens is only known at the end."""
        start = _event("message_start", {"message": self._message([], is_complete=False)})
        return start + _event("ping", {})

    def write(self, deltas: list[Delta]) -> bytes:
        """Return all events for these deltas."""
        return b"".join(self._told(change) for delta in deltas for change in self._blocks.take(delta))

    def end(self) -> bytes:
        """Return the last events."""
        rest = b"".join(map(self._told, self._blocks.finish()))
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        fields: dict[str, Any] = {"delta": delta, "usage": self._usage()}
        if (metrics := self._generation.metrics) is not None:
            fields["metrics"] = metrics
        return rest + _event("message_delta", fields) + _event("message_stop", {})

    def fail(self, failure: ApiError) -> bytes:
        """Return the last event of a stream that failed."""
        return b"event: error\ndata: " + _encode(message_error(failure)) + b"\n\n"

    def _told(self, change: BlockChange) -> bytes:
        block = change.block
        match change:
            case Opened():
                content = self._content(block, "")
                return _event("content_block_start", {"index": block.index, "content_block": content})
            case Grown() if block.kind == "reasoning" and self._hides_thoughts:
                return b""
            case Grown(_, text, _):
                kind, name = self._DELTAS[block.kind]
                return _event("content_block_delta", {"index": block.index, "delta": {"type": kind, name: text}})
            case Closed():
                return _event("content_block_stop", {"index": block.index})


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + _encode({"type": kind} | fields) + b"\n\n"
