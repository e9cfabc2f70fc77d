"""Sends KV blocks from the memory of one engine process to that of another, by their digests.

    BlockServer   in the process that has them                        PeerBlocks   in the one that wants them
                                        ◄── Want(digests) ──          fetch(digests, slots, address, done)
    between two steps: find, copy out into a place
                                        ── Pieces(places) ──►         copy the places into slots, check, done
    the places are free                 ◄── Taken(places) ──

The address says what carries the bytes (`carriers`); `#` and the id of a request that is computing them may follow:

    shm://PATH, cuda://PATH      the path of a Unix socket
    tcp://SECRET@HOST:PORT       the secret is for the greeting of `wire.greeting`

The server waits for a missing block while its request lives, so that blocks travel while the rest of the prompt is
computed. On any failure the client reports that a block did not arrive, after it has stopped writing into the block's
slot.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import os
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from headway.errors import ConfigError
from headway.transfer.block_connection import Connection, Wanted, name_of
from headway.transfer.block_messages import (
    FORMAT,
    SILENT_S,
    Carrier,
    Offer,
    Piece,
    pack,
)
from headway.transfer.carriers import Places, share_cuda
from headway.wire.engine_stats import TransferStats
from headway.wire.greeting import RefusedError, greet, prepare_tcp
from headway.wire.newcomers import Newcomers

if TYPE_CHECKING:
    from torch import Tensor


logger = logging.getLogger(__name__)

PLACES_BYTES: dict[Carrier, int] = {"shm": 64 * 2**20, "cuda": 256 * 2**20, "tcp": 64 * 2**20}
"""The server's memory for blocks in transfer. It is larger for devices, which copy more while a message is in
flight."""
FEWEST_PLACES = 4
MAX_CONNECTIONS = 64
"""The most greeted clients at a time."""
SECRET_BYTES = 32
TURN_S = 0.005
"""The time spent on copying blocks out between two steps."""
UNSEEN_S = 3.0
"""How long to wait for a request that has not arrived when its blocks are already wanted."""
WAIT_S = 120.0
"""The longest that a block is waited for, whatever its request does."""
MAX_REMEMBERED = 4096
"""How many ended requests are remembered, whose missing blocks are not waited for."""


# ---- what is served -------------------------------------------------------------------------------------------------


class BlockAt(NamedTuple):
    """The location of a block in an engine."""

    is_on_host: bool
    number: int
    """The number of the device block, or of the slot in host memory."""


class BlockReader(Protocol):
    """The engine whose blocks are served. The thread that makes its steps calls this between two steps."""

    @property
    def block_bytes(self) -> int: ...

    def find(self, digest: bytes) -> BlockAt | None:
        """The location of a block if its bytes are final, otherwise None."""

    def copy_out(self, blocks: Sequence[BlockAt], pieces: Tensor, places: Sequence[int]) -> Callable[[], None]:
        """Begin to copy blocks, as they are now, to rows of `pieces`. Returns a function that waits for the copies."""


# ---- the server -----------------------------------------------------------------------------------------------------


class BlockServer:
    """Serves the blocks of one engine. The thread that makes the steps calls `serve`; everything else runs in other
    threads, two per connection."""

    def __init__(
        self,
        reader: BlockReader,
        *,
        carrier: Carrier,
        fingerprint: str,
        folder: Path | None = None,
        host: str = "",
        device: str = "cpu",
        places_bytes: int | None = None,
        wake: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`folder`, for a Unix socket, must be this user's alone; `host`, for `tcp`, is an address of this machine:
        clients that know this server's address, with the secret in it, are served.
        `wake` is called, by any thread, when `serve` has something to do."""
        self._secret = secrets.token_hex(SECRET_BYTES)
        self._listener, self.address = _listen(carrier, folder, host, self._secret)
        self._reader = reader
        self.wake = wake
        self.now = now
        num_places = max(FEWEST_PLACES, (places_bytes or PLACES_BYTES[carrier]) // reader.block_bytes)
        self.places = Places(carrier, reader.block_bytes, num_places, device)
        self.offer = Offer(FORMAT, fingerprint, reader.block_bytes, self.places.num_places, carrier)
        self.lock = threading.Lock()
        self.free = list(range(self.places.num_places))  # under the lock, as the connections
        self._connections: list[Connection] = []
        self._newcomers = Newcomers()
        self._lives: collections.OrderedDict[str, bool] = collections.OrderedDict()  # request id → whether it is live
        self._is_closed = False
        self.stats = TransferStats()
        self._thread = threading.Thread(target=self._accept, name="block server", daemon=True)
        self._thread.start()

    # ---- the engine's thread --------------------------------------------------------------------------------------

    def note_request(self, request_id: str) -> None:
        """Note a new request, whose blocks are worth waiting for. Clients know it by its id without the front end's
        prefix."""
        request_id = name_of(request_id)
        self._lives[request_id] = True
        self._lives.move_to_end(request_id)
        while len(self._lives) > MAX_REMEMBERED and not next(iter(self._lives.values())):
            self._lives.popitem(last=False)

    def note_end(self, request_id: str) -> None:
        """Note that a request has ended and computes no more blocks."""
        request_id = name_of(request_id)
        if request_id in self._lives:
            self._lives[request_id] = False
            self._lives.move_to_end(request_id)

    def serve(self) -> bool:
        """Copy out wanted blocks that are there, for a limited time. Returns whether there is more to do at once."""
        with self.lock:
            wants = [(each, wanted) for each in self._connections for wanted in each.wanted]
        if not wants:
            return False
        until_s = self.now() + TURN_S
        for connection, wanted in wants:
            self._serve_want(connection, wanted, until_s)
        return self.now() >= until_s

    def _serve_want(self, connection: Connection, wanted: Wanted, until_s: float) -> None:
        reader, started_s = self._reader, self.now()
        found: list[BlockAt] = []
        places: list[int] = []
        pieces: list[Piece] = []
        is_missing = False
        while wanted.num_sent + len(found) < len(wanted.digests):
            at = reader.find(wanted.digests[wanted.num_sent + len(found)])
            is_missing = at is None
            if at is None or self.now() >= until_s:
                break
            with self.lock:
                if not self.free:
                    break
                places.append(self.free.pop())
            pieces.append(Piece(wanted.number, wanted.num_sent + len(found), places[-1], 0))
            found.append(at)
        if found:
            self.places.begin_write(places)
            wait = reader.copy_out(found, self.places.pieces, places)
            wanted.num_sent += len(found)
            self.stats.num_sent_blocks += len(found)
            self.stats.num_early_blocks += len(found) if self._lives.get(wanted.request_id) else 0
            connection.give(pieces, wait, started_s)
        if wanted.num_sent == len(wanted.digests):
            connection.end(wanted, is_whole=True)
        elif is_missing and not self._may_come(wanted):
            connection.end(wanted, is_whole=False)

    def _may_come(self, wanted: Wanted) -> bool:
        waited_s = self.now() - wanted.since_s
        if not wanted.request_id or waited_s > WAIT_S:
            return False
        lives = self._lives.get(wanted.request_id)
        return waited_s < UNSEEN_S if lives is None else lives

    def close(self) -> None:
        """Close all connections and serve nothing more."""
        self._is_closed = True
        for close in (lambda: self._listener.shutdown(socket.SHUT_RDWR), self._listener.close):
            with contextlib.suppress(OSError):
                close()
        with self.lock:
            connections = self._connections.copy()
        for connection in connections:
            connection.close()
        # None may be left inside of torch when the interpreter ends: that would abort the process.
        for thread in (self._thread, *(connection.reader for connection in connections)):
            if thread.ident is not None:
                thread.join(SILENT_S)
        self.places.close()
        if self._listener.family == socket.AF_UNIX:
            with contextlib.suppress(OSError):
                os.unlink(_path(self.address))

    # ---- its own threads ------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self.lock:
                if not self._is_closed:
                    self._connections.append(own := Connection(self, connection))
            if self._is_closed:
                connection.close()
            else:
                self._newcomers.enter(connection)
                own.reader.start()

    def greet(self, connection: socket.socket) -> None:
        """Find out who it is, and say what there is. Raises `RefusedError` and `OSError`."""
        try:
            self._greet(connection)
        finally:
            is_here = self._newcomers.leave(connection)
        if not is_here:
            raise ConnectionResetError

    def admit(self, connection: Connection) -> None:
        """It has been greeted. Raises `RefusedError` if there are too many."""
        with self.lock:
            if sum(each.is_admitted for each in self._connections) >= MAX_CONNECTIONS:
                raise RefusedError("there are too many clients")
            connection.is_admitted = True

    def _greet(self, connection: socket.socket) -> None:
        if connection.family == socket.AF_UNIX:
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if struct.unpack("3i", credentials)[1] != os.getuid():
                raise RefusedError("another user")
            connection.settimeout(SILENT_S)
            offer = self.offer
            if offer.carrier == "cuda":  # each client counts as one that has the memory
                offer = msgspec.structs.replace(offer, cuda=share_cuda(self.places.pieces))
            socket.send_fds(connection, [pack(offer)], [self.places.descriptor])
        else:
            prepare_tcp(connection)
            greet(connection, self._secret.encode(), is_engine=True)
            connection.settimeout(SILENT_S)
            connection.sendall(pack(self.offer))

    def forget(self, connection: Connection, places: Sequence[int]) -> None:
        """It is gone, and so is its claim to these places."""
        with self.lock:
            if connection in self._connections:
                self._connections.remove(connection)
            self.free += places
        self.wake()


def _listen(carrier: Carrier, folder: Path | None, host: str, secret: str) -> tuple[socket.socket, str]:
    if carrier == "tcp":
        listener = socket.create_server((host, 0), backlog=MAX_CONNECTIONS)
        return listener, f"tcp://{secret}@{host}:{listener.getsockname()[1]}"
    assert folder is not None
    found = folder.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(f"The folder '{folder}' of the sockets must be this user's alone (chmod 700).")
    path = folder / f"blocks-{os.getpid()}-{next(_numbers)}"
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        listener.listen(MAX_CONNECTIONS)
    except OSError as error:
        listener.close()
        raise ConfigError(f"No socket can be made at '{path}': {error}.") from error
    return listener, f"{carrier}://{path}"


_numbers = itertools.count()


def _path(address: str) -> str:
    return address.partition("://")[2]
