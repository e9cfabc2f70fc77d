"""Copies and transfers of blocks that go with a step: decided by the bookkeeping, for those who move the bytes."""

from __future__ import annotations

from typing import NamedTuple


class BlockMoves(NamedTuple):
    """What is copied before a step computes anything. First all that goes out, then copies on the device, then what
    comes in; all copies read before any of them is written. And transfers, which begin with the step: fetches and
    stores."""

    moved_out: tuple[tuple[int, int], ...] = ()
    """(block, slot of the host tier)"""
    copied: tuple[tuple[int, int], ...] = ()
    """(from, to)"""
    moved_in: tuple[tuple[int, int], ...] = ()
    """(slot of the host tier, block)"""
    fetched: tuple[tuple[bytes, int, str], ...] = ()
    """(digest, slot of the host tier, source): a slot to be filled beside the steps, from disk (source "") or from the
    replica at this address. No other copy of this or an earlier step that is not done has to do with the slot."""
    stored: tuple[tuple[bytes, int], ...] = ()
    """(digest, slot of the host tier): a slot to be written to disk beside the steps."""

    @property
    def has_transfers(self) -> bool:
        """Whether something begins that the step does not wait for."""
        return bool(self.fetched or self.stored)

    @property
    def has_copies(self) -> bool:
        """Whether something is copied before the step."""
        return bool(self.moved_out or self.copied or self.moved_in)


NO_MOVES = BlockMoves()


class PlannedCopies(NamedTuple):
    """Copies that the next step makes, as in `BlockMoves`. They are added here, and taken by the manager."""

    moved_out: list[tuple[int, int]]
    copied: list[tuple[int, int]]
    moved_in: list[tuple[int, int]]
