"""KV blocks from the memory of one engine process to that of another, by their digests.

    BlockServer   in the process that has them                        PeerBlocks   in the one that wants them
                                        ◄── Want(digests) ──          fetch(digests, slots, address, done)
    between two steps: find, copy out into a place
                                        ── Pieces(places) ──►         copy the places into slots, check, done
    the places are free                 ◄── Taken(places) ──

What carries the bytes is said by the address; `#` and the id of a request that is computing them may follow:

    shm://PATH        places are memory that both processes map; its descriptor comes over the Unix socket at PATH
    cuda://PATH       places are device memory, opened by CUDA IPC; slots are on the device too, or in host memory
    tcp://SECRET@HOST:PORT   bytes follow the message, with a checksum each; behind the greeting of `channel`

A digest that is not there is waited for while its request lives, so that blocks travel while the rest of the prompt is
being computed. Every place has a number that changes before and after it is written; a reader that finds another one
than it was told, after its copy, has not got the block. Whatever goes wrong, the client says of a block that it did not
come, and stops writing into its slot before it says so.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import mmap
import os
import queue
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.core.kv.blocks import DIGEST_BYTES
from headway.errors import ConfigError, HeadwayError
from headway.transfer.block_messages import (
    FORMAT,
    MAX_DIGESTS,
    SILENT_S,
    Alive,
    Carrier,
    Missing,
    Offer,
    Piece,
    Pieces,
    Taken,
    TransferError,
    Want,
    bytes_of_numbers,
    checksum,
    decode_to_server,
    pack,
    receive,
    share_cuda,
)
from headway.wire.engine_stats import TransferStats
from headway.wire.greeting import RefusedError, greet, prepare_tcp
from headway.wire.newcomers import Newcomers

if TYPE_CHECKING:
    from torch import Tensor


logger = logging.getLogger(__name__)

PLACES_BYTES: dict[Carrier, int] = {"shm": 64 * 2**20, "cuda": 256 * 2**20, "tcp": 64 * 2**20}
"""Memory for blocks that are on their way, in a server: what a device copies while a message is under way is more."""
FEWEST_PLACES = 4
MAX_WANTS = 4096
"""That a connection may have open."""
MAX_CONNECTIONS = 64
"""Clients that have been greeted."""
SECRET_BYTES = 32
TURN_S = 0.005
"""How long blocks are copied out between two steps."""
UNSEEN_S = 3.0
"""How long a request may be on its way to the server when its blocks are already wanted."""
WAIT_S = 120.0
"""The longest that a block is waited for, whatever its request does."""
ALIVE_S = 2.0
"""How often a server that has nothing to send says that it lives."""
MAX_REMEMBERED = 4096
"""Requests that have ended, of which it is known that nothing more comes."""


# ---- what is served -------------------------------------------------------------------------------------------------


class BlockAt(NamedTuple):
    """Where an engine has a block."""

    is_on_host: bool
    number: int
    """Of the device block, or of the slot in host memory."""


class BlockReader(Protocol):
    """The engine whose blocks are served. It is asked by the thread that makes its steps, between two of them."""

    @property
    def block_bytes(self) -> int: ...

    def find(self, digest: bytes) -> BlockAt | None:
        """Where a block is whose bytes are final."""

    def copy_out(self, blocks: Sequence[BlockAt], pieces: Tensor, places: Sequence[int]) -> Callable[[], None]:
        """Begin to copy blocks to rows of `pieces`, as they are now. Returns what waits until they are there."""


class Places:
    """The server's memory for blocks on their way."""

    def __init__(self, carrier: Carrier, block_bytes: int, num_places: int, device: str) -> None:
        import torch

        self.carrier = carrier
        self.block_bytes = block_bytes
        self.num_places = num_places
        self.descriptor = -1
        numbers_bytes, data_bytes = bytes_of_numbers(num_places), num_places * block_bytes
        if carrier == "tcp":
            is_pinned = device.startswith("cuda")
            self.pieces = torch.empty(num_places, block_bytes, dtype=torch.uint8, pin_memory=is_pinned)
            self.numbers: NDArray[np.uint64] = np.zeros(num_places, dtype=np.uint64)
            return
        shared_bytes = numbers_bytes + (data_bytes if carrier == "shm" else 0)
        self.descriptor = os.memfd_create("headway-blocks", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, shared_bytes)
        memory = np.frombuffer(mmap.mmap(self.descriptor, shared_bytes), dtype=np.uint8)
        self.numbers = memory[: 8 * num_places].view(np.uint64)
        if carrier == "shm":
            self.pieces = torch.from_numpy(memory[numbers_bytes:].reshape(num_places, block_bytes))
        else:
            self.pieces = torch.empty(num_places, block_bytes, dtype=torch.uint8, device=device)

    def begin_write(self, places: Sequence[int]) -> None:
        """What they hold is not valid any more. Odd numbers say so."""
        for place in places:
            self.numbers[place] += np.uint64(1 + int(self.numbers[place]) % 2)

    def end_write(self, place: int) -> int:
        """It holds a block again. Returns its number now."""
        self.numbers[place] += np.uint64(1)
        return int(self.numbers[place])

    def close(self) -> None:
        """Others keep what they have mapped."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


# ---- the server -----------------------------------------------------------------------------------------------------


@dataclass
class _Wanted:
    """What is left of a `Want`."""

    number: int
    digests: list[bytes]
    request_id: str
    since_s: float
    num_sent: int = 0


class BlockServer:
    """Hands out blocks of one engine. `serve` belongs to the thread that makes its steps; the rest runs in threads of
    its own, two for each connection."""

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
        """`folder`, for a Unix socket, must be this user's alone; `host`, for `tcp`, is an address of this machine: who
        has been told this server's, with the secret in it, is served.
        `wake` is called, by any thread, when `serve` has something to do."""
        self._secret = secrets.token_hex(SECRET_BYTES)
        self._listener, self.address = _listen(carrier, folder, host, self._secret)
        self._reader = reader
        self._wake = wake
        self._now = now
        num_places = max(FEWEST_PLACES, (places_bytes or PLACES_BYTES[carrier]) // reader.block_bytes)
        self.places = Places(carrier, reader.block_bytes, num_places, device)
        self.offer = Offer(FORMAT, fingerprint, reader.block_bytes, self.places.num_places, carrier)
        self.lock = threading.Lock()
        self.free = list(range(self.places.num_places))  # under the lock, as the connections
        self._connections: list[_Connection] = []
        self._newcomers = Newcomers()
        self._lives: collections.OrderedDict[str, bool] = collections.OrderedDict()  # requests: whether they go on
        self._is_closed = False
        self.stats = TransferStats()
        self._thread = threading.Thread(target=self._accept, name="block server", daemon=True)
        self._thread.start()

    # ---- the engine's thread --------------------------------------------------------------------------------------

    def note_request(self, request_id: str) -> None:
        """A request has come: its blocks are worth waiting for. Clients know it without the name of its front end."""
        request_id = _name(request_id)
        self._lives[request_id] = True
        self._lives.move_to_end(request_id)
        while len(self._lives) > MAX_REMEMBERED and not next(iter(self._lives.values())):
            self._lives.popitem(last=False)

    def note_end(self, request_id: str) -> None:
        """It computes nothing more."""
        request_id = _name(request_id)
        if request_id in self._lives:
            self._lives[request_id] = False
            self._lives.move_to_end(request_id)

    def serve(self) -> bool:
        """Copy out what is wanted and there, for a limited time. Returns whether there is more to do at once."""
        with self.lock:
            wants = [(each, wanted) for each in self._connections for wanted in each.wanted]
        if not wants:
            return False
        until_s = self._now() + TURN_S
        for connection, wanted in wants:
            self._serve_want(connection, wanted, until_s)
        return self._now() >= until_s

    def _serve_want(self, connection: _Connection, wanted: _Wanted, until_s: float) -> None:
        reader, started_s = self._reader, self._now()
        found: list[BlockAt] = []
        places: list[int] = []
        pieces: list[Piece] = []
        is_missing = False
        while wanted.num_sent + len(found) < len(wanted.digests):
            at = reader.find(wanted.digests[wanted.num_sent + len(found)])
            is_missing = at is None
            if at is None or self._now() >= until_s:
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

    def _may_come(self, wanted: _Wanted) -> bool:
        waited_s = self._now() - wanted.since_s
        if not wanted.request_id or waited_s > WAIT_S:
            return False
        lives = self._lives.get(wanted.request_id)
        return waited_s < UNSEEN_S if lives is None else lives

    def close(self) -> None:
        """Nothing more is served."""
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
                    self._connections.append(own := _Connection(self, connection))
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

    def admit(self, connection: _Connection) -> None:
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

    def forget(self, connection: _Connection, places: Sequence[int]) -> None:
        """It is gone, and so is its claim to these places."""
        with self.lock:
            if connection in self._connections:
                self._connections.remove(connection)
            self.free += places
        self._wake()


def _name(request_id: str) -> str:
    """What an address says of a request: all that is behind its `#`."""
    return request_id.rpartition("#")[2]


class _Batch(NamedTuple):
    pieces: list[Piece]
    wait: Callable[[], None]
    started_s: float


class _Connection:
    """A client of the server. A thread reads what it wants, another one sends."""

    def __init__(self, server: BlockServer, connection: socket.socket) -> None:
        self._server = server
        self._socket = connection
        self._outgoing: queue.SimpleQueue[_Batch | msgspec.Struct | None] = queue.SimpleQueue()
        self.is_admitted = False
        """Under the server's lock."""
        self._is_closed = False
        self._is_gone = False
        self._held: dict[int, float] = {}  # places that it has, and since when; under the server's lock
        self.wanted: list[_Wanted] = []  # likewise
        self.reader = threading.Thread(target=self._read, name="blocks wanted", daemon=True)
        """Greets, then listens; it ends after the thread that sends."""

    def give(self, pieces: list[Piece], wait: Callable[[], None], started_s: float) -> None:
        """Send pieces, when they have been copied out."""
        self._outgoing.put(_Batch(pieces, wait, started_s))
        if self._is_gone:  # nobody may have seen them
            self._return_unsent()

    def end(self, wanted: _Wanted, *, is_whole: bool) -> None:
        """Nothing more comes for a want."""
        with self._server.lock:
            if wanted in self.wanted:
                self.wanted.remove(wanted)
        if not is_whole:
            self._outgoing.put(Missing(wanted.number))

    def close(self) -> None:
        """Both threads end; places go back when the copies into them have been made."""
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
        """Of batches that nobody sends any more: the copies may still be under way."""
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
                name = _name(message.request_id)
                self.wanted.append(_Wanted(message.number, message.digests, name, server._now()))
        else:
            with server.lock:
                if not all(place in self._held for place in message.places):
                    raise TransferError("it gives back what it does not have")
                for place in message.places:
                    del self._held[place]
                server.free += message.places
        server._wake()

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
