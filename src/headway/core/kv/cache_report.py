"""Reports of a prefix cache: which blocks it keeps, as a sequence of changes."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class BlockContent(NamedTuple):
    """What a full block holds, for readers that cannot compute its digest."""

    parent: bytes | None
    """The digest of the block before it; None for the first block of a chain."""
    token_ids: bytes
    """Its tokens, as int32."""
    salt: str | None = None
    """The salt of the chain, which only its first block has."""

    @property
    def tokens(self) -> list[int]:
        return array("i", self.token_ids).tolist()


class CacheReport(NamedTuple):
    """The changes of a replica's prefix cache since the previous report."""

    number: int
    """Numbers the reports of a replica: 0, 1, 2, …"""
    stored: Sequence[bytes]
    """Digests of the blocks that have entered the cache, or of all cached blocks if `is_whole`."""
    evicted: Sequence[bytes] = ()
    is_whole: bool = False
    contents: Sequence[BlockContent] = ()
    """What each block of `stored` holds, if contents are reported."""


MAX_REPORTED = 4096
"""The most blocks in a report; the remaining ones follow in the next."""


class CacheChanges:
    """Collects what a prefix cache has to report: the difference between what it holds and what it has reported."""

    def __init__(self, held: Callable[[], Iterable[bytes]], *, with_contents: bool = False) -> None:
        """`held` returns the digests of all full blocks in the cache, parents before their children. `with_contents`:
        reports say what blocks hold; the cache must be empty at first, and each block must be stored with its
        content."""
        self._held = held
        self._contents: dict[bytes, BlockContent] | None = {} if with_contents else None
        self._changes: dict[bytes, bool] = {}  # digest → whether it was stored; oldest first
        self._number = 0
        self._starts_anew = False
        self.tell_all()

    @property
    def has_contents(self) -> bool:
        """Whether blocks must be stored with their contents."""
        return self._contents is not None

    def tell_all(self) -> None:
        """Report everything again, starting with the next report."""
        self._changes = dict.fromkeys(self._held(), True)
        self._starts_anew = True

    def store(self, digest: bytes, content: BlockContent | None = None) -> None:
        """Note that a block has entered the cache."""
        if self._contents is not None:
            assert content is not None, "a block is stored without its content"
            self._contents[digest] = content
        if self._changes.pop(digest, True):
            self._changes[digest] = True

    def evict(self, digest: bytes) -> None:
        """Note that a block has left the cache."""
        if self._contents is not None:
            del self._contents[digest]
        if not self._changes.pop(digest, False):
            self._changes[digest] = False

    def report(self) -> CacheReport | None:
        """Return the next report; None if there is nothing to report."""
        if not self._changes and not self._starts_anew:
            return None
        part = list(itertools.islice(self._changes.items(), MAX_REPORTED))
        for digest, _ in part:
            del self._changes[digest]
        stored = [digest for digest, is_stored in part if is_stored]
        report = CacheReport(
            self._number,
            stored,
            [digest for digest, is_stored in part if not is_stored],
            self._starts_anew,
            () if self._contents is None else [self._contents[digest] for digest in stored],
        )
        self._number += 1
        self._starts_anew = False
        return report
