"""The KV memory as a pool of equal blocks: which are free, and how many owners the others have.

    block ids   0 1 2 3 4 5 6 7
    ref counts  1 0 2 1 0 0 1 0        2 is shared by two requests
    free        1 4 5                  oldest freed first; 7 has no owner but is kept, for what it holds

Every operation costs O(1) per block. A block with owners is never on the free list.
"""

from __future__ import annotations

from collections import OrderedDict


class BlockPool:
    """Reference-counted blocks `0 .. num_blocks - 1`."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free_blocks(self) -> int:
        """Blocks that hold nothing of use."""
        return len(self._free)

    @property
    def num_taken_blocks(self) -> int:
        """Blocks with owners, and blocks that are kept."""
        return self.num_blocks - len(self._free)

    def ref_count(self, block_id: int) -> int:
        """How many owners a block has."""
        return self._ref_counts[block_id]

    def is_free(self, block_id: int) -> bool:
        """Whether a block is on the free list."""
        return block_id in self._free

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take that many blocks, each with one owner; `None`, and nothing taken, if there are not enough."""
        if num_blocks > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block_id in taken:
            self._ref_counts[block_id] = 1
        return taken

    def share(self, block_id: int) -> None:
        """Add an owner to a block that is in use, or that was kept when its last owner left."""
        if block_id in self._free:
            raise RuntimeError(f"block {block_id} is free and cannot be shared")
        self._ref_counts[block_id] += 1

    def drop(self, block_id: int) -> bool:
        """Drop one owner of a block. Returns whether it was the last: then `put_back` it, or keep it for later use."""
        if self._ref_counts[block_id] == 0:
            raise RuntimeError(f"block {block_id} has no owner to drop")
        self._ref_counts[block_id] -= 1
        return self._ref_counts[block_id] == 0

    def put_back(self, block_id: int) -> None:
        """Make a block without owners free."""
        if self._ref_counts[block_id] or block_id in self._free:
            raise RuntimeError(f"block {block_id} is freed twice, or in use")
        self._free[block_id] = None
