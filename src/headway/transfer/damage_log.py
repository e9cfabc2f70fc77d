"""Logs damaged cache files: one line with a count for each kind of damage, instead of a line per file."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

PAUSE_S = 60.0
"""The shortest time between two log lines for the same kind of damage."""


class DamageLog:
    """Counts damaged files by kind of damage. Thread-safe."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._unsaid: dict[str, list[str]] = {}
        """Kind of damage → names of the files that have it."""
        self._said_s: dict[str, float] = {}

    def note(self, what: str, name: str) -> None:
        """Note a damaged file. `what`: the kind of damage, as it follows the word "files" in the log."""
        with self._lock:
            self._unsaid.setdefault(what, []).append(name)

    def say(self, *, is_last: bool = False) -> None:
        """Log the damage noted since the last call. A kind that was logged recently is deferred, unless `is_last`."""
        with self._lock:
            now_s = self._now()
            due = [one for one in self._unsaid if is_last or now_s - self._said_s.get(one, -PAUSE_S) >= PAUSE_S]
            found = {what: self._unsaid.pop(what) for what in due}
            self._said_s.update(dict.fromkeys(due, now_s))
        for what, names in found.items():
            logger.warning(
                "blocks of the disk cache are computed instead: %d %s %s (%s%s)",
                len(names),
                "file" if len(names) == 1 else "files",
                what,
                names[0],
                ", …" if len(names) > 1 else "",
            )
