"""Reads files that have a header and contents with a checksum per piece, by several threads. Files that another user
may have written are not read (`cache_dir.opened_private`).

Compiled code reads and computes checksums, about as fast as memory is copied. Where it cannot be compiled, Python does
the same several times slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import os
import queue
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headway.cache_dir import opened_private
from headway.native.build import SOURCE_DIR, build, load_library

logger = logging.getLogger(__name__)

PIECE_BYTES = 2**16
"""The size of a piece, which has its own checksum."""
_OTHER_LENGTH = -1  # as in the C file


class FileRead(NamedTuple):
    """The header and checksums of a file that was read."""

    header: bytes
    crcs: bytes
    """The CRC-32 of each piece as 4 bytes, little-endian."""
    used_s: float
    """The file's time of modification."""


class FileReads(ABC):
    """A set of files that helper threads read, and one thread collects."""

    @abstractmethod
    def help(self) -> None:
        """Read files until none is left to begin. Any number of threads may call this at once."""

    @abstractmethod
    def ended(self, at_least: int) -> Iterable[int]:
        """Return the numbers of the files whose reading has ended since the last call, successfully or not. Waits for
        `at_least` of them."""

    @abstractmethod
    def result(self, number: int) -> FileRead | None:
        """Return the result for a file whose reading has ended, or `None` if its length is not the expected one. Raises
        `OSError`, with `EPERM` or `ELOOP` for a file that another user may have written."""

    @abstractmethod
    def cancel(self) -> None:
        """Make files whose reading has not begun fail."""


class CheckedReader(ABC):
    """A way to read files. Thread-safe."""

    @abstractmethod
    def begin(
        self, paths: Sequence[str], header_bytes: int, out: Sequence[memoryview], *, past_cache: bool = False
    ) -> FileReads:
        """Begin to read files. Each has a header and then exactly the bytes that fill its part of `out`; all parts have
        the same size. `past_cache`: this CPU will not read the contents."""

    @abstractmethod
    def crcs(self, data: memoryview) -> bytes:
        """The checksums of all pieces, as in `FileRead`."""


class PythonReader(CheckedReader):
    """Reads with Python's standard library."""

    def begin(
        self, paths: Sequence[str], header_bytes: int, out: Sequence[memoryview], *, past_cache: bool = False
    ) -> FileReads:
        return _PythonReads(self, paths, header_bytes, out)

    def read(self, path: str, header_bytes: int, out: memoryview) -> FileRead | None:
        """Read a whole file. Returns `None` if its length is not the expected one."""
        header = bytearray(header_bytes)
        with opened_private(path) as file:
            status = os.fstat(file)
            if status.st_size != header_bytes + out.nbytes or not _fill(file, [memoryview(header), out]):
                return None
        return FileRead(bytes(header), self.crcs(out), status.st_mtime)

    def crcs(self, data: memoryview) -> bytes:
        starts = range(0, data.nbytes, PIECE_BYTES)
        return b"".join(zlib.crc32(data[start : start + PIECE_BYTES]).to_bytes(4, "little") for start in starts)


class _PythonReads(FileReads):
    def __init__(
        self, reader: PythonReader, paths: Sequence[str], header_bytes: int, out: Sequence[memoryview]
    ) -> None:
        self._reader, self._paths, self._header_bytes, self._out = reader, paths, header_bytes, out
        self._numbers = iter(range(len(paths)))
        self._found: dict[int, FileRead | Exception | None] = {}
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._is_cancelled = False

    def help(self) -> None:
        for number in self._numbers:
            self._found[number] = self._read(number)
            self._ended.put(number)

    def _read(self, number: int) -> FileRead | Exception | None:
        if self._is_cancelled:
            return OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
        try:
            return self._reader.read(self._paths[number], self._header_bytes, self._out[number])
        except Exception as error:
            return error

    def ended(self, at_least: int) -> Iterable[int]:
        for _ in range(at_least):
            yield self._ended.get()

    def result(self, number: int) -> FileRead | None:
        found = self._found.pop(number)
        if isinstance(found, Exception):
            raise found
        return found

    def cancel(self) -> None:
        self._is_cancelled = True


class NativeReader(CheckedReader):
    """Reads with a compiled library, part by part and without Python's lock. The constructor raises `OSError` or
    `AttributeError` if the library cannot be used."""

    def __init__(self, path: Path) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self.library = library = load_library(path)
        library.hw_crc32_pieces.restype, library.hw_crc32_pieces.argtypes = None, (pointer, size, pointer)
        library.hw_reads_begin.restype = pointer
        library.hw_reads_begin.argtypes = (*[size] * 3, *[pointer] * 7, ctypes.c_int)
        library.hw_reads_wait.restype, library.hw_reads_wait.argtypes = size, (pointer, size)
        for name in ("hw_reads_help", "hw_reads_cancel", "hw_reads_free"):
            function = getattr(library, name)
            function.restype, function.argtypes = None, (pointer,)

    def begin(
        self, paths: Sequence[str], header_bytes: int, out: Sequence[memoryview], *, past_cache: bool = False
    ) -> FileReads:
        return _NativeReads(self.library, paths, header_bytes, out, past_cache)

    def crcs(self, data: memoryview) -> bytes:
        crcs = np.empty(_num_pieces(data), dtype="<u4")
        self.library.hw_crc32_pieces(_address(data), data.nbytes, crcs.ctypes.data)
        return crcs.tobytes()


class _NativeReads(FileReads):
    """Reads of the compiled library. The object must live during its calls, because it owns the memory that they write
    to."""

    def __init__(
        self,
        library: ctypes.CDLL,
        paths: Sequence[str],
        header_bytes: int,
        out: Sequence[memoryview],
        past_cache: bool,
    ) -> None:
        count = len(paths)
        self._library, self._paths, self._out = library, paths, out
        self._headers = np.zeros((count, header_bytes), dtype=np.uint8)
        self._crcs = np.zeros((count, _num_pieces(out[0])), dtype="<u4")
        self._used_s = np.zeros(count, dtype=np.float64)
        self._failures = np.zeros(count, dtype=np.int32)
        self._in_order = np.zeros(count, dtype=np.int64)  # as they ended
        self._num_taken = 0
        self._pointers = (
            (ctypes.c_char_p * count)(*map(os.fsencode, paths)),
            (ctypes.c_void_p * count)(
                *(ctypes.addressof(ctypes.c_char.from_buffer(view)) if view.nbytes else 0 for view in out)
            ),
        )
        arrays = (self._headers, self._crcs, self._used_s, self._failures, self._in_order)
        self._reads = library.hw_reads_begin(
            count,
            header_bytes,
            out[0].nbytes,
            *(ctypes.addressof(pointers) for pointers in self._pointers),
            *(array.ctypes.data for array in arrays),
            past_cache,
        )
        if not self._reads:
            raise MemoryError
        weakref.finalize(self, library.hw_reads_free, self._reads).atexit = False

    def help(self) -> None:
        self._library.hw_reads_help(self._reads)

    def ended(self, at_least: int) -> Iterable[int]:
        start = self._num_taken
        self._num_taken = self._library.hw_reads_wait(self._reads, start + at_least)
        return self._in_order[start : self._num_taken].tolist()

    def result(self, number: int) -> FileRead | None:
        failure = int(self._failures[number])
        if failure == _OTHER_LENGTH:
            return None
        if failure:
            raise OSError(failure, os.strerror(failure), self._paths[number])
        used_s = float(self._used_s[number])
        return FileRead(self._headers[number].tobytes(), self._crcs[number].tobytes(), used_s)

    def cancel(self) -> None:
        self._library.hw_reads_cancel(self._reads)


@functools.cache
def fastest_reader() -> CheckedReader:
    """The fastest reader available. The first call may compile for about a second; if that fails, a warning is logged
    and Python reads."""
    try:
        reader = NativeReader(build(folder=SOURCE_DIR / "files", what="the disk cache's reader").path)
        sample = memoryview(bytes(range(256)) * 7)[1:1500]
        if reader.crcs(sample) == PythonReader().crcs(sample):  # else every file would seem damaged
            return reader
        reason = "its checksums are wrong"
    except Exception as error:
        reason = str(error).split("\n")[0]
    logger.warning("Python checks KV blocks that it reads, several times as slow as compiled code: %s", reason)
    return PythonReader()


@contextlib.contextmanager
def opened(path: Path | str, flags: int) -> Iterator[int]:
    """Open a file and yield its descriptor."""
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def behind(parts: list[memoryview], count: int) -> list[memoryview]:
    """The rest of the parts after the first `count` bytes."""
    while parts and count >= parts[0].nbytes:
        count -= parts[0].nbytes
        parts = parts[1:]
    return [parts[0][count:], *parts[1:]] if parts else []


def _fill(file: int, parts: Sequence[memoryview]) -> bool:
    """Fill the parts from the file. Returns False if it is too short."""
    left = behind(list(parts), 0)
    while left:
        count = os.readv(file, left)
        if not count:
            return False
        left = behind(left, count)
    return True


def _num_pieces(data: memoryview) -> int:
    return -(-data.nbytes // PIECE_BYTES)


def _address(data: memoryview) -> int:
    return np.frombuffer(data, dtype=np.uint8).ctypes.data if data.nbytes else 0
