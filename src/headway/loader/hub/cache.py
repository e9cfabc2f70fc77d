"""The cache folder that all of Hugging Face's tools share, in its own layout, so that each finds what others fetched:

    models--owner--name/refs/main                  the commit that a branch or tag had when it was last asked for
    models--owner--name/snapshots/COMMIT/NAME      a link to the file's content
    models--owner--name/blobs/DIGEST               contents; DIGEST is what the hub says of the file
    models--owner--name/blobs/DIGEST.headway.incomplete    the beginning of a content; a later run continues it

A digest of 64 digits is the content's SHA-256; one of 40 digits is git's SHA-1 of a small file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from headway.errors import ModelNotFoundError

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubFile:
    """A file as the hub describes it."""

    name: str
    size: int
    digest: str


class CachedModel:
    """The part of the cache that belongs to one repository."""

    def __init__(self, root: Path, repo: str) -> None:
        self.root = root
        self._name = "models--" + repo.replace("/", "--")
        self._folder = root / self._name

    def commit(self, revision: str) -> str | None:
        """The commit of a branch or tag as far as the cache knows; `None` if it knows none."""
        if _COMMIT.fullmatch(revision):
            return revision
        with contextlib.suppress(OSError):
            found = (self._folder / "refs" / revision).read_text(encoding="ascii", errors="replace").strip()
            return found if _COMMIT.fullmatch(found) else None
        return None

    def note(self, revision: str, commit: str) -> None:
        """Remember the commit of a branch or tag."""
        if revision != commit:
            path = self._folder / "refs" / revision
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(commit, encoding="ascii")

    def snapshot(self, commit: str) -> Path:
        """The folder with the files of a commit, which need not exist."""
        return self._folder / "snapshots" / commit

    def names(self, commit: str) -> list[str]:
        """The names of the files of a commit that are here."""
        folder = self.snapshot(commit)
        return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]

    def described(self, commit: str, name: str) -> HubFile | None:
        """What the cache itself tells about a file; `None` if it is not a link to a content with a digest."""
        content = (self.snapshot(commit) / name).resolve()
        if content.parent.name != "blobs":
            return None
        return HubFile(name, content.stat().st_size, content.name)

    def has(self, commit: str, file: HubFile) -> bool:
        """Whether the file is here in its full size."""
        return _size(self.snapshot(commit) / file.name) == file.size

    def link(self, commit: str, file: HubFile) -> None:
        """Give a content, if it is here, to a file of a commit. Several files and commits may have the same."""
        path, content = self.snapshot(commit) / file.name, self._blob(file)
        if path.is_file() or _size(content) != file.size:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        try:
            path.symlink_to(os.path.relpath(content, path.parent))
        except OSError:  # a file system without links
            shutil.copyfile(content, path)

    def is_intact(self, commit: str, file: HubFile, advance: Callable[[int], object]) -> bool:
        """Whether the file's content has its digest. `advance` is called with numbers of bytes read."""
        digest = digest_of(file)
        with (self.snapshot(commit) / file.name).open("rb") as content:
            for chunk in chunks_of(content):
                digest.update(chunk)
                advance(len(chunk))
        return digest.hexdigest() == file.digest

    def drop(self, commit: str, file: HubFile) -> None:
        """Remove a file and its content."""
        for path in (self.snapshot(commit) / file.name, self._blob(file)):
            path.unlink(missing_ok=True)

    def partial(self, file: HubFile) -> Path:
        """The file in which a content arrives."""
        return self._folder / "blobs" / f"{file.digest}.headway.incomplete"

    def keep(self, file: HubFile) -> None:
        """Make what has arrived a content."""
        self.partial(file).replace(self._blob(file))

    def missing_bytes(self, commit: str, file: HubFile) -> int:
        """Bytes of the file that have yet to arrive."""
        return 0 if self.has(commit, file) else max(0, file.size - (_size(self.partial(file)) or 0))

    def free_bytes(self) -> int:
        """Free bytes of the file system."""
        return shutil.disk_usage(self._folder).free

    @contextlib.contextmanager
    def held(self, on_wait: Callable[[], object]) -> Iterator[None]:
        """A context in which no other process fetches this model; `on_wait` is called if one does so now."""
        lock = self.root / ".locks" / self._name / "headway.lock"
        try:
            for folder in (lock.parent, self._folder / "blobs"):
                folder.mkdir(parents=True, exist_ok=True)
            file = lock.open("wb")
        except OSError as error:
            raise ModelNotFoundError(
                f"models are kept in {self.root}, where nothing can be written ({error.strerror}); make it writable, "
                "or choose another folder with the environment variable HF_HOME"
            ) from error
        with file:
            _lock(file, on_wait)
            yield

    def _blob(self, file: HubFile) -> Path:
        return self._folder / "blobs" / file.digest


def digest_of(file: HubFile) -> hashlib._Hash:
    """The hash with which the hub describes the file, before its content."""
    if len(file.digest) == len(hashlib.sha256().hexdigest()):
        return hashlib.sha256()
    return hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)


def chunks_of(content: BinaryIO) -> Iterator[bytes]:
    """Yields what is left of an open file, in pieces."""
    while chunk := content.read(2**20):
        yield chunk


def _lock(file: BinaryIO, on_wait: Callable[[], object]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        on_wait()
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:  # a file system without locks: two processes would do the same work, and one of them wins
        pass


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
