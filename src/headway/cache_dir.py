"""Where files that can be made or fetched again are kept between runs."""

from __future__ import annotations

import atexit
import functools
import os
import tempfile
from pathlib import Path


def cache_dir() -> Path:
    """$HEADWAY_CACHE_DIR, else $XDG_CACHE_HOME/headway, else ~/.cache/headway. It need not exist, nor be writable."""
    if explicit := os.environ.get("HEADWAY_CACHE_DIR"):
        return Path(explicit).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else _home() / ".cache") / "headway"


def why_not_writable(folder: Path) -> OSError | None:
    """Why no file can be put into a folder, which is made if need be; `None` if one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error


@functools.cache
def temporary_folder() -> Path:
    """Make a private folder for what cannot be kept; it is removed with the process."""
    folder = tempfile.TemporaryDirectory(prefix="headway-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # a user without an entry, as in some containers
        return Path("/")
