"""Where files that can be made or fetched again are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """$HEADWAY_CACHE_DIR, else $XDG_CACHE_HOME/headway, else ~/.cache/headway."""
    if explicit := os.environ.get("HEADWAY_CACHE_DIR"):
        return Path(explicit).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "headway"
