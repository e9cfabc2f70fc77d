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
import hashlib
import itertools
import logging
import mmap
import os
import queue
import secrets
import select
import socket
import stat
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.core.blocks import DIGEST_BYTES
from headway.errors import ConfigError, HeadwayError
from headway.kv.block_store import BlockStore
from headway.kv.disk_store import fastest_reader
from headway.rpc.channel import RefusedError, dial, greet, prepare_tcp

if TYPE_CHECKING:
    from torch import Tensor

    from headway.core import KVCacheManager
    from headway.engine.llm_engine import LLMEngine
    from headway.kv.block_store import Slot
    from headway.kv.host_blocks import HostBlocks

logger = logging.getLogger(__name__)

Carrier = Literal["shm", "cuda", "tcp"]
Done = Callable[[bytes, bool], None]
Bytes = NDArray[np.uint8]

FORMAT = 2
"""Of the messages and of the bytes of a block."""
PLACES_BYTES: dict[Carrier, int] = {"shm": 64 * 2**20, "cuda": 256 * 2**20, "tcp": 64 * 2**20}
"""Memory for blocks that are on their way, in a server: what a device copies while a message is under way is more."""
FEWEST_PLACES = 4
MAX_MESSAGE_BYTES = 4 * 2**20
MAX_DIGESTS = 65_536
"""In a message."""
MAX_WANTS = 4096
"""That a connection may have open."""
MAX_CONNECTIONS = 64
SECRET_BYTES = 32
TURN_S = 0.005
"""How long blocks are copied out between two steps."""
UNSEEN_S = 3.0
"""How long a request may be on its way to the server when its blocks are already wanted."""
WAIT_S = 120.0
"""The longest that a block is waited for, whatever its request does."""
ALIVE_S = 2.0
"""How often a server that has nothing to send says that it lives."""
SILENT_S = 10.0
"""A server that is silent for longer is given up; so is a client that keeps places for longer."""
MAX_REMEMBERED = 4096
"""Requests that have ended, of which it is known that nothing more comes."""
_PAGE = 4096
_LENGTH = struct.Struct("<I")
_SMOOTHED = 0.1  # weight of the newest measurement


class TransferError(HeadwayError):
    """The other end sent something wrong, or nothing."""


# ---- messages -------------------------------------------------------------------------------------------------------


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
_decode_to_client = msgspec.msgpack.Decoder(Offer | Pieces | Missing | Alive).decode
_decode_to_server = msgspec.msgpack.Decoder(Want | Taken).decode


def _pack(message: msgspec.Struct) -> bytes:
    payload = _encode(message)
    return _LENGTH.pack(len(payload)) + payload


def _receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fill it; raises `OSError`, also when the connection ends or takes longer than its timeout for the next bytes."""
    start = 0
    while start < target.nbytes:
        num_bytes = connection.recv_into(target[start:])
        if not num_bytes:
            raise ConnectionResetError("the other end closed the connection")
        start += num_bytes


def _receive_payload(connection: socket.socket, length: int) -> bytearray:
    if length > MAX_MESSAGE_BYTES:
        raise TransferError(f"a message claims to have {length:,} bytes")
    payload = bytearray(length)
    _receive_into(connection, memoryview(payload))
    return payload


def _receive(connection: socket.socket) -> bytearray:
    head = bytearray(_LENGTH.size)
    _receive_into(connection, memoryview(head))
    return _receive_payload(connection, _LENGTH.unpack(head)[0])


def _checksum(block: memoryview) -> int:
    """The CRC-32 of the CRC-32s of its parts: those are what compiled code is quick at."""
    return zlib.crc32(fastest_reader().crcs(block))


# ---- places ---------------------------------------------------------------------------------------------------------


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


class EngineBlocks:
    """The blocks that an engine keeps by their digests: those of its prefix cache, and those in host memory."""

    def __init__(self, kv_cache: KVCacheManager, memory: HostBlocks) -> None:
        self._kv_cache = kv_cache
        self._memory = memory

    @property
    def block_bytes(self) -> int:
        return self._memory.slot_bytes

    def find(self, digest: bytes) -> BlockAt | None:
        """A block is in the cache once its step has come back, and nothing writes to it while it is."""
        cache, tier = self._kv_cache.prefix_cache, self._kv_cache.host_tier
        if cache is not None and (found := cache.find([digest])):
            return BlockAt(False, found[0].block_id)
        slot = None if tier is None else tier.slot_of(digest)
        return None if slot is None else BlockAt(True, slot)

    def copy_out(self, blocks: Sequence[BlockAt], pieces: Tensor, places: Sequence[int]) -> Callable[[], None]:
        """Copies are queued behind the steps that were launched, and before those that come."""
        found = list(zip(blocks, places, strict=True))
        return self._memory.copy_out(
            [(at.number, place) for at, place in found if not at.is_on_host],
            [(at.number, place) for at, place in found if at.is_on_host],
            pieces,
        )


def fingerprint(engine: LLMEngine) -> str:
    """Of everything that the bytes of an engine's blocks depend on. Weights are told by where they come from: engines
    of one server have them from the same place."""
    config, plan = engine.config, engine.plan
    source = (config.model.model, config.model.load_format, config.model.quantization, config.model.seed)
    measures = (plan.dtype, plan.kv_dtype, plan.block_size, plan.bytes_per_block, plan.device.partition(":")[0])
    return hashlib.sha256(repr((FORMAT, source, measures, engine.model_config)).encode()).hexdigest()


def _numbers_bytes(num_places: int) -> int:
    """Room for a number of each place, in whole pages."""
    return -(-8 * num_places // _PAGE) * _PAGE


class Places:
    """The server's memory for blocks on their way."""

    def __init__(self, carrier: Carrier, block_bytes: int, num_places: int, device: str) -> None:
        import torch

        self.carrier = carrier
        self.block_bytes = block_bytes
        self.num_places = num_places
        self.descriptor = -1
        numbers_bytes, data_bytes = _numbers_bytes(num_places), num_places * block_bytes
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


def share_cuda(memory: Tensor) -> CudaHandle:
    """A handle with which one other process can open this memory, as long as it lives here."""
    return CudaHandle(*memory.untyped_storage()._share_cuda_()[:6])


def open_cuda(handle: CudaHandle, num_rows: int, row_bytes: int, *, device: int) -> Tensor:
    """uint8 [num_rows, row_bytes]: the memory behind a handle, for copies on this process's `device`. The GPU that has
    it need not be visible here. What is written there is not waited for."""
    import torch

    storage = torch.UntypedStorage._new_shared_cuda(
        device,
        handle.handle,
        handle.num_bytes,
        handle.offset_bytes,
        handle.counter_handle,
        handle.counter_offset,
        b"",
        False,
    )
    opened = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return opened.set_(storage, 0, (num_rows, row_bytes), (row_bytes, 1))


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
        self._lives: collections.OrderedDict[str, bool] = collections.OrderedDict()  # requests: whether they go on
        self._is_closed = False
        self.num_sent_blocks = 0
        self.num_early_blocks = 0
        """Of these, while the request that computes them went on: their way took no time of its own."""
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
            self.num_sent_blocks += len(found)
            self.num_early_blocks += len(found) if self._lives.get(wanted.request_id) else 0
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
                is_too_much = len(self._connections) >= MAX_CONNECTIONS
                if not is_too_much and not self._is_closed:
                    self._connections.append(own := _Connection(self, connection))
            if is_too_much or self._is_closed:
                connection.close()
            else:
                own.reader.start()

    def greet(self, connection: socket.socket) -> None:
        """Find out who it is, and say what there is. Raises `RefusedError` and `OSError`."""
        if connection.family == socket.AF_UNIX:
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if struct.unpack("3i", credentials)[1] != os.getuid():
                raise RefusedError("another user")
            connection.settimeout(SILENT_S)
            offer = self.offer
            if offer.carrier == "cuda":  # each client counts as one that has the memory
                offer = msgspec.structs.replace(offer, cuda=share_cuda(self.places.pieces))
            socket.send_fds(connection, [_pack(offer)], [self.places.descriptor])
        else:
            prepare_tcp(connection)
            greet(connection, self._secret.encode(), is_engine=True)
            connection.settimeout(SILENT_S)
            connection.sendall(_pack(self.offer))

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
            writer.start()
            self._socket.settimeout(None)
            while not self._is_closed:
                self._take(_decode_to_server(_receive(self._socket)))
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
                    self._socket.sendall(_pack(item))
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
            self._socket.sendall(_pack(Pieces(batch.pieces, copy_s)))
            return
        rows = [memoryview(places.pieces[piece.place].numpy().data) for piece in batch.pieces]
        for piece, row in zip(batch.pieces, rows, strict=True):
            piece.number = _checksum(row)
        copy_s = time.monotonic() - batch.started_s
        self._socket.sendall(_pack(Pieces(batch.pieces, copy_s)))
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


# ---- the client -----------------------------------------------------------------------------------------------------


@dataclass
class _Fetch:
    """What a `fetch` still waits for."""

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
        """A block has come, or does not."""
        self.is_open[index] = False
        self.num_open -= 1
        self.done(self.digests[index], is_there)

    def fail(self) -> None:
        """The rest does not come."""
        for index, is_open in enumerate(self.is_open):
            if is_open:
                self.end(index, False)


class PeerBlocks(BlockStore):
    """Blocks in the memory of other engines. One connection, with a thread, to each of those that were asked."""

    def __init__(self, *, fingerprint: str, cuda_device: int | None = None, silent_s: float = SILENT_S) -> None:
        """`fingerprint` as in `Offer`. `cuda_device`: the device whose process this is, if it has one."""
        self._fingerprint = fingerprint
        self._cuda_device = cuda_device
        self._silent_s = silent_s
        self._peers: dict[str, _Peer] = {}
        self._is_closed = False
        self.block_s = 0.0
        """What a block takes, smoothed: copying out and in, without the time until it is computed. 0: not known."""

    def fetch(self, digests: Sequence[bytes], slots: Sequence[Slot], source: str, done: Done) -> None:
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
        """Other engines keep what they compute, nothing else."""
        raise RuntimeError("blocks are fetched from other engines, not stored there")

    def close(self) -> None:
        """Fetches that are under way fail; returns when no slot is written any more."""
        self._is_closed = True
        for peer in self._peers.values():
            peer.close()
        for peer in self._peers.values():
            peer.join(SILENT_S)

    def _note_time(self, block_s: float) -> None:
        self.block_s += (_SMOOTHED if self.block_s else 1.0) * (block_s - self.block_s)


class _Peer(threading.Thread):
    """The connection to one server. All reading and writing of slots is done by this thread."""

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
        self._source: _Source | None = None

    # ---- others' threads ------------------------------------------------------------------------------------------

    def want(self, fetch: _Fetch) -> bool:
        """Take a fetch, unless it is over."""
        with self._lock:
            if self._is_over:
                return False
            self._new.append(fetch)
        self._wake()
        return True

    def close(self) -> None:
        """It is over."""
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
            payload: bytes | bytearray = _receive(connection)
        elif carrier in ("shm", "cuda"):
            self._socket = connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(self._silent_s)
            connection.connect(where)
            head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, 1)
            rest = bytearray(_LENGTH.size - len(head))
            _receive_into(connection, memoryview(rest))
            payload = _receive_payload(connection, _LENGTH.unpack(head + rest)[0])
        else:
            raise TransferError("there is no way to such an address")
        try:
            offer = _decode_to_client(payload)
            if not isinstance(offer, Offer) or offer.format != FORMAT or offer.carrier != carrier:
                raise TransferError("it does not speak as Headway does")
            if offer.fingerprint != self._fingerprint:
                raise TransferError("its blocks are of another model, or in another format")
            self._source = _source(offer, descriptors, self._cuda_device)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _turn(self) -> None:
        """Send what is newly wanted, then take one message if there is one."""
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
                self._woken.recv(_PAGE)
        if self._socket.fileno() in events:
            self._take(_decode_to_client(_receive(self._socket)))

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
                self._socket.sendall(_pack(want))

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
            self._socket.sendall(_pack(Taken([piece.place for piece in message.pieces])))
        for piece in message.pieces:
            fetch = self._open[piece.want]
            fetch.end(piece.index, True)
            if not fetch.num_open:
                del self._open[piece.want]


def _part(fetch: _Fetch, start: int, end: int) -> _Fetch:
    return _Fetch(fetch.digests[start:end], fetch.slots[start:end], fetch.request_id, fetch.done)


class _Source(Protocol):
    """How the bytes of pieces come."""

    block_bytes: int
    gives_back: bool

    def copy_in(self, connection: socket.socket, pieces: Sequence[Piece], slots: Sequence[Slot]) -> Sequence[bool]:
        """Fill the slots. Returns of which the bytes are right."""

    def close(self) -> None:
        """Let go of memory that belongs to the server."""


def _source(offer: Offer, descriptors: Sequence[int], cuda_device: int | None) -> _Source:
    if offer.block_bytes < 1 or offer.num_places < 1:
        raise TransferError("it does not speak as Headway does")
    if offer.carrier == "tcp":
        return _FromNetwork(offer)
    if len(descriptors) != 1:
        raise TransferError("it has not sent its memory")
    if offer.carrier == "shm":
        return _FromMemory(offer, descriptors[0])
    if cuda_device is None or offer.cuda is None:
        raise TransferError("its blocks are on a GPU, and this process has none")
    return _FromDevice(offer, descriptors[0], cuda_device)


def _in_host_memory(slots: Sequence[Slot]) -> list[memoryview]:
    found = [slot for slot in slots if isinstance(slot, memoryview)]
    if len(found) < len(slots):
        raise TransferError("blocks arrive on the device here, and only by CUDA IPC (arrival_memory)")
    return found


class _FromNetwork:
    gives_back = False

    def __init__(self, offer: Offer) -> None:
        self.block_bytes = offer.block_bytes

    def copy_in(self, connection: socket.socket, pieces: Sequence[Piece], slots: Sequence[Slot]) -> Sequence[bool]:
        are_good = []
        for piece, slot in zip(pieces, _in_host_memory(slots), strict=True):
            _receive_into(connection, slot)
            are_good.append(_checksum(slot) == piece.number)
        return are_good

    def close(self) -> None:
        pass


class _Numbered:
    """The numbers of a server's places."""

    gives_back = True

    def __init__(self, offer: Offer, descriptor: int, num_bytes: int) -> None:
        if os.fstat(descriptor).st_size < num_bytes:
            raise TransferError("its memory is smaller than it says")
        self.block_bytes = offer.block_bytes
        self._num_places = offer.num_places
        self._memory = np.frombuffer(mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ), dtype=np.uint8)
        self._numbers = self._memory[: 8 * offer.num_places].view(np.uint64)

    def check(self, pieces: Sequence[Piece]) -> None:
        """Before memory is touched."""
        if not all(0 <= piece.place < self._num_places for piece in pieces):
            raise TransferError("it names memory that it does not have")

    def are_unchanged(self, pieces: Sequence[Piece]) -> list[bool]:
        """Whether the places still hold what the message said."""
        return [int(self._numbers[piece.place]) == piece.number for piece in pieces]

    def close(self) -> None:
        """The mapping goes with its last view."""
        del self._memory, self._numbers


class _FromMemory(_Numbered):
    def __init__(self, offer: Offer, descriptor: int) -> None:
        start = _numbers_bytes(offer.num_places)
        super().__init__(offer, descriptor, start + offer.num_places * offer.block_bytes)
        self._rows: Bytes = self._memory[start:].reshape(offer.num_places, offer.block_bytes)

    def copy_in(self, connection: socket.socket, pieces: Sequence[Piece], slots: Sequence[Slot]) -> Sequence[bool]:
        self.check(pieces)
        for piece, slot in zip(pieces, _in_host_memory(slots), strict=True):
            np.copyto(np.frombuffer(slot, dtype=np.uint8), self._rows[piece.place])  # without Python's lock
        return self.are_unchanged(pieces)

    def close(self) -> None:
        del self._rows
        super().close()


def copy_rows(slots: Sequence[Slot], rows: Sequence[Tensor]) -> None:
    """Have the device copy its rows, uint8 [bytes of a block], to slots."""
    import torch

    targets = [torch.frombuffer(slot, dtype=torch.uint8) if isinstance(slot, memoryview) else slot for slot in slots]
    places = [(target.data_ptr(), row.data_ptr()) for target, row in zip(targets, rows, strict=True)]
    start = 0
    while start < len(rows):  # one copy for all that lie one behind the other: each takes a while to begin
        pair, (to, of), count = (targets[start], rows[start]), places[start], 1
        size = len(pair[0])
        most = min((first.untyped_storage().nbytes() - first.storage_offset()) // size for first in pair)
        while count < most and places[start + count : start + count + 1] == [(to + count * size, of + count * size)]:
            count += 1
        target, source = (first.as_strided((count * size,), (1,)) for first in pair)
        target.copy_(source, non_blocking=True)
        start += count


class _FromDevice(_Numbered):
    """Slots are written by the device, beside what else it does: its own memory, or pinned."""

    def __init__(self, offer: Offer, descriptor: int, device: int) -> None:
        import torch

        super().__init__(offer, descriptor, _numbers_bytes(offer.num_places))
        assert offer.cuda is not None
        torch.cuda.set_device(device)  # of this thread
        self._stream = torch.cuda.Stream(device)
        self._rows = open_cuda(offer.cuda, offer.num_places, offer.block_bytes, device=device).unbind(0)

    def copy_in(self, connection: socket.socket, pieces: Sequence[Piece], slots: Sequence[Slot]) -> Sequence[bool]:
        import torch

        self.check(pieces)
        with torch.cuda.stream(self._stream):
            copy_rows(slots, [self._rows[piece.place] for piece in pieces])
        self._stream.synchronize()
        return self.are_unchanged(pieces)

    def close(self) -> None:
        self._stream.synchronize()
        del self._rows
        super().close()
