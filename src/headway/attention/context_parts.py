"""How the contexts of requests with one new token are divided among programs of a device.

Decoding reads each context once, so a step takes as long as the busiest part of the device. Contexts differ a lot: one
of 6,000 tokens beside a hundred of 500 would keep a single program busy long after all others are done. A program's
share is therefore measured by the whole step: contexts that are much longer than it are cut into parts of about that
size, each for a program of its own, and the others are one part each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

REQUEST, ROW, START, END, SEQ_LEN, FIRST_PART, NUM_PARTS = range(7)
"""The columns of a part. The context's tokens from START to END are its own; FIRST_PART is where the list has the first
of the NUM_PARTS of the same context."""
NUM_COLUMNS = 8  # of four bytes each: a part lies in one sector of memory
NO_REQUEST = -1
"""The REQUEST of room that is not used."""

_MAX_PARTS = 32  # of one context: one program adds them up
# A context that is longer than a share by no more than this is not cut: adding parts up would cost more.
_TOLERANCE = 0.15


@dataclass(frozen=True)
class ContextParts:
    """For a device that takes about `num_programs` programs, each of which reads tiles of `tile` tokens for one of
    `num_heads` heads."""

    tile: int
    num_heads: int
    num_programs: int

    def of(self, seq_lens: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """[num_parts, NUM_COLUMNS] for requests 0, 1, … with these contexts in these lines of the block table.

        Long contexts come first: those that are cut are in front, and whatever takes longest begins early. A context
        of no tokens has no part.
        """
        order = np.argsort(-seq_lens, kind="stable")
        lengths = seq_lens[order]
        num_tiles = -(-lengths // self.tile)
        share = max(-(-int(num_tiles.sum()) * self.num_heads // self.num_programs), 1)
        num_parts = np.clip(np.ceil(num_tiles / share - _TOLERANCE), 1, _MAX_PARTS).astype(np.int64)
        tiles_per_part = -(-num_tiles // num_parts)
        num_parts = -(-num_tiles // np.maximum(tiles_per_part, 1))
        first = np.cumsum(num_parts) - num_parts
        context = np.repeat(np.arange(len(order)), num_parts)
        part_tokens = tiles_per_part[context] * self.tile
        start = (np.arange(len(context)) - first[context]) * part_tokens
        parts = np.zeros((len(context), NUM_COLUMNS), dtype=np.int32)
        parts[:, REQUEST] = order[context]
        parts[:, ROW] = rows[order][context]
        parts[:, START] = start
        parts[:, END] = np.minimum(start + part_tokens, lengths[context])
        parts[:, SEQ_LEN] = lengths[context]
        parts[:, FIRST_PART] = first[context]
        parts[:, NUM_PARTS] = num_parts[context]
        return parts

    def most(self, num_requests: int) -> int:
        """No more parts than this come of so many requests."""
        return num_requests + self.num_programs // self.num_heads

    @property
    def most_of_cut_contexts(self) -> int:
        """And no more than this are parts of contexts that are cut: they are half as long as a share, at least."""
        return 2 * self.num_programs // self.num_heads + 1
