"""Eviction policies: which cached block is evicted first when memory is needed.

    EvictionPolicy   gives each block a key; the block with the smallest key is evicted first
    EvictionQueue    the blocks that could be evicted now, in that order; pinned ones go when there is nothing else

Only leaves are evicted, so a block with a small key stays until those below it are gone.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from headway.core.kv.blocks import CachedBlock
from headway.errors import ConfigError

_Candidate = tuple[bool, float, int, int, CachedBlock]
"""(pinned, the policy's key, order of arrival, version, block); the smallest is evicted first."""


class EvictionPolicy(Protocol):
    """Orders idle blocks for eviction, and is notified of what happens to them."""

    def key(self, block: CachedBlock) -> float:
        """Return what the block is worth. Called when its last user releases it, and kept until it is used again."""
        ...

    def found(self, block: CachedBlock) -> None:
        """Note that a request is about to use the block again. `num_hits` does not include this use yet."""
        ...

    def evicted(self, key: float) -> None:
        """Note that a block with this key has been evicted."""
        ...


class EvictionQueue:
    """Idle leaves of the prefix cache as a heap. A candidate that is used again stays in the heap but becomes invalid,
    since its block's version changes."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._candidates: list[_Candidate] = []
        self._pins: list[tuple[float, int, int, CachedBlock]] = []  # (until, order of arrival, version, block)
        self._num_pushed = 0

    def offer(self, block: CachedBlock, *, now_s: float, num_cached: int) -> None:
        """Make an idle leaf a candidate. `num_cached` is the number of all cached blocks, which bounds the lists."""
        heapq.heappush(self._candidates, self._candidate(block, now_s))
        if max(len(self._candidates), len(self._pins)) > 2 * num_cached + 64:
            self._clean_up()

    def evict(
        self, num_blocks: int, *, now_s: float, remove: Callable[[CachedBlock], CachedBlock | None]
    ) -> list[CachedBlock]:
        """Evict this many blocks, or fewer if no more are idle, and return them. `remove` takes a block out of the tree
        and returns its parent if that is an idle leaf now."""
        self._unpin_expired(now_s)
        evicted: list[CachedBlock] = []
        candidates, above = self._candidates, None
        while len(evicted) < num_blocks and (candidates or above is not None):
            # Usually the parent of the last block is next: it was released just after it. Then the heap stays as it is.
            least = heapq.heappop(candidates) if above is None else heapq.heappushpop(candidates, above)
            above = None
            _, key, _, version, block = least
            if version == block.version and block.num_children == 0:
                self._policy.evicted(key)
                evicted.append(block)
                parent = remove(block)
                above = None if parent is None else self._candidate(parent, now_s)
        if above is not None:
            heapq.heappush(candidates, above)
        return evicted

    def _candidate(self, block: CachedBlock, now_s: float) -> _Candidate:
        self._num_pushed += 1
        is_pinned = block.pinned_until_s > now_s
        if is_pinned:
            heapq.heappush(self._pins, (block.pinned_until_s, self._num_pushed, block.version, block))
        return (is_pinned, block.worth, self._num_pushed, block.version, block)

    def _unpin_expired(self, now_s: float) -> None:
        while self._pins and self._pins[0][0] <= now_s:
            _, _, version, block = heapq.heappop(self._pins)
            if version == block.version:
                block.version += 1
                heapq.heappush(self._candidates, self._candidate(block, now_s))

    def _clean_up(self) -> None:
        """Drop invalid candidates."""
        self._candidates = [one for one in self._candidates if one[3] == one[4].version and one[4].num_children == 0]
        heapq.heapify(self._candidates)
        self._pins = [one for one in self._pins if one[2] == one[3].version]
        heapq.heapify(self._pins)

    def check_invariants(self, cached: Iterable[CachedBlock]) -> None:
        """Raise `AssertionError` unless every idle leaf can be evicted."""
        found = {id(block) for _, _, _, version, block in self._candidates if version == block.version}
        leaves = {id(block) for block in cached if block.is_idle and not block.num_children}
        assert leaves <= found, "an idle leaf cannot be evicted"


class LeastRecentlyUsed:
    """Evicts the block whose last use is longest ago."""

    def key(self, block: CachedBlock) -> float:
        return block.last_used

    def found(self, block: CachedBlock) -> None:
        """Nothing to learn."""

    def evicted(self, key: float) -> None:
        """Nothing to learn."""


class CostAware:
    """Evicts the block that is expected to save least: its tokens × the likelihood that a request needs them.

    Blocks hold equally many tokens, so only the likelihood matters. It is learnt by kind: of all blocks with as many
    hits at the same depth, which share was found again after the last user had left? These counts show whether second
    turns are more frequent than third ones, and whether long contexts return.

    The likelihood places the key between that of the block evicted last and the present:

        evicted last ├──────────────┼─────┤ now               likelihood 0.7
                                    key

    So a block that is twice as likely to be found is kept for twice as long, and a certain one is treated as with LRU.
    The cost is O(1) per block.
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
    """Counts how often blocks of one kind were released by their last user and found again. Old counts fade."""

    __slots__ = ("num_found", "num_released")

    def __init__(self) -> None:
        self.num_found = 1.0  # at first, as if one of two blocks had been found
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
    """The kind of a block: its hits up to four, its depth by powers of two, and whether it is a tail."""
    return min(block.num_hits, 4), block.depth.bit_length(), block.tail is not None


MEMORY = 4096
"""After this many released blocks of a kind, its counts are halved."""

POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = {"lru": LeastRecentlyUsed, "cost": CostAware}


def create_eviction_policy(name: str) -> EvictionPolicy:
    """Create the policy of this name. Raises `ConfigError` if there is none."""
    if name not in POLICIES:
        raise ConfigError(f"Unknown eviction policy '{name}'. Known: {', '.join(POLICIES)}.")
    return POLICIES[name]()
