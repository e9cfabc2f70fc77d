"""Answers that take long to write, written so that others get their turn on the event loop in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

TURN_S = 0.005
"""How long the writing of one answer keeps the event loop at a time."""
_encode = msgspec.json.Encoder().encode


class Turns:
    """Counts the time of one answer's writer."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._until_s = now() + TURN_S

    async def pass_on(self) -> None:
        """Let others go on if it is time. To be called after each piece of work."""
        if self._now() >= self._until_s:
            await asyncio.sleep(0)
            self._until_s = self._now() + TURN_S


class JsonList:
    """A JSON list that grows value by value, as text."""

    def __init__(self) -> None:
        self._text = bytearray(b"[")

    def add(self, values: Iterable[Any]) -> None:
        """Write these behind the others."""
        for value in values:
            self._text += _encode(value)
            self._text += b","

    def finish(self) -> msgspec.Raw:
        """The whole list, for a field of a record that is encoded."""
        if len(self._text) > 1:
            self._text.pop()
        self._text += b"]"
        return msgspec.Raw(bytes(self._text))


async def written_in_turns(values: Iterable[Any], turns: Turns | None = None) -> msgspec.Raw:
    """A JSON list of values that are made one by one."""
    turns, written = turns or Turns(), JsonList()
    for value in values:
        written.add((value,))
        await turns.pass_on()
    return written.finish()
