"""Parses an output as it is generated into reasoning, content and tool calls.

The same parser serves streamed and whole outputs: a whole one is one `feed` and `finish`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headway.structured.grammars import SPACES
from headway.structured.output_pieces import (
    CallBegin,
    ContentPiece,
    Piece,
    Reading,
    ReasoningPiece,
    TextStream,
    partial_end,
)
from headway.structured.reasoning_formats import ReasoningFormat
from headway.structured.tool_call_formats import (
    Arguments,
    Extra,
    Marker,
    Name,
    Part,
    PartsMatch,
    Space,
    Text,
    ToolFormat,
    Undecided,
    match_parts,
)
from headway.structured.tool_schemas import Tool


class OutputParser:
    """Splits one output into pieces. Text that may be the beginning of a marker is held back until that is decided.

    Whitespace between reasoning, content and calls belongs to the format and is not content. `tools` are those that may
    be called, by name; without any, text that looks like a call is content. With `only_at_start`, so is text that looks
    like a call after other content.
    """

    def __init__(
        self,
        *,
        tools: Mapping[str, Tool],
        tool_format: ToolFormat | None,
        only_at_start: bool,
        parallel: bool,
        reasoning: ReasoningFormat | None,
        starts_in_reasoning: bool,
    ) -> None:
        self._tools = tools
        self._tool_format = tool_format if tools else None
        self._only_at_start = only_at_start or (tool_format is not None and tool_format.only_at_start)
        self._parallel = parallel
        self._reasoning = reasoning
        self._starts_in_reasoning = starts_in_reasoning
        self._stream = TextStream()
        self._calls = 0
        # Without anything to look for, text goes straight through.
        self._reading = self._output() if self._tool_format or reasoning else None

    def feed(self, text: str) -> list[Piece]:
        """Add `text`, and return the pieces that are now certain."""
        if self._reading is None:
            return [ContentPiece(text)] if text else []
        self._stream.add(text)
        return self._read()

    def finish(self) -> list[Piece]:
        """End the output, and return the pieces that were held back. An incomplete call stays incomplete."""
        if self._reading is None:
            return []
        self._stream.end()
        return self._read()

    def _read(self) -> list[Piece]:
        if self._reading is not None:
            next(self._reading, None)
        return self._stream.take_pieces()

    def _output(self) -> Reading[None]:
        if self._reasoning is not None:
            yield from self._read_reasoning(self._reasoning)
        if self._tool_format is not None:
            yield from self._content_with_calls(self._tool_format)
        yield from self._content_to_the_end()

    def _read_reasoning(self, form: ReasoningFormat) -> Reading[None]:
        stream = self._stream
        parts = (Space(), Text(form.opening))
        opened = yield from self._match(parts)
        if opened is None and not self._starts_in_reasoning:
            return
        if opened is not None:
            stream.take(opened.end)
        yield from stream.skip_space()
        held = ""
        while part := (yield from stream.until(form.closing)):
            text = held + part
            certain = text.rstrip(SPACES)
            held = text[len(certain) :]
            if certain:
                stream.emit(ReasoningPiece(certain))
        if part is not None:
            if held + stream.rest:
                stream.emit(ReasoningPiece(held + stream.take(len(stream.rest))))
            return
        yield from stream.skip_space()

    def _content_with_calls(self, form: ToolFormat) -> Reading[None]:
        """Read up to the last call."""
        if self._only_at_start:
            begun = yield from self._match((Space(), *form.opening, *form.head))
            if begun is None:
                return
            self._stream.take(begun.end)
            yield from self._list_of_calls(form, begun.name)
            if form.only_at_start or not self._parallel:
                return
        while (yield from self._content_and_calls(form)) and self._parallel:
            pass

    def _content_and_calls(self, form: ToolFormat) -> Reading[bool]:
        """Emit content and the calls after it. Returns False if the output ended without calls."""
        stream = self._stream
        trigger = form.trigger.text
        while True:
            found = stream.rest.find(trigger)
            certain = found if found >= 0 else len(stream.rest) - partial_end(stream.rest, trigger)
            # Whitespace before a call is not content; whether there is a call, more text decides.
            certain = len(stream.rest[:certain].rstrip(SPACES))
            if certain:
                stream.emit(ContentPiece(stream.take(certain)))
            elif found < 0:
                if not (yield from stream.more()):
                    return False
            else:
                begun = yield from self._match((Space(), *form.opening, *form.head))
                if begun is not None:
                    break
                stream.emit(ContentPiece(stream.take(found + 1)))
        stream.take(begun.end)
        yield from self._list_of_calls(form, begun.name)
        return True

    def _content_to_the_end(self) -> Reading[None]:
        stream = self._stream
        while True:
            if stream.rest:
                stream.emit(ContentPiece(stream.take(len(stream.rest))))
            if not (yield from stream.more()):
                return

    def _list_of_calls(self, form: ToolFormat, name: str) -> Reading[None]:
        """Read calls, starting after the head of the first one. Text that does not fit the format ends them."""
        stream = self._stream
        while True:
            stream.emit(CallBegin(self._calls, name))
            self._calls += 1
            if not (yield from self._read_parts(form.tail, name)) or not form.is_list:
                break
            following = (yield from self._match((*form.between, *form.head))) if self._parallel else None
            if following is None:
                yield from self._read_parts(form.closing, name)
                self._drop_begun((*form.between, *form.head))
                break
            stream.take(following.end)
            name = following.name
        yield from stream.skip_space()

    def _read_parts(self, parts: Sequence[Part], name: str) -> Reading[bool]:
        """Read these parts of a call; False where the text is something else."""
        stream = self._stream
        for part in parts:
            match part:
                case Space():
                    yield from stream.skip_space()
                case Extra(text) | Marker(text, True):
                    if (yield from stream.follows(text)):
                        stream.take(len(text))
                case Text(text) | Marker(text):
                    if not (yield from stream.literal(text)):
                        return False
                case Arguments(form):
                    yield from form.read(stream, self._calls - 1, self._tools[name])
                case Name():
                    raise ValueError("a name belongs to the head of a call")
        return True

    def _drop_begun(self, parts: Sequence[Part]) -> None:
        """Drop the rest of an output that ended within the head of one more call."""
        stream = self._stream
        if stream.ended and match_parts(parts, stream.rest, names=tuple(self._tools), ended=False) == Undecided():
            stream.take(len(stream.rest))

    def _match(self, parts: Sequence[Part]) -> Reading[PartsMatch | None]:
        """Match parts against the unread text, as soon as the result is certain. No text is consumed."""
        stream = self._stream
        while True:
            found = match_parts(parts, stream.rest, names=tuple(self._tools), ended=stream.ended)
            if not isinstance(found, Undecided):
                return found
            yield from stream.more()
