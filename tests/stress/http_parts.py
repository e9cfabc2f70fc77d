"""The parts of an HTTP message that a proxy has to know: the head, and where the body ends."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)


@dataclass(frozen=True)
class Head:
    """Of a request or of an answer, with the empty line at its end."""

    data: bytes

    @property
    def status(self) -> int:
        return int(self.data[9:12])

    @property
    def content_length(self) -> int | None:
        found = _LENGTH.search(self.data)
        return None if found is None else int(found[1])

    @property
    def is_chunked(self) -> bool:
        return _CHUNKED.search(self.data) is not None

    @property
    def is_last(self) -> bool:
        """Whether the connection is closed behind it."""
        return _CLOSE.search(self.data) is not None


async def read_head(reader: asyncio.StreamReader) -> Head:
    """The next head; `EOFError` if there is none."""
    return Head(await reader.readuntil(b"\r\n\r\n"))


async def relay_body(head: Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass the body on as it comes; `EOFError` if it ends too early."""
    if not head.is_chunked:
        writer.write(await reader.readexactly(head.content_length or 0))
        await writer.drain()
        return
    size = 1
    while size:
        line = await reader.readuntil(b"\r\n")
        size = int(line, 16)
        writer.write(line + await reader.readexactly(size + 2))
        await writer.drain()
