"""The records of block copies and transfers that belong to a step, planned by the bookkeeping for the runner."""

from __future__ import annotations

from typing import NamedTuple


class BlockMoves(NamedTuple):
    """The copies before a step, and the transfers that begin with it.

    The copies are made before the step computes anything: first those to host memory, then those on the device, then
    those from host memory. `copied` reads all its blocks before it writes any. Fetches and stores are transfers, which
    the step does not wait for."""

    moved_out: tuple[tuple[int, int], ...] = ()
    """(block, slot of the host tier): a block to copy to host memory."""
    copied: tuple[tuple[int, int], ...] = ()
    """(source block, target block): a block to copy on the device."""
    moved_in: tuple[tuple[int, int], ...] = ()
    """(slot of the host tier, block): a slot to copy to the device."""
    fetched: tuple[tuple[bytes, int, str], ...] = ()
    """(digest, slot of the host tier, source): a slot to fill in parallel to the steps, from disk (source "") or from
    the replica at this address. No other copy of this step or of an earlier one in flight uses the slot."""
    stored: tuple[tuple[bytes, int], ...] = ()
    """(digest, slot of the host tier): a slot to write to disk in parallel to the steps."""

    @property
    def has_transfers(self) -> bool:
        """Whether transfers begin, which the step does not wait for."""
        return bool(self.fetched or self.stored)

    @property
    def has_copies(self) -> bool:
        """Whether blocks are copied before the step."""
        return bool(self.moved_out or self.copied or self.moved_in)


NO_MOVES = BlockMoves()


class PlannedCopies(NamedTuple):
    """Copies for the next step, as in `BlockMoves`. The manager takes them when the step is planned."""

    moved_out: list[tuple[int, int]]
    copied: list[tuple[int, int]]
    moved_in: list[tuple[int, int]]
