"""Which cached block to give up first when memory is needed. A policy is one number per block: the least goes first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from headway.core.cached_block import CachedBlock
from headway.errors import ConfigError


class EvictionPolicy(Protocol):
    """Asked only about blocks that nobody uses and that no cached block comes after."""

    def key(self, block: CachedBlock) -> float:
        """What the block is worth. Asked when it becomes a candidate; it stays so until it is used again."""
        ...

    def evicted(self, key: float) -> None:
        """A block of this key has been given up."""
        ...


class LeastRecentlyUsed:
    """The block that nobody has used for longest."""

    def key(self, block: CachedBlock) -> float:
        return block.last_used

    def evicted(self, key: float) -> None:
        """Nothing to learn."""


class CostAware:
    """The block that saves least: tokens to compute again × how likely they are wanted.

    A block that has been found before is likely to be found again, each time more so, and one deep in a context is
    expensive, as each of its tokens attends to all before. Age counts as in GreedyDual: all keys start from the key of
    the block that was given up last, so what is not used is overtaken.
    """

    def __init__(self) -> None:
        self._floor = 0.0

    def key(self, block: CachedBlock) -> float:
        return self._floor + (1 + block.num_hits) * (1 + block.depth * DEPTH_COST)

    def evicted(self, key: float) -> None:
        self._floor = max(self._floor, key)


DEPTH_COST = 0.01
"""What each block before it adds to the cost of one."""

POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = {"lru": LeastRecentlyUsed, "cost": CostAware}


def create_eviction_policy(name: str) -> EvictionPolicy:
    """The policy of this name."""
    if name not in POLICIES:
        raise ConfigError(f"Unknown eviction policy '{name}'. Known: {', '.join(POLICIES)}.")
    return POLICIES[name]()
