"""What a prefix cache tells of itself: which blocks it keeps, change by change."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class CacheReport(NamedTuple):
    """How a replica's prefix cache has changed."""

    number: int
    """0, 1, 2, … for the life of a replica."""
    stored: Sequence[bytes]
    """Digests of blocks that are in the cache now and were not, or, if `is_whole`, of all that are."""
    evicted: Sequence[bytes] = ()
    is_whole: bool = False


MAX_REPORTED = 4096
"""Blocks in a report; what is left comes with the next."""


class CacheChanges:
    """What a prefix cache has to report: the difference between what it holds and what it has told."""

    def __init__(self, held: Callable[[], Iterable[bytes]]) -> None:
        """`held`: the digests of all its full blocks."""
        self._held = held
        self._changes: dict[bytes, bool] = {}  # digest → whether it was stored; oldest first
        self._number = 0
        self._starts_anew = False
        self.tell_all()

    def tell_all(self) -> None:
        """Report everything again, from the next report on."""
        self._changes = dict.fromkeys(self._held(), True)
        self._starts_anew = True

    def store(self, digest: bytes) -> None:
        """A block is kept from now on."""
        if self._changes.pop(digest, True):
            self._changes[digest] = True

    def evict(self, digest: bytes) -> None:
        """A block is not kept any more."""
        if not self._changes.pop(digest, False):
            self._changes[digest] = False

    def report(self) -> CacheReport | None:
        """The next report, if there is anything to tell."""
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
