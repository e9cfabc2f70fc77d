"""Blocks of device memory: free, in use, or idle and kept for their contents.

    free ──► in use ──► idle ──► in use again
      ▲         │         │
      └─────────┴─────────┘          not worth keeping, or evicted because another request needs room

Idle blocks count as available, since they can be evicted at any time. There are two kinds: blocks of the prefix cache,
and blocks that were prefetched for requests that still wait (`TieredCache`). The former are evicted first.
"""

from __future__ import annotations

from headway.core.kv.blocks import BlockPool, CachedBlock
from headway.core.kv.prefix_cache import PrefixCache
from headway.core.kv.tiered_cache import TieredCache


class DeviceBlocks:
    """The block pool, together with the idle blocks that are kept."""

    def __init__(self, pool: BlockPool, *, prefix_cache: PrefixCache | None, tiers: TieredCache | None) -> None:
        """Create it over this pool. Evicted blocks are moved to `tiers`."""
        self.pool = pool
        self._cache = prefix_cache
        self._tiers = tiers
        self.nodes = [CachedBlock(block_id) for block_id in range(0 if prefix_cache is None else pool.num_blocks)]
        """The record of each block's contents, by block id, whether it is cached or not."""

    @property
    def num_idle(self) -> int:
        """Blocks that no request uses and that are kept for their contents."""
        if self._cache is None:
            return 0
        return self._cache.num_idle_blocks + (0 if self._tiers is None else self._tiers.num_prefetched)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: free ones, and idle ones, which would be evicted."""
        return self.pool.num_free_blocks + self.num_idle

    @property
    def num_used(self) -> int:
        """Blocks that at least one request holds."""
        return self.pool.num_taken_blocks - self.num_idle

    @property
    def cached(self) -> dict[int, CachedBlock]:
        """All cached blocks by their id, whether a request uses them or not."""
        return {node.block_id: node for node in self.nodes if node.is_cached}

    def take(self, num_blocks: int) -> list[int] | None:
        """Take blocks, evicting idle ones if the free ones do not suffice. Returns `None` if there are not enough."""
        num_free = self.pool.num_free_blocks
        if num_blocks <= num_free:
            return self.pool.allocate(num_blocks)
        if num_blocks > self.num_available:
            return None
        taken = (self.pool.allocate(num_free) if num_free else None) or []
        return taken + self._evict(num_blocks - num_free)

    def _evict(self, num_blocks: int) -> list[int]:
        """Evict and take the idle blocks that are worth least."""
        assert self._cache is not None
        taken = []
        for block in self._cache.evict(num_blocks):
            if self._tiers is not None and block.tail is None:
                self._tiers.move_out(block)
            taken.append(block.block_id)
        if self._tiers is not None and len(taken) < num_blocks:
            taken += self._tiers.give_back_prefetched(num_blocks - len(taken))
        for block_id in taken:
            self.pool.share(block_id)
        return taken

    def forget_idle(self) -> int:
        """Free the idle blocks of the prefix cache without moving them elsewhere. Returns how many there were."""
        if self._cache is None:
            return 0
        forgotten = self._cache.evict(self._cache.num_idle_blocks)
        for block in forgotten:
            self.pool.put_back(block.block_id)
        return len(forgotten)

    def drop(self, block_id: int, *, keep: bool = True) -> None:
        """Drop one owner of a block. After the last one, it becomes idle if it is cached, and free otherwise.
        `keep=False`: it must not be found again."""
        if not self.pool.drop(block_id):
            return
        if self._cache is not None and (node := self.nodes[block_id]).is_cached:
            self._cache.release(node)
            if keep or not self._cache.forget(node):
                return
        self.pool.put_back(block_id)
