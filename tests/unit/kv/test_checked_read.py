"""Files read with checksums: in each way the same, and those of zlib."""

from __future__ import annotations

import logging
import os
import random
import zlib
from pathlib import Path

import pytest

from headway.errors import NativeBuildError
from headway.kv import disk_store
from headway.kv.disk_store import PIECE_BYTES, CheckedReader, NativeReader, PythonReader, fastest_reader
from headway.native.build import SOURCE_DIR, BuildResult, build

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


@pytest.mark.parametrize(
    "size", [0, 1, 63, PIECE_BYTES - 1, PIECE_BYTES, 4 * PIECE_BYTES, 4 * PIECE_BYTES + 1, 700_001]
)
def test_a_file_is_read_whole(reader: CheckedReader, tmp_path: Path, size: int) -> None:
    content, path = random.Random(size).randbytes(HEADER + size), tmp_path / "ä file"
    path.write_bytes(content)
    os.utime(path, (5.0, 7.0))
    memory = bytearray(size + 20)
    found = reader.read(path, HEADER, memoryview(memory)[3 : 3 + size])
    assert found == (content[:HEADER], expected(content[HEADER:]), 7.0)
    assert memory == bytes(3) + content[HEADER:] + bytes(17), "nothing is written beside it"
    for other in (size - 1, size + 1):
        if other >= 0:
            assert reader.read(path, HEADER, memoryview(bytearray(other))) is None


def test_what_cannot_be_read_is_said(reader: CheckedReader, tmp_path: Path) -> None:
    num_open = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    with pytest.raises(FileNotFoundError):
        reader.read(tmp_path / "nowhere", HEADER, memoryview(bytearray(10)))
    folder = tmp_path / "folder"
    folder.mkdir()
    if (size := folder.stat().st_size) >= HEADER:  # else it is no folder of the right length
        with pytest.raises(IsADirectoryError):
            reader.read(folder, HEADER, memoryview(bytearray(size - HEADER)))
    if num_open is not None:
        assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_file_that_has_less_than_its_length(reader: CheckedReader) -> None:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # files there say a page, and have a line
    if not path.exists() or path.stat().st_size <= HEADER:
        pytest.skip("no such file")
    assert reader.read(path, 8, memoryview(bytearray(path.stat().st_size - 8))) is None


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
    monkeypatch.setattr(disk_store, "build", broken_build)
    fastest_reader.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert isinstance(fastest_reader(), PythonReader) and isinstance(fastest_reader(), PythonReader)
    finally:
        fastest_reader.cache_clear()
    (record,) = caplog.records
    assert "Python checks KV blocks" in record.getMessage() and "\n" not in record.getMessage()
