"""The pieces that an output is parsed into, and the stream of text that they are read from.

Readers are generators: recursive descent that pauses (`yield`) if the text so far does not decide how to go on. Their
pieces depend only on the text, never on how it was cut into chunks.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from headway.structured.grammars import SPACES

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]


@dataclass(frozen=True)
class ContentPiece:
    text: str


@dataclass(frozen=True)
class ReasoningPiece:
    text: str


@dataclass(frozen=True)
class CallBegin:
    """A tool call whose name is known; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Piece: TypeAlias = ContentPiece | ReasoningPiece | CallBegin | CallArguments


class TextStream:
    """The text that was received but not read yet, and the pieces read since they were last taken."""

    def __init__(self) -> None:
        self.rest = ""
        self.ended = False
        self._pieces: list[Piece] = []

    def add(self, text: str) -> None:
        self.rest += text

    def end(self) -> None:
        self.ended = True

    def emit(self, piece: Piece) -> None:
        """Add a piece; text of the same kind as the piece before joins it."""
        last = self._pieces[-1] if self._pieces else None
        match last, piece:
            case (ContentPiece(before), ContentPiece(text)):
                self._pieces[-1] = ContentPiece(before + text)
            case (ReasoningPiece(before), ReasoningPiece(text)):
                self._pieces[-1] = ReasoningPiece(before + text)
            case (CallArguments(index, before), CallArguments(same, text)) if index == same:
                self._pieces[-1] = CallArguments(index, before + text)
            case _:
                self._pieces.append(piece)

    def take_pieces(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def take(self, count: int) -> str:
        taken, self.rest = self.rest[:count], self.rest[count:]
        return taken

    def more(self) -> Reading[bool]:
        """Wait for more text after the unread text. Returns False if the output ended."""
        length = len(self.rest)
        while len(self.rest) == length and not self.ended:
            yield
        return len(self.rest) > length

    def at_least(self, count: int) -> Reading[bool]:
        """Wait for `count` unread characters. Returns False if the output ended before."""
        while len(self.rest) < count:
            if not (yield from self.more()):
                return False
        return True

    def peek(self) -> Reading[str]:
        """The next character, "" at the end."""
        if not self.rest:
            yield from self.more()
        return self.rest[:1]

    def skip_space(self) -> Reading[None]:
        self.rest = self.rest.lstrip(SPACES)
        while not self.rest and (yield from self.more()):
            self.rest = self.rest.lstrip(SPACES)

    def follows(self, wanted: str) -> Reading[bool]:
        """Whether `wanted` is what follows, as soon as that is certain."""
        while not self.rest.startswith(wanted):
            if not wanted.startswith(self.rest) or not (yield from self.more()):
                return False
        return True

    def literal(self, wanted: str) -> Reading[bool]:
        """Read `wanted`, if it is what follows. Of an output that ends within it, the rest is read."""
        if (yield from self.follows(wanted)):
            self.take(len(wanted))
            return True
        if wanted.startswith(self.rest):
            self.rest = ""
        return False

    def until(self, marker: str) -> Reading[str | None]:
        """The next part of the text before `marker`, as soon as it is certain; None once the marker is read.

        "" if the output ended without it: the rest, if any, is the beginning of the marker.
        """
        while True:
            found = self.rest.find(marker)
            if found == 0:
                self.take(len(marker))
                return None
            certain = found if found > 0 else len(self.rest) - partial_end(self.rest, marker)
            if certain:
                return self.take(certain)
            if not (yield from self.more()):
                return ""


def partial_end(text: str, *markers: str) -> int:
    """Length of the longest end of `text` that is the beginning of a marker."""
    longest = max(map(len, markers)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
