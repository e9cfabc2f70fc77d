"""Blocks between two processes' memories: they come byte for byte or not at all, and nothing hangs or is lost."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
import torch

from headway.core.kv.blocks import DIGEST_BYTES
from headway.errors import ConfigError
from headway.transfer import block_connection, block_messages, block_server, carriers
from headway.transfer.block_client import PeerBlocks
from headway.transfer.block_messages import Carrier, Offer, Piece, TransferError
from headway.transfer.block_server import MAX_CONNECTIONS, BlockAt, BlockServer
from headway.transfer.carriers import Places
from headway.wire.greeting import NONCE_BYTES

BLOCK_BYTES = 1000
FINGERPRINT = "a model, a format"
NUM_CUTS = int(os.environ.get("HEADWAY_TRANSFER_CUTS", "50"))
"""How often transfers are cut at a random point."""


def digest(number: int) -> bytes:
    return blake2b(str(number).encode(), digest_size=DIGEST_BYTES).digest()


def contents(number: int, block_bytes: int = BLOCK_BYTES) -> bytes:
    return random.Random(number).randbytes(block_bytes)


class Memory:
    """An engine's blocks: even ones on the device, odd ones in slots."""

    def __init__(self, numbers: Sequence[int] = (), block_bytes: int = BLOCK_BYTES) -> None:
        self.block_bytes = block_bytes
        self._blocks: dict[bytes, int] = {}
        for number in numbers:
            self.compute(number)

    def compute(self, number: int) -> None:
        self._blocks[digest(number)] = number

    def find(self, wanted: bytes) -> BlockAt | None:
        number = self._blocks.get(wanted)
        return None if number is None else BlockAt(bool(number % 2), number // 2)

    def copy_out(self, blocks: Sequence[BlockAt], pieces: torch.Tensor, places: Sequence[int]) -> Callable[[], None]:
        for at, place in zip(blocks, places, strict=True):
            number = 2 * at.number + at.is_on_host
            pieces[place] = torch.frombuffer(bytearray(contents(number, self.block_bytes)), dtype=torch.uint8)
        return lambda: None


class Engine:
    """A server whose engine thread turns whenever it is woken."""

    def __init__(self, memory: Memory, carrier: Carrier, folder: Path) -> None:
        self._woken = threading.Event()
        self._is_closed = False
        self.server = BlockServer(
            memory,
            carrier=carrier,
            fingerprint=FINGERPRINT,
            folder=folder,
            host="127.0.0.1",
            places_bytes=4 * memory.block_bytes,
            wake=self._woken.set,
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_closed:
            self._woken.wait(0.05)
            self._woken.clear()
            self.server.serve()

    def turn(self) -> None:
        self._woken.set()

    def close(self) -> None:
        self._is_closed = True
        self._woken.set()
        self._thread.join()
        self.server.close()

    def check_nothing_lost(self) -> None:
        """All places are free, each once."""
        deadline_s = time.monotonic() + 20
        num_places = self.server.places.num_places
        while sorted(self.server.free) != list(range(num_places)):
            assert time.monotonic() < deadline_s, (self.server.free, self.server._connections)
            time.sleep(0.001)


class Slots:
    """A client's memory, and what it was told."""

    def __init__(self, numbers: Sequence[int], block_bytes: int = BLOCK_BYTES) -> None:
        self.numbers = list(numbers)
        self.memory = np.zeros((len(self.numbers), block_bytes), dtype=np.uint8)
        self.told: list[tuple[bytes, bool]] = []
        self._changed = threading.Condition()

    def fetch(self, store: PeerBlocks, source: str) -> Slots:
        views = [memoryview(row.data) for row in self.memory]
        store.fetch([digest(number) for number in self.numbers], views, source, self._done)
        return self

    def _done(self, of: bytes, is_there: bool) -> None:
        with self._changed:
            if not is_there:  # whoever may still write would be seen
                self.memory[self.numbers.index(_numbers[of])] = 7
            self.told.append((of, is_there))
            self._changed.notify_all()

    def wait(self, num_told: int | None = None) -> dict[int, bool]:
        """Until so many blocks, or all, have come or failed; what became of each."""
        wanted = len(self.numbers) if num_told is None else num_told
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.told) >= wanted, timeout=30), f"told {len(self.told)}"
            assert len({of for of, _ in self.told}) == len(self.told), "each is told of once"
            return {_numbers[of]: is_there for of, is_there in self.told}

    def check(self) -> int:
        """What came is right, and what did not was left alone. Returns how many came."""
        outcome = self.wait()
        for place, number in enumerate(self.numbers):
            expected = contents(number, self.memory.shape[1]) if outcome[number] else b"\7" * self.memory.shape[1]
            assert self.memory[place].tobytes() == expected, f"block {number}"
        return sum(outcome.values())


_numbers = {digest(number): number for number in range(1000)}


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="headway-") as path:
        yield Path(path)


@pytest.fixture
def store() -> Iterator[PeerBlocks]:
    with contextlib.closing(PeerBlocks(fingerprint=FINGERPRINT)) as peers:
        yield peers


CARRIERS: list[Carrier] = ["shm", "tcp"]


@pytest.mark.parametrize("carrier", CARRIERS)
def test_blocks_come_as_they_are(carrier: Carrier, folder: Path, store: PeerBlocks) -> None:
    with contextlib.closing(Engine(Memory(range(40)), carrier, folder)) as engine:
        first = Slots(range(40)).fetch(store, engine.server.address)  # ten times as many as there are places
        second = Slots(range(39, -1, -3)).fetch(store, engine.server.address)
        assert first.check() == 40 and second.check() == 14
        assert [of for of, _ in first.told] == [digest(number) for number in range(40)], "in order"
        assert store.block_s > 0.0
        engine.check_nothing_lost()


@pytest.mark.parametrize("carrier", CARRIERS)
def test_blocks_that_are_being_computed_are_waited_for(carrier: Carrier, folder: Path, store: PeerBlocks) -> None:
    memory = Memory([0, 1])
    with contextlib.closing(Engine(memory, carrier, folder)) as engine:
        engine.server.note_request("r")
        slots = Slots(range(6)).fetch(store, f"{engine.server.address}#r")
        assert slots.wait(2) == {0: True, 1: True}
        for number in (2, 3):
            memory.compute(number)
            engine.turn()
            assert slots.wait(number + 1)[number]
        assert len(slots.told) == 4
        engine.server.note_end("r")
        engine.turn()
        assert slots.check() == 4, "the request has ended, and two are not there"
        engine.check_nothing_lost()


def test_what_nobody_computes_is_not_waited_for(folder: Path, store: PeerBlocks) -> None:
    with contextlib.closing(Engine(Memory([0]), "shm", folder)) as engine:
        assert Slots(range(3)).fetch(store, engine.server.address).check() == 1
        engine.server.note_request("ended")
        engine.server.note_end("ended")
        assert Slots(range(3)).fetch(store, f"{engine.server.address}#ended").check() == 1


def test_a_request_may_come_after_the_wish_for_its_blocks(
    folder: Path, store: PeerBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory()
    with contextlib.closing(Engine(memory, "shm", folder)) as engine:
        slots = Slots(range(2)).fetch(store, f"{engine.server.address}#late")
        while not any(each.wanted for each in engine.server._connections):
            time.sleep(0.001)
        engine.turn()
        engine.server.note_request("late")
        for number in range(2):
            memory.compute(number)
        engine.turn()
        assert slots.check() == 2
        monkeypatch.setattr(block_server, "UNSEEN_S", 0.05)
        assert Slots([5]).fetch(store, f"{engine.server.address}#never").check() == 0


def test_another_format_or_size_is_refused(folder: Path, store: PeerBlocks) -> None:
    with contextlib.closing(Engine(Memory(range(4)), "shm", folder)) as engine:
        other = PeerBlocks(fingerprint="another model")
        assert Slots(range(4)).fetch(other, engine.server.address).check() == 0
        other.close()
        assert Slots(range(4), block_bytes=BLOCK_BYTES + 4).fetch(store, engine.server.address).check() == 0
        assert Slots(range(4)).fetch(store, engine.server.address).check() == 4


@pytest.mark.parametrize(
    "address", ["shm:///nowhere/at/all", "tcp://127.0.0.1:9", "carrier-pigeon://x", "", "tcp://127.0.0.1:x"]
)
def test_nothing_there(address: str, store: PeerBlocks) -> None:
    for _ in range(2):  # also when it is asked anew
        assert Slots(range(3)).fetch(store, address).check() == 0


def test_the_network_needs_the_secret(folder: Path, store: PeerBlocks, caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.closing(Engine(Memory(range(4)), "tcp", folder)) as engine:
        secret, _, place = engine.server.address.removeprefix("tcp://").rpartition("@")
        for wrong in (f"tcp://{place}", f"tcp://guessed@{place}", f"tcp://{secret[::-1]}@{place}"):
            assert Slots(range(4)).fetch(store, wrong).check() == 0
        assert Slots(range(4)).fetch(store, engine.server.address).check() == 4
        assert secret not in caplog.text and place in caplog.text
        host, _, port = place.rpartition(":")
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(os.urandom(NONCE_BYTES * 100))
            raw.settimeout(15)
            with contextlib.suppress(ConnectionError):
                while raw.recv(4096):
                    pass


def test_those_who_say_nothing_keep_no_client_out(folder: Path, store: PeerBlocks) -> None:
    with contextlib.closing(Engine(Memory(range(4)), "tcp", folder)) as engine, contextlib.ExitStack() as silent:
        host, _, port = engine.server.address.rpartition("@")[2].rpartition(":")
        for _ in range(MAX_CONNECTIONS + 4):
            silent.enter_context(socket.create_connection((host, int(port)), timeout=5))
        assert Slots(range(4)).fetch(store, engine.server.address).check() == 4


def test_there_is_a_limit_to_clients_that_are_greeted(
    folder: Path, store: PeerBlocks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(block_server, "MAX_CONNECTIONS", 0)
    with contextlib.closing(Engine(Memory(range(4)), "shm", folder)) as engine:
        assert Slots(range(4)).fetch(store, engine.server.address).check() == 0
    assert "there are too many clients" in caplog.text


def test_sockets_are_only_made_where_nobody_else_comes(folder: Path) -> None:
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        BlockServer(Memory(), carrier="shm", fingerprint=FINGERPRINT, folder=folder)
    deep = folder / ("x" * 90)
    deep.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="No socket can be made"):
        BlockServer(Memory(), carrier="shm", fingerprint=FINGERPRINT, folder=deep)


def test_a_silent_server_is_given_up(folder: Path) -> None:
    with contextlib.closing(Engine(Memory(), "shm", folder)) as engine:
        impatient = PeerBlocks(fingerprint=FINGERPRINT, silent_s=0.05)
        engine.server.note_request("r")
        assert Slots([1]).fetch(impatient, f"{engine.server.address}#r").check() == 0
        impatient.close()
        engine.check_nothing_lost()


def test_signs_of_life_are_enough(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_connection, "ALIVE_S", 0.02)
    memory = Memory()
    with contextlib.closing(Engine(memory, "shm", folder)) as engine:
        patient = PeerBlocks(fingerprint=FINGERPRINT, silent_s=1.0)
        engine.server.note_request("r")
        slots = Slots([1]).fetch(patient, f"{engine.server.address}#r")
        time.sleep(1.2)
        memory.compute(1)
        assert slots.check() == 1
        patient.close()


def test_places_that_are_not_given_back_do_not_stay_away(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_connection, "ALIVE_S", 0.02)
    monkeypatch.setattr(block_connection, "SILENT_S", 0.1)
    with contextlib.closing(Engine(Memory(range(4)), "shm", folder)) as engine:
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(engine.server.address.removeprefix("shm://"))
            raw.sendall(block_messages.pack(block_messages.Want(0, [digest(1)], "")))
            raw.settimeout(20)
            while raw.recv(4096):
                pass
        engine.check_nothing_lost()


def test_a_place_that_is_written_again_is_noticed() -> None:
    places = Places("shm", BLOCK_BYTES, 2, "cpu")
    offer = Offer(1, "", BLOCK_BYTES, 2, "shm")
    source = carriers.source_of(offer, [places.descriptor], None)
    slot = memoryview(bytearray(BLOCK_BYTES))
    no_socket = socket.socket()
    places.begin_write([1])
    places.pieces[1] = 3
    piece = Piece(0, 0, 1, places.end_write(1))
    assert source.copy_in(no_socket, [piece], [slot]) == [True] and bytes(slot) == b"\3" * BLOCK_BYTES
    places.begin_write([1])
    assert source.copy_in(no_socket, [piece], [slot]) == [False], "it is being written"
    places.begin_write([1])
    assert source.copy_in(no_socket, [piece], [slot]) == [False], "by the next one, as the first was given up"
    places.end_write(1)
    assert source.copy_in(no_socket, [piece], [slot]) == [False], "it has been"
    with pytest.raises(TransferError):
        source.copy_in(no_socket, [Piece(0, 0, 2, 2)], [slot])
    source.close()
    places.close()
    no_socket.close()


def test_nonsense_from_a_client_ends_its_connection_alone(folder: Path, store: PeerBlocks) -> None:
    with contextlib.closing(Engine(Memory(range(4)), "shm", folder)) as engine:
        rng = random.Random(0)
        frames = [
            rng.randbytes(100),
            b"\xff\xff\xff\xff",
            block_messages.pack(block_messages.Taken([3])),
            block_messages.pack(block_messages.Want(0, [b"short"], "")),
            block_messages.pack(block_messages.Want(0, [], "")),
            block_messages.pack(block_messages.Missing(1)),
        ]
        for frame in frames:
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(engine.server.address.removeprefix("shm://"))
                raw.settimeout(20)
                # Whoever is hung up on before all was read is told so, sooner or later.
                with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                    raw.sendall(frame)
                    raw.shutdown(socket.SHUT_WR)
                    while raw.recv(4096):
                        pass
        assert Slots(range(4)).fetch(store, engine.server.address).check() == 4
        engine.check_nothing_lost()


# ---- cuts -----------------------------------------------------------------------------------------------------------


class Proxy:
    """Between client and TCP server: lets so many bytes through from the server, then cuts, or changes one."""

    def __init__(self, target: str, num_bytes: int, *, corrupts: bool) -> None:
        secret, _, place = target.rpartition("@")
        host, _, port = place.rpartition(":")
        self._target = (host, int(port))
        self._left, self._corrupts = num_bytes, corrupts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"{secret}@127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                threading.Thread(target=self._pass_on, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._pass_on, args=(far, near, True), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(997):
                if is_counted and len(data) > self._left >= 0:
                    if not self._corrupts:
                        target.sendall(data[: self._left])
                        break
                    data = data[: self._left] + bytes([data[self._left] ^ 1]) + data[self._left + 1 :]
                self._left -= len(data) if is_counted else 0
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def test_a_transfer_that_is_cut_anywhere_leaves_no_wrong_byte(folder: Path) -> None:
    """By the network at any byte, by either end at any moment; or a bit is turned over."""
    rng = random.Random(1)
    num_blocks = 24
    memory = Memory(range(num_blocks))
    engines = {carrier: Engine(memory, carrier, folder) for carrier in CARRIERS}
    outcomes = []
    try:
        for _ in range(NUM_CUTS):
            cut = rng.choice(["bytes", "bit", "server end", "client end", "server end", "client end"])
            carrier: Carrier = "tcp" if cut in ("bytes", "bit") else rng.choice(CARRIERS)
            engine = engines[carrier]
            store = PeerBlocks(fingerprint=FINGERPRINT, silent_s=5.0)
            proxy = None
            if carrier == "tcp" and cut in ("bytes", "bit"):
                num_bytes = rng.randrange(num_blocks * BLOCK_BYTES + 2000)
                proxy = Proxy(engine.server.address, num_bytes, corrupts=cut == "bit")
            address = engine.server.address if proxy is None else proxy.address
            slots = Slots(range(num_blocks)).fetch(store, address)
            if cut.endswith("end"):
                slots.wait(rng.randrange(num_blocks))
                if cut == "client end":
                    store.close()
                else:
                    for connection in engine.server._connections.copy():
                        connection.close()
            outcomes.append(slots.check())
            store.close()
            if proxy is not None:
                proxy.close()
            engine.check_nothing_lost()
            assert slots.check() == outcomes[-1], "nothing is written later"
        assert min(outcomes) < num_blocks
        for engine in engines.values():
            store = PeerBlocks(fingerprint=FINGERPRINT)
            assert Slots(range(num_blocks)).fetch(store, engine.server.address).check() == num_blocks
            store.close()
    finally:
        for engine in engines.values():
            engine.close()


@pytest.mark.parametrize(
    ("targets", "sources", "num_copies"),
    [
        ([0, 1, 2, 3], [4, 5, 6, 7], 1),
        ([0, 1, 3, 4], [4, 5, 6, 7], 2),
        ([9, 1, 2, 3], [0, 1, 2, 5], 3),
        ([3, 2, 1], [3, 2, 1], 3),
        ([8, 9], [8, 9], 1),
        ([], [], 0),
    ],
)
def test_blocks_that_lie_one_behind_the_other_are_one_copy(
    targets: list[int], sources: list[int], num_copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours = torch.randint(1, 256, (10, 100), dtype=torch.uint8), torch.zeros(10, 100, dtype=torch.uint8)
    expected = ours.clone()
    expected[targets] = theirs[sources]
    slots = [bytearray(100) for _ in sources]
    copied: list[int] = []
    copy = torch.Tensor.copy_

    def counted(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        copied.append(len(target))
        return copy(target, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    carriers.copy_rows([ours[row] for row in targets], [theirs[row] for row in sources])
    assert torch.equal(ours, expected) and len(copied) == num_copies
    carriers.copy_rows([memoryview(slot) for slot in slots], [theirs[row] for row in sources])
    assert slots == [bytearray(theirs[row].numpy().tobytes()) for row in sources], "in memory of the host, one by one"
