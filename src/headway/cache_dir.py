"""The cache folder: files that can be rebuilt or downloaded again, kept so that no other user can change them.

Anyone who can write to a cached file decides which code runs, or what a model answers. But the cache folder may be
shared: it may belong to a group, be the temporary folder, or be a Kubernetes volume that belongs to root. So all files
are in a private folder inside it:

    DIR                    as the user has chosen it
    DIR/headway-1000       of the user with the number 1000; mode 0700; a link is not followed

Only this user can put files there. A file is checked again when it is opened: it must be a regular file, not a link,
must belong to this user, and no other user may be able to write to it.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_dir() -> Path:
    """$HEADWAY_CACHE_DIR, else $XDG_CACHE_HOME/headway, else ~/.cache/headway. It need not exist, nor be writable."""
    if explicit := os.environ.get("HEADWAY_CACHE_DIR"):
        return Path(explicit).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else _home() / ".cache") / "headway"


def private_folder(parent: Path, name: str | None = None) -> Path:
    """The folder inside `parent` that belongs to this user alone; both are created if needed. Raises `OSError`, whose
    text says what is wrong and what to do."""
    name = f"headway-{os.geteuid()}" if name is None else name
    folder = parent if parent.name == name else parent / name
    for _ in range(2):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise _refusal(folder, "is no folder, or a link to one, which is not followed")
        if found.st_uid != os.geteuid():
            raise _refusal(folder, f"belongs to another user (number {found.st_uid})")
        if not found.st_mode & _OTHERS_WRITE:
            if found.st_mode & _OTHERS:
                folder.chmod(0o700)
            return folder
        _discard(folder, found.st_mode)
    raise _refusal(folder, f"stays open to other users (mode {stat.S_IMODE(found.st_mode):04o}) on this file system")


def _refusal(folder: Path, what: str) -> PermissionError:
    text = f"'{folder.name}' in it {what}; remove it, or choose a folder in which only this user can make folders"
    return PermissionError(errno.EPERM, text, str(folder))


def _discard(folder: Path, mode: int) -> None:
    """Discard a folder in which other users may have put or changed files."""
    logger.warning(
        "%s is made anew, since other users could write to it (mode %04o). Where it is Kubernetes that changes modes "
        "for an fsGroup, fsGroupChangePolicy: OnRootMismatch keeps what is in it",
        folder,
        stat.S_IMODE(mode),
    )
    aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    with contextlib.suppress(FileNotFoundError):  # another process has done the same
        folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def why_not_private(status: os.stat_result) -> str | None:
    """Why an open file may hold what another user has written; `None` if this user wrote it."""
    if not stat.S_ISREG(status.st_mode):
        return "is no file"
    if status.st_uid != os.geteuid():
        return f"belongs to another user (number {status.st_uid})"
    return "may be written to by other users" if status.st_mode & _OTHERS_WRITE else None


@contextlib.contextmanager
def opened_folder(folder: Path) -> Iterator[int]:
    """The descriptor of a folder to which no other user can write; raises `OSError` if one can. A file opened through
    it is in that folder, whatever other users do to the folders above it."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(opened)
        if found.st_uid != os.geteuid() or found.st_mode & _OTHERS_WRITE:
            raise PermissionError(errno.EPERM, "other users can write to this folder", str(folder))
        yield opened
    finally:
        os.close(opened)


@contextlib.contextmanager
def opened_private(path: Path | str, *, folder: int | None = None) -> Iterator[int]:
    """The descriptor of a file that is read, perhaps one in an open folder. Raises `OSError` if it cannot be read, and
    if another user may have written it: `EPERM`, or `ELOOP` for a link."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        if (reason := why_not_private(os.fstat(file))) is not None:
            raise PermissionError(errno.EPERM, reason, str(path))
        yield file
    finally:
        os.close(file)


def is_kept(path: Path) -> bool:
    """Whether the file exists and was written by this user."""
    try:
        with opened_private(path):
            return True
    except OSError:
        return False


def why_not_writable(folder: Path) -> OSError | None:
    """Why no file can be created in a folder, which is itself created if needed; `None` if one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error


@functools.cache
def temporary_folder() -> Path:
    """Create a private folder for files that cannot be cached; it is removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="headway-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # a user without an entry, as in some containers
        return Path("/")
