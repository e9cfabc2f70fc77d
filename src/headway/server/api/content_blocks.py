"""Splits an output into consecutive blocks of reasoning, text and tool calls.

Streams send the changes of the blocks, and whole responses send the result. Both translated APIs use these blocks for
both kinds of response, so that the two always agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from headway.structured.output_parser import OutputParser
from headway.structured.output_pieces import CallArguments, CallBegin, ContentPiece, Piece, ReasoningPiece
from headway.wire.messages import Delta, PositionLogprobs

BlockKind = Literal["text", "reasoning", "call"]


@dataclass(slots=True)
class Block:
    """A part of the output, collected so far."""

    kind: BlockKind
    index: int
    name: str = ""
    """Name of the tool, if the block is a call."""
    parts: list[str] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    """Log-probabilities of a text block, if they are requested."""

    @property
    def text(self) -> str:
        """The text, the reasoning, or the call's arguments as JSON."""
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class Opened:
    """A new, empty block begins."""

    block: Block


@dataclass(frozen=True, slots=True)
class Grown:
    """Text was added to a block."""

    block: Block
    text: str
    logprobs: list[PositionLogprobs]


@dataclass(frozen=True, slots=True)
class Closed:
    """A block has ended, because it is complete or because the output has ended."""

    block: Block


BlockChange: TypeAlias = Opened | Grown | Closed


class ContentBlocks:
    """The blocks of one completion. At most one of them is open: the last one."""

    def __init__(self, parser: OutputParser) -> None:
        self.blocks: list[Block] = []
        self.finish_reason = "stop"
        self.stop_reason: int | str | None = None
        self.num_reasoning_tokens = 0
        self._parser = parser
        self._open: Block | None = None
        self._space = ""
        """White space before a text. It is dropped if a call or reasoning follows."""
        self._logprobs: list[PositionLogprobs] = []
        """Log-probabilities of tokens whose text has not been delivered yet."""
        self._changes: list[BlockChange] = []

    @property
    def has_calls(self) -> bool:
        return any(block.kind == "call" for block in self.blocks)

    def take(self, delta: Delta) -> list[BlockChange]:
        """Return the changes made by a delta."""
        self._logprobs += delta.logprobs or ()
        pieces = self._parser.feed(delta.text) if delta.text else []
        self._count_reasoning(pieces, len(delta.token_ids))
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        return self._apply(pieces)

    def finish(self) -> list[BlockChange]:
        """End the output and return the last changes."""
        changes = self._apply(self._parser.finish())
        if self._space and not self.blocks:
            self._grow("text", self._space)
        self._close()
        return changes + self._take_changes()

    def _apply(self, pieces: list[Piece]) -> list[BlockChange]:
        for piece in pieces:
            match piece:
                case ContentPiece(text):
                    self._add_text(text)
                case ReasoningPiece(text):
                    self._grow("reasoning", text)
                case CallBegin(_, name):
                    self._begin("call", name)
                case CallArguments(_, text):
                    self._grow("call", text)
        return self._take_changes()

    def _add_text(self, text: str) -> None:
        if self._open is None or self._open.kind != "text":
            text, self._space = self._space + text, ""
            if not text.strip():
                self._space = text
                return
        self._grow("text", text)

    def _grow(self, kind: BlockKind, text: str) -> None:
        if not text:
            return
        block = self._open
        if block is None or block.kind != kind:
            block = self._begin(kind)
        logprobs, self._logprobs = self._logprobs, []
        if kind != "text":
            logprobs = []
        block.parts.append(text)
        block.logprobs += logprobs
        self._changes.append(Grown(block, text, logprobs))

    def _begin(self, kind: BlockKind, name: str = "") -> Block:
        self._close()
        block = self._open = Block(kind, len(self.blocks), name)
        self.blocks.append(block)
        self._changes.append(Opened(block))
        self._space = ""
        if kind != "text":
            self._logprobs = []
        return block

    def _close(self) -> None:
        if self._open is not None:
            self._changes.append(Closed(self._open))
            self._open = None

    def _take_changes(self) -> list[BlockChange]:
        changes, self._changes = self._changes, []
        return changes

    def _count_reasoning(self, pieces: list[Piece], num_tokens: int) -> None:
        """Count reasoning tokens. A token counts as the kind of its last piece or, without one, of the open block."""
        last = pieces[-1] if pieces else None
        if isinstance(last, ReasoningPiece) or (
            last is None and self._open is not None and self._open.kind == "reasoning"
        ):
            self.num_reasoning_tokens += num_tokens
