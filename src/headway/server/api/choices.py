"""Collects one completion from its deltas: plain text, or reasoning, text and tool calls."""

from __future__ import annotations

import secrets
from typing import Literal, cast

from headway.server.api.generation import Generation
from headway.server.api.response_models import (
    ChatCompletionFunction,
    ChatCompletionMessage,
    ChatCompletionToolCall,
    ChatFinishReason,
    CompletionTokensDetails,
    FinishReason,
    Usage,
)
from headway.structured.output_pieces import CallArguments, CallBegin, ContentPiece, Piece, ReasoningPiece
from headway.structured.output_spec import OutputSpec
from headway.wire.messages import Delta, PositionLogprobs


class Choice:
    """One completion of plain text, collected so far."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] = []
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None
        self.finish_reason: FinishReason = "stop"
        self.stop_reason: int | str | None = None

    def take(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish_reason = cast(Literal["stop", "length"], delta.finish_reason)
            self.stop_reason = delta.stop_reason

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def message(self) -> ChatCompletionMessage:
        return ChatCompletionMessage(self.text)

    @property
    def chat_finish_reason(self) -> ChatFinishReason:
        return self.finish_reason


class OutputReader:
    """Splits one completion into reasoning, text and tool calls while it is generated."""

    def __init__(self, spec: OutputSpec) -> None:
        self._parser = spec.parser()
        self._has_thoughts = False
        self._num_tokens_before_text = 0
        self._has_text = False
        self.num_calls = 0

    def read(self, delta: Delta) -> list[Piece]:
        """Return the new pieces. The last delta also releases the text that the parser was holding back."""
        pieces = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            pieces = [*pieces, *self._parser.finish()]
        for piece in pieces:
            self._has_thoughts |= isinstance(piece, ReasoningPiece)
            self._has_text |= not isinstance(piece, ReasoningPiece)
            self.num_calls += isinstance(piece, CallBegin)
        if not self._has_text:
            self._num_tokens_before_text += len(delta.token_ids)
        return pieces

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of tokens before the first one that added to text or a call; 0 if there was no reasoning."""
        return self._num_tokens_before_text if self._has_thoughts else 0

    def finish_reason(self, reason: str) -> ChatFinishReason:
        """Return "tool_calls" for a completion that stopped by itself and made calls, else `reason`."""
        return "tool_calls" if reason == "stop" and self.num_calls else cast(FinishReason, reason)


def call_id() -> str:
    """Return a new id for a tool call. The client sends the result of the call with this id."""
    return f"call_{secrets.token_hex(12)}"


class ParsedChoice(Choice):
    """One completion, collected as reasoning, text and tool calls."""

    def __init__(self, spec: OutputSpec) -> None:
        super().__init__()
        self.reader = OutputReader(spec)
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[tuple[str, list[str]]] = []

    def take(self, delta: Delta) -> None:
        super().take(delta)
        for piece in self.reader.read(delta):
            match piece:
                case ContentPiece():
                    self._content.append(piece.text)
                case ReasoningPiece():
                    self._thoughts.append(piece.text)
                case CallBegin():
                    self._calls.append((piece.name, []))
                case CallArguments():
                    self._calls[piece.index][1].append(piece.text)

    @property
    def message(self) -> ChatCompletionMessage:
        content = "".join(self._content)
        message = ChatCompletionMessage(content or (None if self._calls else ""))
        if self._thoughts:
            message.reasoning_content = message.reasoning = "".join(self._thoughts)
        if self._calls:
            message.tool_calls = [
                ChatCompletionToolCall(call_id(), ChatCompletionFunction(name, "".join(texts)))
                for name, texts in self._calls
            ]
        return message

    @property
    def chat_finish_reason(self) -> ChatFinishReason:
        return self.reader.finish_reason(self.finish_reason)


def usage_of(generation: Generation, readers: list[OutputReader]) -> Usage:
    """Return the token counts, with those of reasoning if the model has a reasoning format."""
    usage = generation.usage
    if generation.job.answer.reasoning is not None and not generation.job.is_silent:
        number = sum(reader.num_reasoning_tokens for reader in readers)
        usage.completion_tokens_details = CompletionTokensDetails(number)
    return usage
