"""What two engine processes say to each other about KV blocks, and the device memory that one shares with the other.

A message is its length, 4 bytes, and MessagePack. `block_server` says what is sent when.
"""

from __future__ import annotations

import socket
import struct
import zlib
from typing import TYPE_CHECKING, Literal

import msgspec

from headway.errors import HeadwayError
from headway.transfer.checked_read import fastest_reader

if TYPE_CHECKING:
    pass

Carrier = Literal["shm", "cuda", "tcp"]

FORMAT = 2
"""Of the messages."""
MAX_MESSAGE_BYTES = 4 * 2**20
MAX_DIGESTS = 65_536
"""In a message."""
SILENT_S = 10.0
"""A server that is silent for longer is given up; so is a client that keeps places for longer."""
PAGE_BYTES = 4096
LENGTH = struct.Struct("<I")


class TransferError(HeadwayError):
    """The other end sent something wrong, or nothing."""


class CudaHandle(msgspec.Struct, array_like=True):
    """Device memory of another process, as torch shares it."""

    device: int
    handle: bytes
    num_bytes: int
    offset_bytes: int
    counter_handle: bytes
    counter_offset: int


class Offer(msgspec.Struct, tag=True):
    """The server's first message. With `shm` and `cuda` a descriptor comes along: the places' numbers and memory."""

    format: int
    fingerprint: str
    """Of everything that the bytes of a block depend on: only equal ones may exchange blocks."""
    block_bytes: int
    num_places: int
    carrier: Carrier
    cuda: CudaHandle | None = None


class Want(msgspec.Struct, tag=True):
    """These blocks, in this order."""

    number: int
    digests: list[bytes]
    request_id: str
    """Who computes them there. Empty: what is not there now does not come."""


class Piece(msgspec.Struct, array_like=True):
    """A block that is there."""

    want: int
    index: int
    """Among the digests of that want."""
    place: int
    number: int
    """That the place has while it holds this block; with `tcp` a checksum of the bytes."""


class Pieces(msgspec.Struct, tag=True):
    """Blocks; with `tcp` their bytes follow."""

    pieces: list[Piece]
    copy_s: float
    """How long copying them out has taken."""


class Missing(msgspec.Struct, tag=True):
    """The rest of a want does not come."""

    want: int


class Taken(msgspec.Struct, tag=True):
    """Places that may be written again."""

    places: list[int]


class Alive(msgspec.Struct, tag=True):
    """There is nothing to send yet."""


_encode = msgspec.msgpack.Encoder().encode
decode_to_client = msgspec.msgpack.Decoder(Offer | Pieces | Missing | Alive).decode
decode_to_server = msgspec.msgpack.Decoder(Want | Taken).decode


def pack(message: msgspec.Struct) -> bytes:
    """As it is sent."""
    payload = _encode(message)
    return LENGTH.pack(len(payload)) + payload


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fill it; raises `OSError`, also when the connection ends or takes longer than its timeout for the next bytes."""
    start = 0
    while start < target.nbytes:
        num_bytes = connection.recv_into(target[start:])
        if not num_bytes:
            raise ConnectionResetError("the other end closed the connection")
        start += num_bytes


def receive_payload(connection: socket.socket, length: int) -> bytearray:
    """A message whose length is known."""
    if length > MAX_MESSAGE_BYTES:
        raise TransferError(f"a message claims to have {length:,} bytes")
    payload = bytearray(length)
    receive_into(connection, memoryview(payload))
    return payload


def receive(connection: socket.socket) -> bytearray:
    """The next message."""
    head = bytearray(LENGTH.size)
    receive_into(connection, memoryview(head))
    return receive_payload(connection, LENGTH.unpack(head)[0])


def checksum(block: memoryview) -> int:
    """The CRC-32 of the CRC-32s of its parts: those are what compiled code is quick at."""
    return zlib.crc32(fastest_reader().crcs(block))
