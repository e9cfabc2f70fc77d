"""Reports of a prefix cache: which blocks it keeps, as a sequence of changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class CacheReport(NamedTuple):
    """The changes of a replica's prefix cache since the previous report."""

    number: int
    """Numbers the reports of a replica: 0, 1, 2, …"""
    stored: Sequence[bytes]
    """Digests of the blocks that have entered the cache, or of all cached blocks if `is_whole`."""
    evicted: Sequence[bytes] = ()
    is_whole: bool = False


MAX_REPORTED = 4096
"""The most blocks in a report; the remaining ones follow in the next."""


class CacheChanges:
    """Collects what a prefix cache has to report: the difference between what it holds and what it has reported."""

    def __init__(self, held: Callable[[], Iterable[bytes]]) -> None:
        """`held` returns the digests of all full blocks in the cache."""
        self._held = held
        self._changes: dict[bytes, bool] = {}  # digest → whether it was stored; oldest first
        self._number = 0
        self._starts_anew = False
        self.tell_all()

    def tell_all(self) -> None:
        """Report everything again, starting with the next report."""
        self._changes = dict.fromkeys(self._held(), True)
        self._starts_anew = True

    def store(self, digest: bytes) -> None:
        """Note that a block has entered the cache."""
        if self._changes.pop(digest, True):
            self._changes[digest] = True

    def evict(self, digest: bytes) -> None:
        """Note that a block has left the cache."""
        if not self._changes.pop(digest, False):
            self._changes[digest] = False

    def report(self) -> CacheReport | None:
        """Return the next report; None if there is nothing to report."""
        if not self._changes and not self._starts_anew:
            return None
        part = list(itertools.islice(self._changes.items(), MAX_REPORTED))
        for digest, _ in part:
            del self._changes[digest]
        report = CacheReport(
            self._number,
            [digest for digest, is_stored in part if is_stored],
            [digest for digest, is_stored in part if not is_stored],
            self._starts_anew,
        )
        self._number += 1
        self._starts_anew = False
        return report
