"""Which cached block to evict first when memory is needed. A policy is one number per block: the least goes first.

Only leaves are evicted, so a block with a small number still waits for those below it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Protocol

from headway.core.blocks import CachedBlock
from headway.errors import ConfigError


class EvictionPolicy(Protocol):
    """Told of what happens to blocks that no request uses."""

    def key(self, block: CachedBlock) -> float:
        """What the block is worth. Asked when its last user releases it, and kept until it is used again."""
        ...

    def found(self, block: CachedBlock) -> None:
        """Note that a request is about to use the block again; its hits do not count that yet."""
        ...

    def evicted(self, key: float) -> None:
        """Note that a block of this key has been evicted."""
        ...


class LeastRecentlyUsed:
    """The block that has not been used for longest."""

    def key(self, block: CachedBlock) -> float:
        return block.last_used

    def found(self, block: CachedBlock) -> None:
        """Nothing to learn."""

    def evicted(self, key: float) -> None:
        """Nothing to learn."""


class CostAware:
    """The block that is expected to save least: its tokens × the likelihood that a request needs them.

    Blocks hold equally many tokens, so it is the likelihood that tells them apart. It is learnt by kind: of all blocks
    that had been found as often and lay as deep, which share was found once more after its last user had left? Whether
    second turns come more often than third ones, whether long contexts return: it shows in these counts.

    The key lies between that of the block evicted last and the present, as far up as the likelihood says:

        evicted last ├──────────────┼─────┤ now               likelihood 0.7
                                    key

    so a block that is twice as likely to be found is kept for twice as long, and certain ones are as with LRU. Costs
    O(1) per block.
    """

    def __init__(self) -> None:
        self._kinds: defaultdict[tuple[int, int, bool], _Kind] = defaultdict(_Kind)
        self._last_evicted = 0.0

    def key(self, block: CachedBlock) -> float:
        kind = self._kinds[_kind_of(block)]
        kind.release()
        return self._last_evicted + kind.likelihood * (block.last_used - self._last_evicted)

    def found(self, block: CachedBlock) -> None:
        self._kinds[_kind_of(block)].num_found += 1

    def evicted(self, key: float) -> None:
        self._last_evicted = max(self._last_evicted, key)


class _Kind:
    """How often blocks of one kind were released by their last user and found again. Old counts fade."""

    __slots__ = ("num_found", "num_released")

    def __init__(self) -> None:
        self.num_found = 1.0  # as if one of two had been found before anything is known
        self.num_released = 2.0

    def release(self) -> None:
        self.num_released += 1
        if self.num_released > MEMORY:
            self.num_released /= 2
            self.num_found /= 2

    @property
    def likelihood(self) -> float:
        return min(1.0, self.num_found / self.num_released)


def _kind_of(block: CachedBlock) -> tuple[int, int, bool]:
    """Hits up to four, depth by powers of two, and whether it is a tail."""
    return min(block.num_hits, 4), block.depth.bit_length(), block.tail is not None


MEMORY = 4096
"""Blocks of a kind after which what was counted before weighs half."""

POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = {"lru": LeastRecentlyUsed, "cost": CostAware}


def create_eviction_policy(name: str) -> EvictionPolicy:
    """The policy of this name."""
    if name not in POLICIES:
        raise ConfigError(f"Unknown eviction policy '{name}'. Known: {', '.join(POLICIES)}.")
    return POLICIES[name]()
