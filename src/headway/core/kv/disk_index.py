"""The index of blocks on disk: which blocks a folder has, and how long it takes to read one."""

from __future__ import annotations

import itertools
from collections import OrderedDict

_SMOOTHING = 0.03  # least weight of the latest fetch in the mean time: fetches come in bursts
_FADING = 0.99  # the estimate shrinks by this factor with each refused fetch, so that one is tried again at some time


class DiskIndex:
    """Digests of blocks on disk. It holds at most `max_blocks`, and forgets the least recently used first."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.block_s = 0.0
        """The mean time to read a block; 0 while it is not known."""
        self._num_timed = 0  # how many fetches were timed
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._digests)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._digests

    def add(self, digest: bytes) -> None:
        """Note that a block is on disk, and was used just now."""
        self._digests[digest] = None
        self._digests.move_to_end(digest)
        if len(self._digests) > self.max_blocks:
            self._digests.popitem(last=False)

    def discard(self, digest: bytes) -> None:
        """Note that a block is not on disk, or is unusable."""
        self._digests.pop(digest, None)

    def clear(self) -> None:
        """Forget all blocks. The time to read one stays known."""
        self._digests.clear()

    def latest(self, most: int) -> list[bytes]:
        """Return at most this many digests, most recently used first."""
        return list(itertools.islice(reversed(self._digests), most))

    def note_fetched(self, seconds: float) -> None:
        """Note that a block has been read in this time."""
        self._num_timed += 1
        self.block_s += max(_SMOOTHING, 1 / self._num_timed) * (seconds - self.block_s)

    def is_worth_fetching(self, block_s: float) -> bool:
        """Whether a block is read in less than `block_s`. While the time is not known, it is assumed to be."""
        if self.block_s < block_s:
            return True
        self.block_s *= _FADING
        return False
