"""Files read with checksums: in each way the same, and those of zlib."""

from __future__ import annotations

import errno
import logging
import os
import random
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest

from headway.errors import NativeBuildError
from headway.native.build import SOURCE_DIR, BuildResult, build
from headway.transfer import checked_read
from headway.transfer.checked_read import (
    PIECE_BYTES,
    CheckedReader,
    FileRead,
    NativeReader,
    PythonReader,
    fastest_reader,
)

HEADER = 64


@pytest.fixture(params=["native", "avx2", "generic", "python"])
def reader(request: pytest.FixtureRequest) -> CheckedReader:
    """Each in turn: with this CPU's instructions, those of x86 in general, tables, and without a library."""
    if request.param == "python":
        return PythonReader()
    if request.param == "avx2" and not _has_carryless():
        pytest.skip("another CPU")
    try:
        return NativeReader(build(request.param, SOURCE_DIR / "files").path)
    except NativeBuildError as error:
        pytest.skip(str(error))


def _has_carryless() -> bool:
    try:
        return {"pclmulqdq", "avx2"} <= set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False


def expected(data: bytes | memoryview) -> bytes:
    pieces = (data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES))
    return b"".join(zlib.crc32(piece).to_bytes(4, "little") for piece in pieces)


def test_checksums_are_those_of_zlib(reader: CheckedReader) -> None:
    rng = random.Random(0)
    data = memoryview(rng.randbytes(5 * PIECE_BYTES + 100))
    for size in [*range(200), *(PIECE_BYTES * n + more for n in (1, 2, 4) for more in (-17, -1, 0, 1, 15, 16, 63, 64))]:
        start = rng.randrange(70)
        part = data[start : start + size]
        assert reader.crcs(part) == expected(part), (start, size)
    for _ in range(100):
        start, end = sorted(rng.randrange(len(data)) for _ in range(2))
        assert reader.crcs(data[start:end]) == expected(data[start:end]), (start, end)
    for same in (b"\0", b"\xff"):
        assert reader.crcs(memoryview(same * 70_001)) == expected(same * 70_001)


def read(reader: CheckedReader, path: Path, header_bytes: int, out: memoryview) -> FileRead | None:
    """One file."""
    reads = reader.begin([str(path)], header_bytes, [out])
    reads.help()
    assert list(reads.ended(1)) == [0]
    return reads.result(0)


@pytest.mark.parametrize(
    "size",
    [0, 1, 63, PIECE_BYTES - 1, PIECE_BYTES, 4 * PIECE_BYTES, 4 * PIECE_BYTES + 1, 700_001, 2**20, 2**21 + 1, 2**22],
)
@pytest.mark.parametrize("past_cache", [False, True])
@pytest.mark.parametrize("place", [3, 64])
def test_a_file_is_read_whole(reader: CheckedReader, tmp_path: Path, size: int, past_cache: bool, place: int) -> None:
    content, path = random.Random(size).randbytes(HEADER + size), tmp_path / "ä file"
    path.write_bytes(content)
    os.utime(path, (5.0, 7.0))
    memory = np.zeros(size + 200, dtype=np.uint8)
    place += -memory.ctypes.data % 64
    reads = reader.begin([str(path)], HEADER, [memory.data[place : place + size]], past_cache=past_cache)
    reads.help()
    assert list(reads.ended(1)) == [0]
    assert reads.result(0) == (content[:HEADER], expected(content[HEADER:]), 7.0)
    assert memory.tobytes() == bytes(place) + content[HEADER:] + bytes(200 - place), "nothing is written beside it"
    for other in (size - 1, size + 1):
        if other >= 0:
            assert read(reader, path, HEADER, memoryview(bytearray(other))) is None


def test_what_is_no_file_or_not_ones_own_is_not_read(reader: CheckedReader, tmp_path: Path) -> None:
    path, link, pipe, folder = (tmp_path / name for name in "abcd")
    path.write_bytes(bytes(HEADER + 10))
    link.symlink_to(path)
    os.mkfifo(pipe)
    folder.mkdir()
    others = [(tmp_path / "nowhere", 10, errno.ENOENT), (link, 10, errno.ELOOP), (pipe, 10, errno.EPERM)]
    if (size := folder.stat().st_size) >= HEADER:  # else it is no folder of the right length
        others.append((folder, size - HEADER, errno.EPERM))
    num_open = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for other, size, code in others:
        with pytest.raises(OSError) as raised:
            read(reader, other, HEADER, memoryview(bytearray(size)))
        assert raised.value.errno == code
    assert not num_open or len(os.listdir("/proc/self/fd")) == num_open
    for mode in (0o620, 0o602):
        path.chmod(mode)
        with pytest.raises(PermissionError):
            read(reader, path, HEADER, memoryview(bytearray(10)))
    path.chmod(0o600)
    assert read(reader, path, HEADER, memoryview(bytearray(10))) is not None
    if os.geteuid() == 0:  # else files cannot be given away
        os.chown(path, 4242, -1)
        with pytest.raises(PermissionError):
            read(reader, path, HEADER, memoryview(bytearray(10)))


def test_a_file_that_has_less_than_its_length(reader: CheckedReader) -> None:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # files there say a page, and have a line
    if not path.exists() or path.stat().st_size <= HEADER or path.stat().st_uid != os.geteuid():
        pytest.skip("no such file")
    assert read(reader, path, 8, memoryview(bytearray(path.stat().st_size - 8))) is None


def test_files_that_several_threads_read(reader: CheckedReader, tmp_path: Path) -> None:
    """Each ends once, those that are missing or too short, too, and nothing of one is in another."""
    size, num_files, rng = 2**21 + 5000, 24, random.Random(3)
    contents, paths = [], []
    for number in range(num_files):
        contents.append(rng.randbytes(HEADER + size))
        paths.append(tmp_path / str(number))
        if number % 7 != 3:
            paths[-1].write_bytes(contents[-1][: -1 if number % 7 == 5 else None])
    memory = [bytearray(size) for _ in paths]
    reads = reader.begin([str(path) for path in paths], HEADER, [memoryview(one) for one in memory])
    helpers = [threading.Thread(target=reads.help) for _ in range(5)]
    for helper in helpers:
        helper.start()
    numbers: list[int] = []
    while len(numbers) < num_files:
        numbers += reads.ended(min(3, num_files - len(numbers)))
    for helper in helpers:
        helper.join()
    assert sorted(numbers) == list(range(num_files))
    for number in numbers:
        if number % 7 == 3:
            with pytest.raises(FileNotFoundError):
                reads.result(number)
        elif number % 7 == 5:
            assert reads.result(number) is None
        else:
            found = reads.result(number)
            assert found is not None and found[:2] == (contents[number][:HEADER], expected(contents[number][HEADER:]))
            assert memory[number] == contents[number][HEADER:]


def test_what_is_cancelled_ends_without_being_read(reader: CheckedReader, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    memory = [bytearray(36) for _ in range(9)]
    reads = reader.begin([str(path)] * 9, HEADER, [memoryview(one) for one in memory])
    reads.cancel()
    reads.help()
    assert sorted(reads.ended(9)) == list(range(9))
    for number in range(9):
        with pytest.raises(OSError) as raised:
            reads.result(number)
        assert raised.value.errno == errno.ECANCELED
    assert not any(map(any, memory))


@pytest.mark.parametrize("trouble", ["no compiler", "no library", "wrong checksums"])
def test_without_a_library_python_reads_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, trouble: str
) -> None:
    def broken_build(**_: object) -> BuildResult:
        if trouble == "no compiler":
            raise NativeBuildError("none was found\nmore words")
        (tmp_path / "broken.so").write_text("not a library")
        return BuildResult(tmp_path / "broken.so", (), (), compiled=True)

    if trouble == "wrong checksums":
        monkeypatch.setattr(NativeReader, "__init__", lambda *_: None)
        monkeypatch.setattr(NativeReader, "crcs", lambda *_: b"1234")
    monkeypatch.setattr(checked_read, "build", broken_build)
    fastest_reader.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert isinstance(fastest_reader(), PythonReader) and isinstance(fastest_reader(), PythonReader)
    finally:
        fastest_reader.cache_clear()
    (record,) = caplog.records
    assert "Python checks KV blocks" in record.getMessage() and "\n" not in record.getMessage()
