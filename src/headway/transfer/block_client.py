"""Fetches KV blocks from the memory of other engine processes: the client of `block_server`.

On any failure it reports that a block did not arrive, after it has stopped writing into the block's slot.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.errors import HeadwayError
from headway.transfer.block_messages import (
    FORMAT,
    LENGTH,
    MAX_DIGESTS,
    PAGE_BYTES,
    SILENT_S,
    Alive,
    Missing,
    Offer,
    Pieces,
    Taken,
    TransferError,
    Want,
    decode_to_client,
    pack,
    receive,
    receive_into,
    receive_payload,
)
from headway.transfer.block_store import BlockStore, Done
from headway.transfer.carriers import Source, source_of
from headway.wire.greeting import dial

if TYPE_CHECKING:
    from headway.transfer.block_store import Slot

logger = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]

_SMOOTHED = 0.1  # weight of the newest measurement


@dataclass
class _Fetch:
    """The blocks that a `fetch` still waits for."""

    digests: Sequence[bytes]
    slots: Sequence[Slot]
    request_id: str
    done: Done
    is_open: list[bool] = field(default_factory=list)
    num_open: int = 0

    def __post_init__(self) -> None:
        self.is_open = [True] * len(self.digests)
        self.num_open = len(self.digests)

    def end(self, index: int, is_there: bool) -> None:
        """Report that a block has arrived or failed."""
        self.is_open[index] = False
        self.num_open -= 1
        self.done(self.digests[index], is_there)

    def fail(self) -> None:
        """Report all remaining blocks as failed."""
        for index, is_open in enumerate(self.is_open):
            if is_open:
                self.end(index, False)


class PeerBlocks(BlockStore):
    """Blocks in the memory of other engines. There is one connection with a thread to each engine that was asked."""

    def __init__(self, *, fingerprint: str, cuda_device: int | None = None, silent_s: float = SILENT_S) -> None:
        """`fingerprint` is as in `Offer`. `cuda_device`: the device of this process, if it has one."""
        self._fingerprint = fingerprint
        self._cuda_device = cuda_device
        self._silent_s = silent_s
        self._peers: dict[str, _Peer] = {}
        self._is_closed = False
        self.block_s = 0.0
        """The smoothed seconds to copy a block out and in, without the time until it is computed. 0: not known."""

    def fetch(
        self, digests: Sequence[bytes], slots: Sequence[Slot], source: str, done: Done, *, is_use: bool = True
    ) -> None:
        """Ask the server at `source` for blocks."""
        address, _, request_id = source.partition("#")
        fetch = _Fetch(digests, slots, request_id, done)
        if self._is_closed:
            fetch.fail()
            return
        peer = self._peers.get(address)
        if peer is None or not peer.want(fetch):
            self._peers = {name: each for name, each in self._peers.items() if each.is_alive()}
            peer = self._peers[address] = _Peer(
                address, self._fingerprint, self._cuda_device, self._silent_s, self._note_time
            )
            peer.want(fetch)
            peer.start()

    def store(self, digest: bytes, slot: Slot, done: Done) -> None:
        """Raise, because blocks cannot be stored in other engines."""
        raise RuntimeError("blocks are fetched from other engines, not stored there")

    def close(self) -> None:
        """Fail the fetches in progress. Returns when no slot is written any more."""
        self._is_closed = True
        for peer in self._peers.values():
            peer.close()
        for peer in self._peers.values():
            peer.join(SILENT_S)

    def _note_time(self, block_s: float) -> None:
        self.block_s += (_SMOOTHED if self.block_s else 1.0) * (block_s - self.block_s)


class _Peer(threading.Thread):
    """The connection to one server. Only this thread reads messages and writes slots."""

    def __init__(
        self,
        address: str,
        fingerprint: str,
        cuda_device: int | None,
        silent_s: float,
        note_time: Callable[[float], None],
    ) -> None:
        carrier, _, self._where = address.partition("://")
        self._secret, _, place = self._where.rpartition("@")
        super().__init__(name=f"blocks from {carrier}://{place}", daemon=True)
        self._carrier = carrier
        self._fingerprint = fingerprint
        self._cuda_device = cuda_device
        self._silent_s = silent_s
        self._note_time = note_time
        self._lock = threading.Lock()
        self._new: list[_Fetch] = []
        self._is_over = False
        self._open: dict[int, _Fetch] = {}
        self._num_wants = 0
        self._woken, self._waker = socket.socketpair()
        for each in (self._woken, self._waker):
            each.setblocking(False)
        self._socket: socket.socket | None = None
        self._source: Source | None = None

    # ---- others' threads ------------------------------------------------------------------------------------------

    def want(self, fetch: _Fetch) -> bool:
        """Accept a fetch. Returns False if the connection is over."""
        with self._lock:
            if self._is_over:
                return False
            self._new.append(fetch)
        self._wake()
        return True

    def close(self) -> None:
        """End the connection."""
        with self._lock:
            self._is_over = True
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    # ---- its own --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._connect()
            while not self._is_over:
                self._turn()
        except (OSError, HeadwayError, msgspec.DecodeError, RuntimeError, ValueError) as error:
            logger.warning("%s do not come: %s", self.name, error)
        finally:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self._is_over = True
            left, self._new = [*self._open.values(), *self._new], []
        if self._source is not None:
            self._source.close()
        for each in (self._socket, self._woken, self._waker):
            if each is not None:
                each.close()
        for fetch in left:
            fetch.fail()

    def _connect(self) -> None:
        carrier, where = self._carrier, self._where
        descriptors: list[int] = []
        if carrier == "tcp":
            host, _, port = where.rpartition("@")[2].rpartition(":")
            self._socket = connection = dial(host, int(port), self._secret.encode())
            connection.settimeout(self._silent_s)
            payload: bytes | bytearray = receive(connection)
        elif carrier in ("shm", "cuda"):
            self._socket = connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(self._silent_s)
            connection.connect(where)
            head, descriptors, _, _ = socket.recv_fds(connection, LENGTH.size, 1)
            rest = bytearray(LENGTH.size - len(head))
            receive_into(connection, memoryview(rest))
            payload = receive_payload(connection, LENGTH.unpack(head + rest)[0])
        else:
            raise TransferError("there is no way to such an address")
        try:
            offer = decode_to_client(payload)
            if not isinstance(offer, Offer) or offer.format != FORMAT or offer.carrier != carrier:
                raise TransferError("it does not speak as Headway does")
            if offer.fingerprint != self._fingerprint:
                raise TransferError("its blocks are of another model, or in another format")
            self._source = source_of(offer, descriptors, self._cuda_device)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _turn(self) -> None:
        """Send new wants, then handle one message if there is one."""
        assert self._socket is not None
        self._send_wants()
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        events = dict(poll.poll(self._silent_s * 1e3 if self._open else None))
        if not events:
            raise TransferError(f"it has been silent for {self._silent_s:g} s")
        if self._woken.fileno() in events:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(PAGE_BYTES)
        if self._socket.fileno() in events:
            self._take(decode_to_client(receive(self._socket)))

    def _send_wants(self) -> None:
        assert self._socket is not None and self._source is not None
        with self._lock:
            new, self._new = self._new, []
        for fetch in new:
            if any(slot.nbytes != self._source.block_bytes for slot in fetch.slots):
                logger.warning("%s have another size", self.name)
                fetch.fail()
                continue
            for start in range(0, len(fetch.digests), MAX_DIGESTS):
                end = start + MAX_DIGESTS
                part = fetch if len(fetch.digests) <= MAX_DIGESTS else _part(fetch, start, end)
                self._open[self._num_wants] = part
                want = Want(self._num_wants, list(part.digests), part.request_id)
                self._num_wants += 1
                self._socket.sendall(pack(want))

    def _take(self, message: Offer | Pieces | Missing | Alive) -> None:
        if isinstance(message, Pieces):
            self._take_pieces(message)
        elif isinstance(message, Missing):
            self._fetch(message.want).fail()
            del self._open[message.want]
        elif isinstance(message, Offer):
            raise TransferError("it does not speak as Headway does")

    def _fetch(self, want: int) -> _Fetch:
        fetch = self._open.get(want)
        if fetch is None:
            raise TransferError("it sends what was not wanted")
        return fetch

    def _take_pieces(self, message: Pieces) -> None:
        assert self._socket is not None and self._source is not None
        slots = []
        for piece in message.pieces:
            fetch = self._fetch(piece.want)
            if not 0 <= piece.index < len(fetch.digests) or not fetch.is_open[piece.index]:
                raise TransferError("it sends what was not wanted")
            slots.append(fetch.slots[piece.index])
        started_s = time.monotonic()
        are_good = self._source.copy_in(self._socket, message.pieces, slots)
        if message.pieces:
            self._note_time((message.copy_s + time.monotonic() - started_s) / len(message.pieces))
        if not all(are_good):
            raise TransferError("a block has changed on its way")
        if self._source.gives_back:
            self._socket.sendall(pack(Taken([piece.place for piece in message.pieces])))
        for piece in message.pieces:
            fetch = self._open[piece.want]
            fetch.end(piece.index, True)
            if not fetch.num_open:
                del self._open[piece.want]


def _part(fetch: _Fetch, start: int, end: int) -> _Fetch:
    return _Fetch(fetch.digests[start:end], fetch.slots[start:end], fetch.request_id, fetch.done)
