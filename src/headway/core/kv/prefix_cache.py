"""The prefix cache: full blocks that are kept after their request has ended, and found again by their tokens.

Cached blocks form a tree: the children of a block are the blocks that followed it in some request.

    [You are a helpful] ─ [assistant.\\nWhat is] ─ [the capital of Peru]      used by a request
                                            └─── [the weather like in]      idle: no request uses it, it may be evicted

A request that uses a block uses all blocks above it, so idle blocks are at the bottom. Only leaves are evicted, so no
chain is ever split: a block can always be found from the root. The eviction policy chooses the leaf; pinned blocks are
evicted only when there is nothing else.

The last block of a request, which is not full, may be in the tree too: it is called a tail. No other request can write
into it, but a request that begins with some of its tokens can start from a copy:

    [You are a helpful] ─ [assistant.\nWhat is] ─ [the capital]                two of four tokens

A block that is not in the tree yet may be announced, which means that a running request is computing it. Other requests
that need it should wait rather than compute it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

from headway.core.kv.blocks import CachedBlock, tail_digest
from headway.core.kv.cache_report import BlockContent, CacheChanges
from headway.core.kv.eviction import EvictionPolicy, EvictionQueue, LeastRecentlyUsed
from headway.counters import Counter, Statistics

MAX_TAILS = 32
"""The most tails below one block. A lookup compares tokens with all of them, so these must be few."""


class PrefixCacheStats(Statistics):
    """Counts lookups in the cache, and the blocks inserted and evicted."""

    num_queried_tokens: Annotated[
        int,
        Counter(
            "prefix_cache_queries",
            "Tokens looked up, of requests that enter the batch.",
            of_requests=True,
            by_replica=True,
        ),
    ] = 0
    """Counted for requests that are admitted for the first time or after a preemption, but not for continuing beams."""
    num_hit_tokens: Annotated[
        int,
        Counter(
            "prefix_cache_hits",
            "Tokens found in the prefix cache, of requests that enter the batch.",
            of_requests=True,
            by_replica=True,
        ),
    ] = 0
    num_inserted_blocks: Annotated[
        int, Counter("prefix_cache_inserted_blocks", "KV blocks taken into the prefix cache.")
    ] = 0
    num_evicted_blocks: Annotated[int, Counter("prefix_cache_evicted_blocks", "KV blocks given up for room.")] = 0

    @property
    def hit_rate(self) -> float:
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0


class PrefixCache:
    """The tree of cached blocks, by digest. It chooses which blocks to evict, but does not touch the pool."""

    def __init__(self, policy: EvictionPolicy | None = None) -> None:
        self.policy = policy or LeastRecentlyUsed()
        self.stats = PrefixCacheStats()
        self.eviction = EvictionQueue(self.policy)
        self._now_s = 0.0  # for pins
        self._blocks: dict[bytes, CachedBlock] = {}
        self._tails: dict[bytes, dict[bytes, CachedBlock]] = {}  # by the digest before them, oldest first
        self._announced: dict[bytes, str] = {}
        self._num_idle = 0
        self._num_uses = 0
        self.changes: CacheChanges | None = None
        """The changes to report; None unless `follow_changes` was called."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[CachedBlock]:
        return iter(self._blocks.values())

    @property
    def num_idle_blocks(self) -> int:
        """Cached blocks that no request uses; every one of them can be evicted."""
        return self._num_idle

    def follow_changes(self, *, with_contents: bool = False) -> CacheChanges:
        """Collect changes of full blocks from now on, and return the collector. It reports the present blocks first.
        `with_contents`: reports say which tokens blocks hold. This must be asked for while the cache is empty."""
        if with_contents and self._blocks:
            raise RuntimeError("the contents of blocks can only be followed from an empty cache")
        self.changes = CacheChanges(
            lambda: [block.digest for block in self if block.tail is None], with_contents=with_contents
        )
        return self.changes

    @property
    def wants_contents(self) -> bool:
        """Whether `insert` must be given what a block holds."""
        return self.changes is not None and self.changes.has_contents

    def advance(self, now_s: float) -> None:
        """Set the current time, at which pins may expire."""
        self._now_s = now_s

    # ---- finding --------------------------------------------------------------------------------------------------

    def find(self, digests: Iterable[bytes]) -> list[CachedBlock]:
        """Return the cached blocks of this chain, up to the first one that is not cached."""
        chain = []
        for digest in digests:
            block = self._blocks.get(digest)
            if block is None:
                break
            chain.append(block)
        return chain

    def has(self, digest: bytes) -> bool:
        """Whether a block is cached, in use or idle."""
        return digest in self._blocks

    def num_found(self, digests: Sequence[bytes], most: int) -> int:
        """Return how many of the first `most` blocks of this chain are cached. A block is cached only if all before it
        are, so a binary search finds it."""
        blocks, low, high = self._blocks, 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if digests[middle - 1] in blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def find_tail(self, before: bytes, tokens: Sequence[int]) -> tuple[CachedBlock | None, int]:
        """Return the tail after this digest that shares the most first tokens with `tokens`, and how many; `None` and 0
        if there is none."""
        best, most = None, 0
        for block in self._tails.get(before, {}).values():
            assert block.tail is not None
            num_equal = _num_equal(block.tail, tokens)
            if num_equal > most:
                best, most = block, num_equal
        return best, most

    def copy_from(self, block: CachedBlock) -> None:
        """Count a use of a tail: a request starts from a copy of it."""
        is_idle = block.is_idle
        if is_idle:
            self.policy.found(block)
        block.num_hits += 1
        if is_idle:
            self._touch(block)

    def use(self, chain: Sequence[CachedBlock]) -> None:
        """Count these blocks as used by one more request."""
        for block in chain:
            if block.is_idle:
                self.policy.found(block)
                block.is_idle = False
                block.version += 1
                self._num_idle -= 1
            block.num_hits += 1

    def touch(self, chain: Sequence[CachedBlock]) -> None:
        """Count the idle blocks of a chain as used just now, the first of them as the most recent."""
        for block in reversed(chain):
            if block.is_idle:
                self._touch(block)

    # ---- announcements --------------------------------------------------------------------------------------------

    def announce(self, digests: Iterable[bytes], request_id: str) -> None:
        """Note that a request is going to compute these blocks, except those that are cached or announced already."""
        for digest in digests:
            if digest not in self._blocks:
                self._announced.setdefault(digest, request_id)

    def withdraw(self, digests: Iterable[bytes], request_id: str) -> None:
        """Note that the request has computed these announced blocks, or will not compute them."""
        for digest in digests:
            if self._announced.get(digest) == request_id:
                del self._announced[digest]

    def is_announced(self, digest: bytes) -> bool:
        """Whether a running request is computing this block."""
        return digest in self._announced

    @property
    def announced(self) -> dict[bytes, str]:
        """Digests of announced blocks, with the ids of the requests that compute them."""
        return dict(self._announced)

    # ---- insertion and eviction -----------------------------------------------------------------------------------

    def insert(
        self, block: CachedBlock, digest: bytes, parent: CachedBlock | None, content: BlockContent | None = None
    ) -> bool:
        """Cache a block that a request has just computed and still uses. Returns False if an equal one is cached."""
        if digest in self._blocks:
            return False
        block.enter(digest, parent)
        self._blocks[digest] = block
        self.stats.num_inserted_blocks += 1
        if self.changes is not None:
            self.changes.store(digest, content)
        return True

    def insert_tail(
        self, block: CachedBlock, before: bytes, tokens: tuple[int, ...], parent: CachedBlock | None
    ) -> bool:
        """Cache a block that is not full and that a request still uses. Returns False if the cache has an equal one, or
        too many others that are in use."""
        digest = tail_digest(before, tokens)
        tails = self._tails.setdefault(before, {})
        if digest in tails or (len(tails) >= MAX_TAILS and all(not tail.is_idle for tail in tails.values())):
            return False
        block.enter(digest, parent, tail=tokens, before=before)
        self._blocks[digest] = tails[digest] = block
        self.stats.num_inserted_blocks += 1
        return True

    def surplus_tail(self, before: bytes) -> CachedBlock | None:
        """Return the oldest idle tail after this digest, if there are too many."""
        tails = self._tails.get(before, {})
        if len(tails) <= MAX_TAILS:
            return None
        return next((block for block in tails.values() if block.is_idle), None)

    def drop_tail(self, block: CachedBlock) -> None:
        """Take a tail out of the tree, because the request that uses it has written more into it."""
        assert not block.is_idle
        self._unlink(block)

    def pin(self, block: CachedBlock, seconds: float) -> None:
        """Pin a block for this time: it is evicted only if nothing else is left."""
        block.pinned_until_s = max(block.pinned_until_s, self._now_s + seconds)

    def release(self, block: CachedBlock) -> None:
        """Make a block idle because no request uses it any more. The blocks below it must have been released before."""
        block.is_idle = True
        self._num_idle += 1
        self._touch(block)

    def evict(self, num_blocks: int) -> list[CachedBlock]:
        """Evict this many blocks, each time the one that is worth least, or fewer if no more are idle. Returns them."""
        evicted = self.eviction.evict(num_blocks, now_s=self._now_s, remove=self._remove)
        self.stats.num_evicted_blocks += len(evicted)
        return evicted

    def forget(self, block: CachedBlock) -> bool:
        """Forget a block that must not be found again, if it is an idle leaf. Returns whether it was."""
        if not block.is_idle or block.num_children:
            return False
        parent = self._remove(block)
        if parent is not None:
            self.eviction.offer(parent, now_s=self._now_s, num_cached=len(self._blocks))
        return True

    def _touch(self, block: CachedBlock) -> None:
        """Count an idle block as used just now."""
        self._num_uses += 1
        block.last_used = self._num_uses
        block.worth = self.policy.key(block)
        block.version += 1
        if block.num_children == 0:
            self.eviction.offer(block, now_s=self._now_s, num_cached=len(self._blocks))

    def _remove(self, block: CachedBlock) -> CachedBlock | None:
        """Take an idle leaf out of the tree. Returns its parent, if that is an idle leaf now."""
        block.is_idle = False
        self._num_idle -= 1
        self._unlink(block)
        parent = block.parent
        return parent if parent is not None and parent.is_idle and parent.num_children == 0 else None

    def _unlink(self, block: CachedBlock) -> None:
        del self._blocks[block.digest]
        block.is_cached = False
        block.version += 1
        if block.tail is not None:
            self._forget_tail(block)
        elif self.changes is not None:
            self.changes.evict(block.digest)
        if block.parent is not None:
            block.parent.num_children -= 1

    def _forget_tail(self, block: CachedBlock) -> None:
        before = block.before
        tails = self._tails[before]
        del tails[block.digest]
        if not tails:
            del self._tails[before]


def _num_equal(some: Sequence[int], others: Sequence[int]) -> int:
    """Return how many tokens at the beginning are equal."""
    for index, (one, other) in enumerate(zip(some, others, strict=False)):
        if one != other:
            return index
    return min(len(some), len(others))
