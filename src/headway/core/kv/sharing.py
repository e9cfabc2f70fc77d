"""Blocks that requests have in common: what a request finds when it enters the batch, and what others find of it.

Full blocks are kept when their last owner leaves, and a request that begins with the same tokens starts with them in
its table. A last block that is not full is kept too; a request that begins with the same tokens gets a copy of it,
since the rest of it is going to differ.

A step that has been launched may still fail, so a block is cached only when the result of its step has come: its tokens
have landed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from headway.core.kv.blocks import CachedBlock, root_digest
from headway.core.kv.device_blocks import DeviceBlocks
from headway.core.kv.moves import PlannedCopies
from headway.core.kv.prefix_cache import PrefixCache
from headway.core.kv.tiered_cache import TieredCache
from headway.core.request import Request


class Holding:
    """What an admitted request has."""

    __slots__ = ("num_announced", "num_cached", "num_landed_tokens", "promised", "table")

    def __init__(self) -> None:
        self.table: list[int] = []
        self.promised = 0  # blocks it still needs for the tokens it came with
        self.num_cached = 0  # how many of its first blocks are in the prefix cache
        self.num_announced = 0  # how many of its first blocks it is going to put there
        self.num_landed_tokens = 0  # what steps have computed for sure, while it is in `uncached`


class PrefixSharing:
    """Puts blocks of requests into the prefix cache, and finds them there."""

    def __init__(
        self,
        cache: PrefixCache,
        device: DeviceBlocks,
        *,
        tiers: TieredCache | None,
        copies: PlannedCopies,
        block_size: int,
    ) -> None:
        """`copies`: where copies of tails are planned."""
        self.uncached: dict[Request, int] = {}
        """How many tokens requests were admitted with, until all of them have landed."""
        self._cache = cache
        self._device = device
        self._tiers = tiers
        self._copies = copies
        self._block_size = block_size

    # ---- finding --------------------------------------------------------------------------------------------------

    def find(self, request: Request) -> list[CachedBlock]:
        """The first blocks of a request's tokens that are cached."""
        if not request.reads_cache:
            return []
        most = request.num_shareable_blocks(self._block_size)
        return self._cache.find(request.block_digests(self._block_size, most)[:most])

    def num_found_blocks(self, request: Request) -> int:
        """How many these are."""
        if not request.reads_cache:
            return 0
        most = request.num_shareable_blocks(self._block_size)
        return self._cache.num_found(request.block_digests(self._block_size, most), most)

    def is_being_computed(self, request: Request) -> bool:
        """Whether a running request is just computing the next block after these."""
        if not request.reads_cache:
            return False
        most, num_found = request.num_shareable_blocks(self._block_size), len(self.find(request))
        if num_found >= most:
            return False
        return self._cache.is_announced(request.block_digests(self._block_size, most)[num_found])

    # ---- entering and leaving -------------------------------------------------------------------------------------

    def enter(self, request: Request, holding: Holding, *, restores: bool) -> int:
        """Begin a table with what is cached, and announce what is going to be. Returns how many tokens were found.
        `restores`: whether blocks in the host tier are copied back."""
        self.uncached[request] = request.num_tokens
        found = self.find(request)
        for block in found:
            self._device.pool.share(block.block_id)
        self._cache.use(found)
        if request.options.cache_ttl_s:
            self._pin(request, found)
        holding.num_cached = len(found)
        holding.table = [block.block_id for block in found]
        digests = request.block_digests(self._block_size, request.num_known_tokens // self._block_size)
        if restores and request.reads_cache and self._tiers is not None:
            missing = digests[len(found) : request.num_shareable_blocks(self._block_size)]
            holding.table += self._tiers.restore(missing, self._device.take)
        num_found = len(holding.table) * self._block_size + self._copy_tail(request, holding)
        if request.reads_cache:
            self._cache.stats.num_queried_tokens += request.num_tokens
            self._cache.stats.num_hit_tokens += num_found
        holding.num_announced = len(digests)
        self._cache.announce(digests[num_found // self._block_size :], request.request_id)
        if self._tiers is not None:
            self._tiers.release(request)
        return num_found

    def _copy_tail(self, request: Request, holding: Holding) -> int:
        """Begin the block after the shared ones with a copy of a cached tail. Returns how many tokens of it are this
        request's too."""
        if not request.reads_cache:
            return 0
        start = len(holding.table) * self._block_size
        end = min(start + self._block_size, request.num_known_tokens - 1)
        before = self._digest_before(request, len(holding.table))
        block, num_equal = self._cache.find_tail(before, request.known_tokens(start, end))
        if block is None:
            return 0
        self._cache.copy_from(block)
        # The tail itself may be evicted for the copy's block: what is in it stays until the next step writes.
        new_blocks = self._device.take(1)
        if new_blocks is None:
            return 0
        holding.table += new_blocks
        if new_blocks[0] != block.block_id:
            self._copies.copied.append((block.block_id, new_blocks[0]))
        return num_equal

    def _digest_before(self, request: Request, num_blocks: int) -> bytes:
        """The digest that the block after the first `num_blocks` ones comes after."""
        if not num_blocks:
            return root_digest(request.options.cache_salt)
        return request.block_digests(self._block_size, num_blocks)[num_blocks - 1]

    def leave(self, request: Request, holding: Holding, *, keep: bool) -> None:
        """A request gives up its blocks next. What it has computed is cached now, if others may find it (`keep`)."""
        if keep:
            self._keep_full(request, holding, self._num_landed_tokens(request, holding))
        self.uncached.pop(request, None)
        self._withdraw(request, holding)

    # ---- caching what has landed ----------------------------------------------------------------------------------

    def land(self, request: Request, holding: Holding, num_tokens: int) -> None:
        """As `KVCacheManager.land`."""
        if num_tokens >= self.uncached.get(request, math.inf):
            del self.uncached[request]
        holding.num_landed_tokens = num_tokens
        self._keep_full(request, holding, num_tokens)
        if num_tokens == request.num_prompt_tokens:
            self._keep_tail(request, holding, num_tokens)

    def complete(self, request: Request, holding: Holding) -> None:
        """Let other requests find all that a running request has computed: it has its last token."""
        num_tokens = self._num_landed_tokens(request, holding)
        self._keep_full(request, holding, num_tokens)
        self._keep_tail(request, holding, num_tokens)

    def cached_blocks(self, holding: Holding) -> list[CachedBlock]:
        """The first blocks of a table, as far as they are in the prefix cache."""
        return [self._device.nodes[block_id] for block_id in holding.table[: holding.num_cached]]

    def _num_landed_tokens(self, request: Request, holding: Holding) -> int:
        """Tokens that are in the cache for sure: no step that computes them is in flight. Once all that a request was
        admitted with has landed, that is every known token but the last."""
        return holding.num_landed_tokens if request in self.uncached else request.num_known_tokens - 1

    def _keep_full(self, request: Request, holding: Holding, num_tokens: int) -> None:
        """Cache the full blocks among the first `num_tokens` tokens, which have landed."""
        num_full, num_before = num_tokens // self._block_size, holding.num_cached
        if num_before >= num_full:
            return
        nodes, cache = self._device.nodes, self._cache
        digests = request.block_digests(self._block_size, num_full)
        above = self._last_cached(holding)
        self._drop_tail(nodes[holding.table[num_before]])  # only the first can have been a tail
        for index in range(num_before, num_full):
            block = nodes[holding.table[index]]
            if not cache.insert(block, digests[index], above):
                # Another request was first. What this one has from here on is its own copy: it cannot hang below the
                # other's block, which this one does not hold.
                self._withdraw(request, holding)
                break
            above = block
            holding.num_cached += 1
        else:
            if num_before < holding.num_announced:
                cache.withdraw(digests[num_before:num_full], request.request_id)
        if request.options.cache_ttl_s:
            self._pin(request, self.cached_blocks(holding)[num_before:])

    def _last_cached(self, holding: Holding) -> CachedBlock | None:
        """The block that the next one of a request hangs below."""
        return self._device.nodes[holding.table[holding.num_cached - 1]] if holding.num_cached else None

    def _pin(self, request: Request, blocks: Iterable[CachedBlock]) -> None:
        """Keep blocks for as long as the request asks, whether computed or found, as far as they are of its prompt."""
        for block in blocks:
            if block.depth < request.num_prompt_tokens // self._block_size:
                self._cache.pin(block, request.options.cache_ttl_s)

    def _keep_tail(self, request: Request, holding: Holding, num_tokens: int) -> None:
        """Cache the last block, which is not full: other requests may start from a copy. `num_tokens` have landed."""
        num_full, num_in_tail = divmod(num_tokens, self._block_size)
        if not num_in_tail or holding.num_cached != num_full:
            return
        block = self._device.nodes[holding.table[num_full]]
        self._drop_tail(block)
        before = self._digest_before(request, num_full)
        tokens = request.known_tokens(num_full * self._block_size, num_tokens)
        if not self._cache.insert_tail(block, before, tokens, self._last_cached(holding)):
            return
        surplus = self._cache.surplus_tail(before)
        if surplus is not None and self._cache.forget(surplus):
            self._device.pool.put_back(surplus.block_id)

    def _drop_tail(self, block: CachedBlock) -> None:
        """Forget what was cached of a block that is not full, since there is more in it by now."""
        if block.is_cached and block.tail is not None:
            self._cache.drop_tail(block)

    def _withdraw(self, request: Request, holding: Holding) -> None:
        """It is not going to compute what it has announced."""
        if holding.num_announced:
            digests = request.block_digests(self._block_size, holding.num_announced)
            self._cache.withdraw(digests[: holding.num_announced], request.request_id)
            holding.num_announced = 0
