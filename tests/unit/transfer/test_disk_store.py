"""Blocks in a folder: what comes out is what went in, or nothing, whatever happens to files, disk and processes."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.cache_dir import private_folder
from headway.core.kv.moves import BlockMoves
from headway.errors import ConfigError
from headway.transfer import disk_store
from headway.transfer.block_store import BlockTransfers
from headway.transfer.checked_read import CheckedReader, FileReads, NativeReader, PythonReader, fastest_reader
from headway.transfer.damage_log import DamageLog
from headway.transfer.disk_store import DiskStore
from tests.unit.engine.test_waiting_for_blocks import Store

BYTES = 200_000  # several pieces of a checksum, the last one short
PRINT = "a" * 32


def digest_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content_of(number: int, size: int = BYTES) -> bytes:
    return random.Random(number).randbytes(size)


class Stored:
    """A store whose calls wait for their end."""

    def __init__(self, folder: Path, *, fingerprint: str = PRINT, max_bytes: int = 10**9, size: int = BYTES) -> None:
        self.store = DiskStore(folder, fingerprint=fingerprint, block_bytes=size, max_bytes=max_bytes)
        self._size = size
        self._ends: queue.SimpleQueue[tuple[bytes, bool]] = queue.SimpleQueue()

    def _done(self, digest: bytes, ok: bool) -> None:
        self._ends.put((digest, ok))

    def put(self, number: int, content: bytes | None = None) -> bool:
        self.store.store(digest_of(number), memoryview(content or content_of(number, self._size)), self._done)
        return self._end(number)

    def get(self, number: int, *, is_use: bool = True) -> bytes | None:
        slot = bytearray(self._size)
        self.store.fetch([digest_of(number)], [memoryview(slot)], "", self._done, is_use=is_use)
        return bytes(slot) if self._end(number) else None

    def _end(self, number: int) -> bool:
        digest, ok = self._ends.get(timeout=20)
        assert digest == digest_of(number)
        return ok


Open = Callable[..., Stored]


def in_the_way_of(reader: CheckedReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores that are opened from now on read with this."""
    for name in ("PythonReader", "fastest_reader"):
        monkeypatch.setattr(disk_store, name, lambda: reader)


@pytest.fixture(params=["native", "python"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CheckedReader:
    """Each way to read in turn."""
    found = fastest_reader() if request.param == "native" else PythonReader()
    if request.param == "native" and not isinstance(found, NativeReader):
        pytest.skip("nothing can be compiled here")
    in_the_way_of(found, monkeypatch)
    return found


@pytest.fixture
def opened(tmp_path: Path, reader: CheckedReader) -> Iterator[Open]:
    stores: list[Stored] = []

    def open_store(**options: Any) -> Stored:
        stores.append(Stored(tmp_path, **options))
        return stores[-1]

    yield open_store
    for one in stores:
        one.store.close()
        assert not any(thread.is_alive() for thread in one.store._threads)


def files_in(folder: Path) -> list[Path]:
    return sorted(private_folder(folder).glob("*/*"))


def test_what_was_stored_is_found_by_the_next_process(opened: Open, tmp_path: Path) -> None:
    first = opened()
    assert first.get(1) is None
    assert all(first.put(number) for number in range(5))
    second = opened()
    assert set(second.store.digests()) == {digest_of(number) for number in range(5)}
    for number in range(5):
        assert second.get(number) == first.get(number) == content_of(number)
    assert not list(tmp_path.glob("*/*/*.tmp"))


def test_a_wrong_byte_is_found_wherever_it_is(opened: Open, tmp_path: Path) -> None:
    one, rng = opened(), random.Random(3)
    one.put(7)
    (path,) = files_in(tmp_path)
    content, header = path.read_bytes(), 64
    ends = [header + place for piece in range(0, BYTES, 65536) for place in (piece - 1, piece, piece + 1)]
    places = [*range(header), *ends, len(content) // 2, len(content) - 1, *rng.sample(range(header, len(content)), 40)]
    for place in places:
        wrong = bytearray(content)
        wrong[place] ^= 1 << rng.randrange(8)
        path.write_bytes(wrong)
        assert one.get(7) is None and not path.exists(), f"byte {place}"
    path.write_bytes(content)
    assert one.get(7) == content_of(7)


def test_many_readers_at_once(opened: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk_store, "usable_cpus", lambda: 64)
    one, num_blocks = opened(), 40
    assert len(one.store._threads) == disk_store.MOST_READERS + 2, "one collects, and one writes"
    assert all(one.put(number) for number in range(num_blocks))
    damaged = files_in(tmp_path)[::8]
    for path in damaged:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    ends: queue.SimpleQueue[tuple[bytes, bool]] = queue.SimpleQueue()
    slots = [bytearray(BYTES) for _ in range(3 * num_blocks)]
    digests = [digest_of(number % num_blocks) for number in range(len(slots))]
    one.store.fetch(digests, [memoryview(slot) for slot in slots], "", lambda *end: ends.put(end))
    wrong = {digest for digest, ok in (ends.get(timeout=20) for _ in slots) if not ok}
    assert ends.empty()
    assert wrong == {bytes.fromhex(path.stem) for path in damaged}
    for number, (digest, slot) in enumerate(zip(digests, slots, strict=True)):
        assert digest in wrong or slot == content_of(number % num_blocks)


DAMAGES: dict[str, Callable[[bytearray, random.Random], bytes | bytearray]] = {
    "a page of zeros": lambda content, rng: content[:4096] + bytes(4096) + content[8192:],
    "pieces exchanged": lambda content, rng: (
        content[:64] + content[64 + 65536 : 64 + 131072] + content[64:65600] + content[131136:]
    ),
    "the end": lambda content, rng: content[: rng.randrange(len(content))],
    "everything": lambda content, rng: b"",
    "only the header": lambda content, rng: content[:64],
    "a byte too many": lambda content, rng: content + b"x",
    "all zeros": lambda content, rng: bytes(len(content)),
    "another version": lambda content, rng: content[:8] + b"\x02" + content[9:],
    "other contents": lambda content, rng: content[:64] + rng.randbytes(len(content) - 64),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_never_used_and_is_deleted(
    opened: Callable[..., Stored], tmp_path: Path, damage: str
) -> None:
    one = opened()
    assert one.put(7)
    (path,) = files_in(tmp_path)
    path.write_bytes(DAMAGES[damage](bytearray(path.read_bytes()), random.Random(damage)))
    assert one.get(7) is None and not path.exists()
    assert one.store.take_changes()[1] == [digest_of(7)]
    assert one.put(7) and one.get(7) == content_of(7)


def test_a_block_under_another_name_is_not_taken_for_it(opened: Open, tmp_path: Path) -> None:
    one = opened()
    one.put(1)
    (path,) = files_in(tmp_path)
    path.with_name(digest_of(2).hex() + ".kv").write_bytes(path.read_bytes())
    other_model = private_folder(private_folder(tmp_path), "b" * 32)
    (other_model / path.name).write_bytes(path.read_bytes())
    assert one.get(2) is None and one.get(1) == content_of(1)
    other = opened(fingerprint="b" * 32)
    assert list(other.store.digests()) == [digest_of(1)], "the name is there"
    assert other.get(1) is None, "but it was another model's"
    assert opened(size=BYTES + 1).get(1) is None


def test_what_is_read_ahead_is_not_used(opened: Open, tmp_path: Path) -> None:
    one = opened()
    for number in range(2):
        one.put(number)
    paths = [private_folder(tmp_path) / PRINT / (digest_of(number).hex() + ".kv") for number in range(2)]
    for path, used_s in zip(paths, (1, 2), strict=True):
        os.utime(path, (used_s, used_s))
    again = opened()
    assert again.get(0, is_use=False) == content_of(0)
    assert paths[0].stat().st_mtime == 1 and list(again.store.digests()) == [digest_of(0), digest_of(1)]
    assert again.get(0) == content_of(0)
    assert paths[0].stat().st_mtime > 2 and list(again.store.digests()) == [digest_of(1), digest_of(0)]


def test_the_order_of_use_is_found_again(opened: Open) -> None:
    one, other = opened(), opened(fingerprint="b" * 32)
    for number in range(5):
        one.put(number)
    other.put(9)
    one.store.note_order([digest_of(number) for number in (3, 7, 1, 0)])  # 7 is not here
    for store in (one.store, opened().store):
        assert list(store.digests()) == [digest_of(number) for number in (2, 4, 3, 1, 0)]


def test_the_files_used_longest_ago_go_first_whosever_they_are(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_store, "USE_NOTED_S", -1.0)
    other = opened(fingerprint="b" * 32)
    other.put(100)
    one = opened(max_bytes=4 * (BYTES + 64) + 10)
    assert one.store.max_blocks == 4
    for number in range(3):
        one.put(number)
    assert one.get(0) is not None  # used last now
    one.put(3)
    assert other.get(100) is None
    one.put(4)
    assert sorted(one.store.digests()) == [digest_of(number) for number in (0, 2, 3, 4)]
    assert one.store.take_changes() == ([], [digest_of(1)])
    assert len(files_in(tmp_path)) == 4
    for number, used_s in ((0, 3), (2, 1), (3, 2), (4, 4)):  # as if more time had passed
        os.utime(private_folder(tmp_path) / PRINT / (digest_of(number).hex() + ".kv"), (used_s, used_s))
    again = opened(max_bytes=4 * (BYTES + 64))
    assert list(again.store.digests()) == [digest_of(number) for number in (2, 3, 0, 4)]
    again.put(5)
    assert digest_of(2) not in again.store.digests() and digest_of(0) in again.store.digests()


def test_what_others_add_counts_before_files_are_deleted(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_store, "RESCAN_S", 0.0)
    one, other = opened(max_bytes=6 * (BYTES + 64)), opened(max_bytes=6 * (BYTES + 64))
    for number in range(30):
        (one if number % 2 else other).put(number)
    assert len(files_in(tmp_path)) <= 7
    added, _ = one.store.take_changes()
    assert added and all(int.from_bytes(digest) % 2 == 0 for digest in added)


def test_a_block_larger_than_the_limit_is_not_stored(opened: Open, tmp_path: Path) -> None:
    assert not opened(max_bytes=BYTES).put(1)
    assert not files_in(tmp_path)


def test_what_dead_writers_leave_is_deleted_and_what_live_ones_write_is_not(opened: Open, tmp_path: Path) -> None:
    folder = private_folder(private_folder(tmp_path), PRINT)
    dead, living = folder / f"{digest_of(1).hex()}.1-0.tmp", folder / f"{digest_of(2).hex()}.2-0.tmp"
    dead.write_bytes(b"half")
    stranger = folder / "notes.txt"
    stranger.write_text("not ours")
    with living.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not opened().store.digests()
        assert living.exists() and not dead.exists() and stranger.exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_disk_that_fails_costs_hits_only(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    one, write, is_broken = opened(), os.writev, True
    one.put(1)

    def writev(file: int, parts: list[memoryview]) -> int:
        if is_broken:
            write(file, [parts[0][:10]])  # some of it is there before the disk is full
            raise OSError(code, os.strerror(code))
        return write(file, [part[: max(1, part.nbytes // 3)] for part in parts[:1]])  # few bytes at a time

    monkeypatch.setattr(disk_store.os, "writev", writev)
    with caplog.at_level(logging.WARNING):
        assert not any(one.put(number) for number in range(2, 20))
    assert len(caplog.records) == 1 and os.strerror(code) in caplog.text
    assert not list(tmp_path.glob("*/*/*.tmp")), "nothing is left lying about"
    assert one.get(1) == content_of(1), "what is there is found"
    is_broken = False
    assert not one.put(2), "not tried again at once"
    one.store._paused_until_s = 0.0
    assert one.put(2) and one.get(2) == content_of(2)


def spoil_next_read(
    reader: CheckedReader, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Any, memoryview], None]
) -> None:
    """`spoil` is given the next reads, and the slot of the first of them."""
    begin = type(reader).begin

    def begin_and_spoil(*args: Any, **options: Any) -> FileReads:
        monkeypatch.setattr(type(reader), "begin", begin)
        reads = begin(*args, **options)
        spoil(reads, args[3][0])
        return reads

    monkeypatch.setattr(type(reader), "begin", begin_and_spoil)


def test_a_read_that_fails_is_a_miss(opened: Open, reader: CheckedReader, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "input/output error")

    one = opened()
    one.put(1)
    spoil_next_read(reader, monkeypatch, lambda reads, _: setattr(reads, "result", fail))
    assert one.get(1) is None
    assert one.get(1) == content_of(1)


def test_a_file_that_is_replaced_while_it_is_read_is_not_taken_for_damaged(
    opened: Open, reader: CheckedReader, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Engines that share a folder may compute a block both, with other roundings: parts can be of either file."""
    one, other = opened(), b"x" * BYTES
    one.put(1, other)
    (path,) = files_in(tmp_path)
    of_other = path.read_bytes()
    path.unlink()
    one.put(1)

    def replace(reads: Any, slot: memoryview) -> None:
        ended_before, result_before = reads.ended, reads.result

        def ended(at_least: int) -> Any:
            numbers = list(ended_before(at_least))
            slot[: BYTES // 2] = other[: BYTES // 2]  # as if the first half had come from the other file
            path.write_bytes(of_other)
            return numbers

        reads.ended = ended
        reads.result = lambda number: result_before(number)._replace(crcs=reader.crcs(slot))

    spoil_next_read(reader, monkeypatch, replace)
    assert one.get(1) == other and path.exists()


def test_a_folder_that_is_deleted_comes_back(opened: Open, tmp_path: Path) -> None:
    one = opened()
    one.put(1)
    for path in files_in(tmp_path):
        path.unlink()
    (private_folder(tmp_path) / PRINT).rmdir()
    assert one.get(1) is None
    assert one.put(2) and one.get(2) == content_of(2)
    assert one.put(1) and one.get(1) == content_of(1)


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / f"headway-{os.geteuid()}").symlink_to("/tmp")
    for path, words in (
        (tmp_path / "file", "is a file; give a folder"),
        (tmp_path / "file" / "below", "No files can be put into disk_cache"),
        (Path("/proc/headway"), "No files can be put into disk_cache"),
        (tmp_path, r"No files can be put into disk_cache '.*': 'headway-.*remove it, or choose"),
    ):
        with pytest.raises(ConfigError, match=words):
            DiskStore(path, fingerprint=PRINT, block_bytes=1, max_bytes=100)


def test_several_engines_share_a_folder(tmp_path: Path) -> None:
    """They write, read and delete the same few files at once; what is read is right."""
    size, wrong = 70_000, []
    stores = [Stored(tmp_path, max_bytes=5 * (size + 64), size=size) for _ in range(3)]

    def work(one: Stored, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(150):
            number = rng.randrange(8)
            if rng.random() < 0.5:
                one.put(number)
            elif one.get(number) not in (None, content_of(number, size)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(one, seed)) for seed, one in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in stores:
        one.store.close()
    assert not wrong


class Slots:
    """Host memory, as plain bytes."""

    def __init__(self, num_slots: int, size: int) -> None:
        self.memory = [bytearray(size) for _ in range(num_slots)]
        self.settled: list[int] = []

    def bytes_of(self, slot: int) -> memoryview:
        return memoryview(self.memory[slot])

    def settle(self, slots: Any) -> None:
        self.settled += slots


def test_transfers_go_where_they_belong_and_tell_their_ends(tmp_path: Path) -> None:
    slots, peers, woken = Slots(5, 100), Store(), threading.Event()
    disk = DiskStore(tmp_path, fingerprint=PRINT, block_bytes=100, max_bytes=10**6)
    transfers = BlockTransfers(slots, disk=disk, peers=peers)
    transfers.wake(woken.set)
    slots.memory[0][:] = b"d" * 100
    transfers.begin(BlockMoves(stored=((digest_of(1), 0),)))
    assert transfers.wait(10.0) and woken.wait(10.0)
    assert [(end.digest, end.ok, end.is_fetch) for end in transfers.take()] == [(digest_of(1), True, False)]
    fetched = ((digest_of(1), 1, ""), (digest_of(2), 2, "there:1"), (digest_of(3), 3, "there:1"))
    transfers.begin(BlockMoves(fetched=fetched))
    assert slots.settled == [0, 1, 2, 3]
    assert transfers.wait(10.0)
    (end,) = transfers.take()
    assert end.ok and end.is_fetch and end.seconds > 0 and slots.memory[1] == slots.memory[0]
    assert transfers.num_under_way == 2 and not transfers.wait(0.01) and not transfers.settle(0.01)
    assert peers.fetched == [(digest_of(2), True), (digest_of(3), True)] and {*peers.sources} == {"there:1"}
    for (digest, done), ok in zip(peers.fetches, (True, False), strict=True):
        done(digest, ok)
    assert [end.ok for end in transfers.take()] == [True, False] and transfers.settle(1.0)
    transfers.close()
    assert peers.is_closed


def test_the_time_of_fetches_is_divided_among_their_blocks() -> None:
    """However many fetches are under way: their seconds add up to the time that passed."""
    peers = Store()
    transfers, begun_s = BlockTransfers(Slots(8, 10), peers=peers), time.monotonic()
    for first in (0, 4):
        fetched = tuple((digest_of(number), number, f"there:{first}") for number in range(first, first + 4))
        transfers.begin(BlockMoves(fetched=fetched))
    for number in (0, 4, 1, 5, 2, 6, 3, 7):
        time.sleep(0.01)
        dict(peers.fetches)[digest_of(number)](digest_of(number), True)
    passed_s, seconds = time.monotonic() - begun_s, [end.seconds for end in transfers.take()]
    assert sum(seconds) == pytest.approx(passed_s, abs=0.01) and min(seconds) >= 0.009
    time.sleep(0.05)
    transfers.begin(BlockMoves(fetched=((digest_of(8), 0, "there:0"),)))
    dict(peers.fetches)[digest_of(8)](digest_of(8), True)
    assert transfers.take()[0].seconds < 0.04, "the time before it was begun is not its own"


def test_what_nobody_can_fetch_does_not_come() -> None:
    transfers = BlockTransfers(Slots(2, 10))
    transfers.begin(BlockMoves(fetched=((b"a", 0, ""), (b"b", 1, "there:1")), stored=((b"c", 1),)))
    assert [end.ok for end in transfers.take()] == [False] * 3
    assert not transfers.num_under_way


# ---- what other users, or a damaged disk, may have left -------------------------------------------------------------


def test_a_line_is_logged_for_each_kind_of_damage_not_for_each_file(
    opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = opened()
    assert all(one.put(number) for number in range(40))
    for number, path in enumerate(files_in(tmp_path)):
        if number % 2:
            path.write_bytes(path.read_bytes()[:-1])
        else:
            path.chmod(0o620)
    assert not any(one.get(number) for number in range(40))
    one.store.close()
    assert len(caplog.records) == 4, "of each kind one at once, and one at the end"
    texts = [record.getMessage() for record in caplog.records]
    for words, num in (("1 file", 2), ("19 files deleted, whose length", 1), ("19 files not read, which are links", 1)):
        assert sum(f"computed instead: {words}" in text for text in texts) == num
    assert not files_in(tmp_path)


@pytest.mark.parametrize("has_files", [False, True])
def test_a_folder_in_the_place_of_a_block_costs_that_block_only(
    opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture, has_files: bool
) -> None:
    in_the_way = private_folder(private_folder(tmp_path), PRINT) / f"{digest_of(1).hex()}.kv"
    in_the_way.mkdir()
    if has_files:
        (in_the_way / "something").write_text("")
    one = opened()
    assert not one.store.digests() and one.get(1) is None
    assert one.put(1) != has_files
    assert one.put(2) and one.get(2) == content_of(2)
    assert in_the_way.is_dir() == has_files
    assert [record.getMessage() for record in caplog.records if "written" in record.getMessage()] == [
        record.getMessage() for record in caplog.records
    ]
    assert len(caplog.records) == has_files


def test_damage_of_one_kind_is_counted_for_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    log = DamageLog(now=lambda: now_s)
    for number in range(3):
        log.note("broken", str(number))
    log.say()
    log.note("broken", "3")
    log.say()
    log.note("gone", "4")
    log.say()
    now_s = 60.0
    log.say()
    log.say(is_last=True)
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "3 files broken (0, …)",
        "1 file gone (4)",
        "1 file broken (3)",
    ]


def test_a_cleared_store_has_no_blocks_and_takes_new_ones(tmp_path: Path) -> None:
    own, same, other = Stored(tmp_path), Stored(tmp_path), Stored(tmp_path, fingerprint="b" * 32)
    for each in (own, other):
        assert each.put(1)
    assert same.put(2)
    own.store.clear()
    assert own.put(3), "what is stored later stays"
    assert [own.get(number) is None for number in (1, 2, 3)] == [True, True, False]
    assert same.get(2) is None and other.get(1) is not None, "it clears for all engines of this model, and for no other"
    assert set(own.store.take_changes()[1]) >= {digest_of(1), digest_of(2)}, "its index learns it"
    for each in (own, same, other):
        each.store.close()
