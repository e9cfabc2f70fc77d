"""The messages between two engine processes about KV blocks and shared device memory.

A message is its length in 4 bytes, then MessagePack. `block_server` describes the protocol.
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
"""The version of the messages."""
MAX_MESSAGE_BYTES = 4 * 2**20
MAX_DIGESTS = 65_536
"""The most digests in a message."""
SILENT_S = 10.0
"""A server that is silent for longer is given up, and so is a client that keeps places for longer."""
PAGE_BYTES = 4096
LENGTH = struct.Struct("<I")


class TransferError(HeadwayError):
    """The other end sent something invalid, or nothing in time."""


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
    """The fingerprint of the block format. Only engines with equal ones may exchange blocks."""
    block_bytes: int
    num_places: int
    carrier: Carrier
    cuda: CudaHandle | None = None


class Want(msgspec.Struct, tag=True):
    """The client wants these blocks, in this order."""

    number: int
    digests: list[bytes]
    request_id: str
    """The request that computes them in the server's engine. Empty: blocks that are missing now are not waited for."""


class Piece(msgspec.Struct, array_like=True):
    """A block that was copied out."""

    want: int
    index: int
    """The index among the digests of the want."""
    place: int
    number: int
    """The place's number while it holds this block; with `tcp` a checksum of the bytes."""


class Pieces(msgspec.Struct, tag=True):
    """Blocks that the client may copy in. With `tcp` their bytes follow."""

    pieces: list[Piece]
    copy_s: float
    """The seconds that copying them out took."""


class Missing(msgspec.Struct, tag=True):
    """The remaining blocks of a want will not be sent."""

    want: int


class Taken(msgspec.Struct, tag=True):
    """Places that may be written again."""

    places: list[int]


class Alive(msgspec.Struct, tag=True):
    """A sign of life while there is nothing to send."""


_encode = msgspec.msgpack.Encoder().encode
decode_to_client = msgspec.msgpack.Decoder(Offer | Pieces | Missing | Alive).decode
decode_to_server = msgspec.msgpack.Decoder(Want | Taken).decode


def pack(message: msgspec.Struct) -> bytes:
    """Encode a message with its length."""
    payload = _encode(message)
    return LENGTH.pack(len(payload)) + payload


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fill the target from the connection. Raises `OSError`, also if the connection ends or exceeds its timeout."""
    start = 0
    while start < target.nbytes:
        num_bytes = connection.recv_into(target[start:])
        if not num_bytes:
            raise ConnectionResetError("the other end closed the connection")
        start += num_bytes


def receive_payload(connection: socket.socket, length: int) -> bytearray:
    """Receive a message of known length. Raises `TransferError` if it is too long."""
    if length > MAX_MESSAGE_BYTES:
        raise TransferError(f"a message claims to have {length:,} bytes")
    payload = bytearray(length)
    receive_into(connection, memoryview(payload))
    return payload


def receive(connection: socket.socket) -> bytearray:
    """Receive the next message."""
    head = bytearray(LENGTH.size)
    receive_into(connection, memoryview(head))
    return receive_payload(connection, LENGTH.unpack(head)[0])


def checksum(block: memoryview) -> int:
    """The CRC-32 of the CRC-32s of a block's pieces, which compiled code computes fast."""
    return zlib.crc32(fastest_reader().crcs(block))
