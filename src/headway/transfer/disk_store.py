"""Stores KV blocks in a folder, one file each. The files outlive the process, and several engines may share them.

    DIR/headway-<user>/<fingerprint>/    a folder of this user's alone (`cache_dir.private_folder`), and in it:
    <digest>.kv        header (magic, version, length, checksum), then the bytes of a slot
    <digest>.*.tmp     being written, and locked meanwhile; without a lock, its writer is dead

The fingerprint covers all that keys and values depend on besides the tokens: weights, number formats, layout. An engine
reads only its own folder. The size limit covers all folders together, and the least recently used files are deleted
first, whichever engine wrote them. A file's time of modification is the time of its last use.

Files are not flushed to the disk, because that is not needed: a name appears only after its file was written, and the
checksum detects a file damaged by a crash of the machine. A checksum is no signature, so files that another user may
have written are not read. An invalid file is deleted and counts as missing. If files cannot be written, one warning is
logged and writing is tried again later. If a file cannot be read, its block is computed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import logging
import os
import queue
import re
import stat
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headway.cache_dir import private_folder, why_not_writable
from headway.core.kv.blocks import DIGEST_BYTES
from headway.errors import ConfigError
from headway.native.build import usable_cpus
from headway.transfer.block_store import BlockStore, Done
from headway.transfer.checked_read import (
    CheckedReader,
    FileRead,
    FileReads,
    PythonReader,
    behind,
    fastest_reader,
    opened,
)
from headway.transfer.damage_log import DamageLog

if TYPE_CHECKING:
    from headway.transfer.block_store import Slot

logger = logging.getLogger(__name__)

MOST_READERS = 16
PAUSE_S = 30.0
"""The pause in writing after a write has failed."""
RESCAN_S = 60.0
"""The folders are scanned again before files are deleted, but not more often than this."""
USE_NOTED_S = 60.0
"""A used file's time of modification is updated, unless it is more recent than this."""
CLOSE_S = 2.0
_BYTES_PER_READER = 2**20  # less than this is not worth waking one more
_TOGETHER = 4  # files that are collected at a time, while there are many
_APART_NS = 10_000  # more than a number of seconds with double precision resolves
_VERSION = 1
_HEADER = struct.Struct("<8sIIQ16s24x")
_MAGIC = b"HWKVBLCK"
_SUFFIX, _TEMPORARY = ".kv", ".tmp"
_NAME_LENGTH = 2 * DIGEST_BYTES
_BLOCK_NAME = re.compile(rf"[0-9a-f]{{{_NAME_LENGTH}}}\.kv")
_Job = Callable[[], None]
_DAMAGED = "deleted, whose length or checksum is wrong"
_FOREIGN = "not read, which are links or folders, belong to another user or may be written to by one"


class DiskStore(BlockStore):
    """`fingerprint`: the name of this engine's folder; blocks in other folders are never found. `block_bytes`: the size
    of a slot. `for_device`: a device reads the slots, not this CPU."""

    def __init__(
        self, folder: Path, *, fingerprint: str, block_bytes: int, max_bytes: int, for_device: bool = False
    ) -> None:
        self._configured, self._fingerprint = folder, fingerprint
        self._identity = fingerprint.encode()
        self._block_bytes = block_bytes
        self._max_bytes = max_bytes
        self._for_device = for_device
        self._damage = DamageLog()
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"disk_cache '{folder}' is a file; give a folder.")
        try:
            self._root, self._folder = self._make_folder()
        except OSError as error:
            raise ConfigError(f"No files can be put into disk_cache '{folder}': {error.strerror}.") from None
        self._own = fingerprint + "/"
        self._lock = threading.Lock()
        self._files: OrderedDict[str, int] = OrderedDict()  # "fingerprint/digest" → bytes; used longest ago first
        self._num_bytes = 0
        self._added: list[bytes] = []  # these two for `take_changes`
        self._lost: list[bytes] = []
        self._scanned_s = 0.0
        self._paused_until_s = 0.0
        self._has_warned = False
        self._numbers = itertools.count()
        self._is_closed = False
        self._reader: CheckedReader = PythonReader()
        self._scan()
        self._added.clear()
        self._start()

    def _make_folder(self) -> tuple[Path, Path]:
        """Make this user's folder, and in it the one for this engine's blocks. Raises `OSError` if it is not
        writable."""
        root = private_folder(self._configured)
        folder = private_folder(root, self._fingerprint)
        if error := why_not_writable(folder):
            raise error
        return root, folder

    def _start(self) -> None:
        self._pid = os.getpid()
        self._reads: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._reads.put(self._prepare)
        self._under_way: set[FileReads] = set()
        # Who copies blocks on needs a core, too. One reader more, which collects what the others read.
        self._num_readers = min(MOST_READERS, max(2, usable_cpus() - 2))
        # Daemons: a read that hangs, as in a file system that is gone, must not keep the process.
        self._threads = [
            threading.Thread(target=_work, args=(jobs,), name=name, daemon=True)
            for jobs, name in [(self._reads, "disk reader")] * (self._num_readers + 1) + [(self._writes, "disk writer")]
        ]
        for thread in self._threads:
            thread.start()

    def _prepare(self) -> None:
        """Build the fastest reader. This may take a second, in which other threads read in Python."""
        self._reader = fastest_reader()

    @property
    def max_blocks(self) -> int:
        return max(1, self._max_bytes // (self._block_bytes + _HEADER.size))

    def digests(self) -> Collection[bytes]:
        with self._lock:
            return [_digest(name) for name in self._files if name.startswith(self._own)]

    def take_changes(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        if not self._added and not self._lost:
            return (), ()
        with self._lock:
            changes = self._added, self._lost
            self._added, self._lost = [], []
            return changes

    def fetch(
        self, digests: Sequence[bytes], slots: Sequence[Slot], source: str, done: Done, *, is_use: bool = True
    ) -> None:
        if os.getpid() != self._pid:
            self._start()  # a forked process has no threads
        views = [slot for slot in slots if isinstance(slot, memoryview)]
        assert len(views) == len(digests), "files are read into host memory"
        folder = str(self._folder)
        paths = [f"{folder}/{digest.hex()}{_SUFFIX}" for digest in digests]
        reads = self._reader.begin(paths, _HEADER.size, views, past_cache=self._for_device)
        self._under_way.add(reads)
        # In this order, because the collector waits for helpers, and helpers wait for no other thread.
        self._reads.put(lambda: self._collect(reads, digests, views, done, is_use))
        for _ in range(min(self._num_readers, -(-len(digests) * self._block_bytes // _BYTES_PER_READER))):
            self._reads.put(reads.help)

    def store(self, digest: bytes, slot: Slot, done: Done) -> None:
        assert isinstance(slot, memoryview), "files are written from host memory"
        if os.getpid() != self._pid:
            self._start()
        self._writes.put(lambda: self._store(digest, slot, done))

    def clear(self) -> None:
        if os.getpid() != self._pid:
            self._start()
        self._writes.put(self._clear)

    def note_order(self, digests: Sequence[bytes]) -> None:
        """Note the order by setting times of modification that end now."""
        with self._lock:
            here = [digest for digest in digests if self._name(digest) in self._files]
            for digest in here:
                self._files.move_to_end(self._name(digest))
        used_ns = time.time_ns() - len(here) * _APART_NS
        for digest in here:
            used_ns += _APART_NS
            with contextlib.suppress(OSError):
                os.utime(self._path(digest), ns=(used_ns, used_ns))

    def close(self) -> None:
        self._is_closed = True
        for reads in list(self._under_way):
            reads.cancel()
        for thread in self._threads:
            (self._writes if thread is self._threads[-1] else self._reads).put(None)
        until_s = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        self._damage.say(is_last=True)

    # ---- reading --------------------------------------------------------------------------------------------------

    def _collect(
        self, reads: FileReads, digests: Sequence[bytes], slots: Sequence[memoryview], done: Done, is_use: bool
    ) -> None:
        """Process results as they arrive, several at a time while many are left, to take Python's lock less often."""
        left = len(digests)
        while left:
            for number in reads.ended(max(1, min(_TOGETHER, left // 2))):
                left -= 1
                self._end(digests[number], slots[number], reads, number, done, is_use)
        self._under_way.discard(reads)
        if not self._under_way:
            self._damage.say()

    def _end(self, digest: bytes, slot: memoryview, reads: FileReads, number: int, done: Done, is_use: bool) -> None:
        ok = False
        try:
            found = self._good(digest, slot, reads.result(number))
            ok = found is not None
            if found is not None and is_use:
                self._note_use(digest, found)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ELOOP):
                self._discard(digest, _FOREIGN)
            elif error.errno not in (errno.ENOENT, errno.ECANCELED):
                logger.debug("a KV block cannot be read: %s", error)
        except Exception:
            logger.exception("a KV block cannot be read")
        finally:
            if not ok:
                self._forget(self._name(digest))
            done(digest, ok)

    def _good(self, digest: bytes, slot: memoryview, found: FileRead | None) -> FileRead | None:
        """Return the file's record if it is intact, otherwise `None`."""
        path = self._path(digest)
        if not self._fits(digest, found):  # parts of two files, perhaps: another engine may have put one in its place
            again = self._reader.begin([str(path)], _HEADER.size, [slot])
            again.help()
            (only,) = again.ended(1)
            found = again.result(only)
        if found is None or not self._fits(digest, found):
            self._discard(digest, _DAMAGED)
            return None
        return found

    def _discard(self, digest: bytes, what: str) -> None:
        path = self._path(digest)
        self._damage.note(what, path.name)
        _delete(path)

    def _note_use(self, digest: bytes, found: FileRead) -> None:
        name = self._name(digest)
        if time.time() - found.used_s > USE_NOTED_S:
            with contextlib.suppress(OSError):
                os.utime(self._path(digest))
        with self._lock:
            if name in self._files:
                self._files.move_to_end(name)

    def _fits(self, digest: bytes, found: FileRead | None) -> bool:
        return found is not None and found.header == self._header(digest, self._block_bytes, found.crcs)

    def _header(self, digest: bytes, num_bytes: int, crcs: bytes) -> bytes:
        """The header for these contents. Its checksum is a hash of the CRCs of all pieces and of the block's identity,
        which is many times faster than a hash of all bytes."""
        checksum = hashlib.blake2b(digest + crcs, digest_size=16, key=self._identity[:64])
        return _HEADER.pack(_MAGIC, _VERSION, _HEADER.size, num_bytes, checksum.digest())

    # ---- writing --------------------------------------------------------------------------------------------------

    def _store(self, digest: bytes, slot: memoryview, done: Done) -> None:
        ok = False
        try:
            ok = not self._is_closed and time.monotonic() >= self._paused_until_s and self._write(digest, slot)
        except OSError as error:
            self._pause(error)
        except Exception:
            logger.exception("a KV block cannot be stored")
        finally:
            done(digest, ok)

    def _write(self, digest: bytes, slot: memoryview) -> bool:
        name, size = self._name(digest), _HEADER.size + slot.nbytes
        if size > self._max_bytes:
            return False
        if name in self._files and self._path(digest).exists():
            return True
        self._make_room(size)
        try:
            self._write_file(digest, slot)
        except FileNotFoundError:  # the folder has been deleted
            self._make_folder()
            self._write_file(digest, slot)
        except IsADirectoryError:  # there is a folder in the place of this file, which concerns no other
            self._damage.note(_FOREIGN, self._path(digest).name)
            self._damage.say()
            return False
        with self._lock:
            self._num_bytes += size - self._files.pop(name, 0)
            self._files[name] = size
        if self._has_warned:
            self._has_warned = False
            logger.warning("the disk cache can be written again")
        return True

    def _write_file(self, digest: bytes, slot: memoryview) -> None:
        path = self._path(digest)
        temporary = path.with_name(f"{path.stem}.{os.getpid()}-{next(self._numbers)}{_TEMPORARY}")
        try:
            with opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                header = self._header(digest, slot.nbytes, self._reader.crcs(slot))
                _write_all(file, [memoryview(header), slot])
                os.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _pause(self, error: OSError) -> None:
        """Pause writing after an error. The warning is logged once, until a file can be written again."""
        self._paused_until_s = time.monotonic() + PAUSE_S
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "no file can be written to the disk cache (%s); tried again after %g s",
                error.strerror or error,
                PAUSE_S,
            )

    def _make_room(self, num_bytes: int) -> None:
        """Delete the least recently used files until there is room for one more."""
        if self._num_bytes + num_bytes > self._max_bytes and time.monotonic() - self._scanned_s > RESCAN_S:
            self._scan()  # others may have added files, used or deleted them
        while self._num_bytes + num_bytes > self._max_bytes and self._files:
            with self._lock:
                name = next(iter(self._files))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._root / (name + _SUFFIX))
            self._forget(name)

    def _clear(self) -> None:
        """Delete this engine's files, also those that other engines with the same model have written."""
        self._scan()
        with self._lock:
            names = [name for name in self._files if name.startswith(self._own)]
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(self._root / (name + _SUFFIX))
            self._forget(name)

    # ---- the index ------------------------------------------------------------------------------------------------

    def _name(self, digest: bytes) -> str:
        return self._own + digest.hex()

    def _path(self, digest: bytes) -> Path:
        return self._folder / (digest.hex() + _SUFFIX)

    def _forget(self, name: str) -> None:
        with self._lock:
            size = self._files.pop(name, None)
            if size is not None:
                self._num_bytes -= size
                if name.startswith(self._own):
                    self._lost.append(_digest(name))

    def _scan(self) -> None:
        """Scan names, sizes and times of the files in all folders."""
        found: list[tuple[float, str, int]] = []
        for folder in _entries(self._root):
            if folder.is_dir(follow_symlinks=False):
                found += _files(folder)
        found.sort()
        with self._lock:
            before, self._files = self._files, OrderedDict((name, size) for _, name, size in found)
            self._num_bytes = sum(self._files.values())
            self._scanned_s = time.monotonic()
            self._added += [_digest(name) for name in self._files.keys() - before.keys() if name.startswith(self._own)]
            self._lost += [_digest(name) for name in before.keys() - self._files.keys() if name.startswith(self._own)]


def _digest(name: str) -> bytes:
    return bytes.fromhex(name.rpartition("/")[2])


def _files(folder: os.DirEntry[str]) -> Iterator[tuple[float, str, int]]:
    """Yield (time of last use, name, bytes) of each block. Files left by dead writers are deleted."""
    for entry in _entries(folder.path):
        name = entry.name
        if _BLOCK_NAME.fullmatch(name):
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:  # deleted meanwhile
                continue
            if not stat.S_ISREG(status.st_mode):
                _delete(entry.path)
                continue
            yield status.st_mtime, f"{folder.name}/{name[:_NAME_LENGTH]}", status.st_size
        elif name.endswith(_TEMPORARY):
            _delete_unlocked(entry.path)


def _entries(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    """Yield a folder's entries; none if the folder does not exist any more."""
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError:
        return


def _delete_unlocked(path: str) -> None:
    with contextlib.suppress(OSError), opened(path, os.O_RDONLY) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)


def _delete(path: Path | str) -> None:
    """Delete a file, or an empty folder, that has a block's name. A folder with content stays."""
    with contextlib.suppress(OSError):
        try:
            os.unlink(path)
        except (IsADirectoryError, PermissionError):  # as systems say it of a folder
            os.rmdir(path)


def _write_all(file: int, parts: Sequence[memoryview]) -> None:
    left = list(parts)
    while left:
        left = behind(left, os.writev(file, left))


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
