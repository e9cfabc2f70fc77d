"""The connection to a client of a `BlockServer`: one thread reads its wants, another sends copied blocks."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from headway.core.kv.blocks import DIGEST_BYTES
from headway.errors import HeadwayError
from headway.transfer.block_messages import (
    MAX_DIGESTS,
    SILENT_S,
    Alive,
    Missing,
    Piece,
    Pieces,
    Taken,
    TransferError,
    Want,
    checksum,
    decode_to_server,
    pack,
    receive,
)
from headway.transfer.carriers import Places

logger = logging.getLogger(__name__)

MAX_WANTS = 4096
"""The most wants that a connection may have open."""
ALIVE_S = 2.0
"""The interval of signs of life from a server that has nothing to send."""


class ConnectionOwner(Protocol):
    """The server as its connections use it."""

    lock: threading.Lock
    free: list[int]
    """Places that no client has. Guarded by the lock."""
    places: Places
    now: Callable[[], float]

    def greet(self, connection: socket.socket) -> None:
        """Authenticate a client and send it the offer. Raises `RefusedError` and `OSError`."""

    def admit(self, connection: Connection) -> None:
        """Admit a greeted client. Raises `RefusedError` if there are too many."""

    def wake(self) -> None:
        """Wake the engine's thread, because a block is wanted or places are free."""

    def forget(self, connection: Connection, places: Sequence[int]) -> None:
        """Remove a connection that is gone, and free these places."""


@dataclass
class Wanted:
    """The unserved rest of a `Want`."""

    number: int
    digests: list[bytes]
    request_id: str
    since_s: float
    num_sent: int = 0


def name_of(request_id: str) -> str:
    """The part of a request id by which clients know it: the text after the last `#`."""
    return request_id.rpartition("#")[2]


class _Batch(NamedTuple):
    pieces: list[Piece]
    wait: Callable[[], None]
    started_s: float


class Connection:
    """A client of the server, with one thread that reads and one that sends."""

    def __init__(self, server: ConnectionOwner, connection: socket.socket) -> None:
        self._server = server
        self._socket = connection
        self._outgoing: queue.SimpleQueue[_Batch | msgspec.Struct | None] = queue.SimpleQueue()
        self.is_admitted = False
        """Whether it was admitted. Guarded by the server's lock."""
        self._is_closed = False
        self._is_gone = False
        self._held: dict[int, float] = {}  # places that the client holds → since when; guarded by the server's lock
        self.wanted: list[Wanted] = []  # likewise
        self.reader = threading.Thread(target=self._read, name="blocks wanted", daemon=True)
        """The thread that greets and then reads. It ends after the thread that sends."""

    def give(self, pieces: list[Piece], wait: Callable[[], None], started_s: float) -> None:
        """Send pieces as soon as they have been copied out."""
        self._outgoing.put(_Batch(pieces, wait, started_s))
        if self._is_gone:  # its threads may have ended before they saw them
            self._return_unsent()

    def end(self, wanted: Wanted, *, is_whole: bool) -> None:
        """End a want. If it is not complete, a message says so to the client."""
        with self._server.lock:
            if wanted in self.wanted:
                self.wanted.remove(wanted)
        if not is_whole:
            self._outgoing.put(Missing(wanted.number))

    def close(self) -> None:
        """End both threads. Places are returned when the copies into them are complete."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._outgoing.put(None)

    def _read(self) -> None:
        writer = threading.Thread(target=self._write, name="blocks sent", daemon=True)
        try:
            self._server.greet(self._socket)
            self._server.admit(self)
            writer.start()
            self._socket.settimeout(None)
            while not self._is_closed:
                self._take(decode_to_server(receive(self._socket)))
        except (OSError, HeadwayError, msgspec.DecodeError, RuntimeError) as error:
            if not self._is_closed and not isinstance(error, ConnectionResetError):
                logger.warning("a client of this engine's blocks is given up: %s", error)
        finally:
            self.close()
            if writer.ident is not None:
                writer.join()
            self._socket.close()
            with self._server.lock:
                self.wanted.clear()
            self._is_gone = True
            self._return_unsent()
            self._server.forget(self, list(self._held))

    def _return_unsent(self) -> None:
        """Return the places of batches that will not be sent, after waiting for copies in progress."""
        while True:
            try:
                batch = self._outgoing.get_nowait()
            except queue.Empty:
                return
            if isinstance(batch, _Batch):
                with contextlib.suppress(RuntimeError):
                    batch.wait()
                with self._server.lock:
                    self._server.free += [piece.place for piece in batch.pieces]

    def _take(self, message: Want | Taken) -> None:
        server = self._server
        if isinstance(message, Want):
            is_sane = 0 < len(message.digests) <= MAX_DIGESTS and len(self.wanted) < MAX_WANTS
            if not is_sane or any(len(digest) != DIGEST_BYTES for digest in message.digests):
                raise TransferError("it wants too much, or no digests")
            with server.lock:
                name = name_of(message.request_id)
                self.wanted.append(Wanted(message.number, message.digests, name, server.now()))
        else:
            with server.lock:
                if not all(place in self._held for place in message.places):
                    raise TransferError("it gives back what it does not have")
                for place in message.places:
                    del self._held[place]
                server.free += message.places
        server.wake()

    def _write(self) -> None:
        try:
            while not self._is_closed:
                try:
                    item = self._outgoing.get(timeout=ALIVE_S)
                except queue.Empty:
                    self._check_held()
                    item = Alive()
                if isinstance(item, _Batch):
                    self._send(item)
                elif item is not None:
                    self._socket.sendall(pack(item))
        except (OSError, TransferError, RuntimeError) as error:
            if not self._is_closed:
                logger.warning("a client of this engine's blocks is given up: %s", error)
            self.close()

    def _send(self, batch: _Batch) -> None:
        server, places = self._server, self._server.places
        with server.lock:
            self._held.update((piece.place, time.monotonic()) for piece in batch.pieces)
        batch.wait()
        if places.carrier != "tcp":
            for piece in batch.pieces:
                piece.number = places.end_write(piece.place)
            copy_s = time.monotonic() - batch.started_s
            self._socket.sendall(pack(Pieces(batch.pieces, copy_s)))
            return
        rows = [memoryview(places.pieces[piece.place].numpy().data) for piece in batch.pieces]
        for piece, row in zip(batch.pieces, rows, strict=True):
            piece.number = checksum(row)
        copy_s = time.monotonic() - batch.started_s
        self._socket.sendall(pack(Pieces(batch.pieces, copy_s)))
        for row in rows:
            self._socket.sendall(row)
        self._take(Taken([piece.place for piece in batch.pieces]))

    def _check_held(self) -> None:
        with self._server.lock:
            oldest_s = min(self._held.values(), default=float("inf"))
        if time.monotonic() - oldest_s > SILENT_S:
            raise TransferError("it does not take what it wanted")
