"""Writes long answers in short turns, so that other requests can use the event loop in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

TURN_S = 0.005
"""Longest time that the writing of one answer holds the event loop without a pause."""
_encode = msgspec.json.Encoder().encode


class Turns:
    """Measures the current turn of one answer's writer."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._until_s = now() + TURN_S

    async def pass_on(self) -> None:
        """Yield to the event loop if the turn is over. Call this after each piece of work."""
        if self._now() >= self._until_s:
            await asyncio.sleep(0)
            self._until_s = self._now() + TURN_S


class JsonList:
    """A JSON list, encoded value by value."""

    def __init__(self) -> None:
        self._text = bytearray(b"[")

    def add(self, values: Iterable[Any]) -> None:
        """Append values to the list."""
        for value in values:
            self._text += _encode(value)
            self._text += b","

    def finish(self) -> msgspec.Raw:
        """Return the encoded list, to be used as a field of a record."""
        if len(self._text) > 1:
            self._text.pop()
        self._text += b"]"
        return msgspec.Raw(bytes(self._text))


async def written_in_turns(values: Iterable[Any], turns: Turns | None = None) -> msgspec.Raw:
    """Return a JSON list of `values`, which are made and encoded one by one with pauses for the event loop."""
    turns, written = turns or Turns(), JsonList()
    for value in values:
        written.add((value,))
        await turns.pass_on()
    return written.finish()
