"""A frame is the length of a message as four bytes, then its msgpack."""

from __future__ import annotations

import struct
from typing import Any

from headway.errors import HeadwayError
from headway.wire.messages import encode

MAX_FRAME_BYTES = 256 * 2**20
"""More than any message can be; a longer one means that the two ends no longer agree where frames begin."""
LENGTH = struct.Struct("<I")


class BrokenFrameError(HeadwayError):
    """The data received is not a message. Nothing after it can be trusted."""


def pack(message: Any) -> bytes:
    """A message as one frame."""
    payload = encode(message)
    return LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._rest = b""  # the beginning of a frame whose end has not come

    def feed(self, data: bytes) -> list[memoryview]:
        """Take the next bytes and return the payloads that they complete, as views that stay valid."""
        buffer = self._rest + data if self._rest else data
        view = memoryview(buffer)
        payloads = []
        start, size = 0, len(buffer)
        while size - start >= LENGTH.size:
            length = LENGTH.unpack_from(buffer, start)[0]
            if length > MAX_FRAME_BYTES:
                raise BrokenFrameError(f"a frame claims to have {length:,} bytes")
            end = start + LENGTH.size + length
            if end > size:
                break
            payloads.append(view[start + LENGTH.size : end])
            start = end
        self._rest = bytes(view[start:])
        return payloads
