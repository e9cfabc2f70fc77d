"""Says what is wrong with files of a cache: a line for each kind of damage with a number, not a line for each file."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

PAUSE_S = 60.0
"""A kind of damage is not logged again before that."""


class DamageLog:
    """Counts files by what is wrong with them. For any number of threads."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._unsaid: dict[str, list[str]] = {}
        """What is wrong → names of the files with which it is."""
        self._said_s: dict[str, float] = {}

    def note(self, what: str, name: str) -> None:
        """`what`: a kind of damage, as it stands behind "files"."""
        with self._lock:
            self._unsaid.setdefault(what, []).append(name)

    def say(self, *, is_last: bool = False) -> None:
        """Log what was noted since the last call. A kind that was logged a short time ago waits, unless this is the
        last call."""
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
