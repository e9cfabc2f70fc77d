"""Which blocks are on disk, and how long it takes to read one: what a scheduler knows about a folder of blocks."""

from __future__ import annotations

import itertools
from collections import OrderedDict

_SMOOTHING = 0.03  # least weight of the latest fetch in the mean time of one: many come at once, then none for a while
_FADING = 0.99  # after each fetch that was not worth it, the next seems this much shorter, so that one is tried again


class DiskIndex:
    """Digests of blocks on disk. At most `max_blocks` are known; those used longest ago are forgotten first."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.block_s = 0.0
        """The mean time that a block takes; 0 while it is not known."""
        self._num_timed = 0  # fetches in that
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._digests)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._digests

    def add(self, digest: bytes) -> None:
        """It is there, and was used just now."""
        self._digests[digest] = None
        self._digests.move_to_end(digest)
        if len(self._digests) > self.max_blocks:
            self._digests.popitem(last=False)

    def discard(self, digest: bytes) -> None:
        """It is not there, or cannot be used."""
        self._digests.pop(digest, None)

    def latest(self, most: int) -> list[bytes]:
        """At most this many that were used last, the very last one first."""
        return list(itertools.islice(reversed(self._digests), most))

    def note_fetched(self, seconds: float) -> None:
        """A block has been read in this time."""
        self._num_timed += 1
        self.block_s += max(_SMOOTHING, 1 / self._num_timed) * (seconds - self.block_s)

    def is_worth_fetching(self, block_s: float) -> bool:
        """Whether a block comes sooner than within `block_s`. While that is not known, it is tried."""
        if self.block_s < block_s:
            return True
        self.block_s *= _FADING
        return False
