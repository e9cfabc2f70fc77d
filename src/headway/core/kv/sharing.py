"""Prefix sharing: a request finds cached blocks when it is admitted, and its own blocks are cached for others.

Full blocks are kept when their last owner leaves. A request that begins with the same tokens starts with them in its
table. A last block that is not full is kept too. A request that begins with the same tokens gets a copy of it, since
the rest of the block will differ.

A launched step may still fail, so a block is cached only when its tokens have landed: the result of the step has
arrived.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence

from headway.core.kv.blocks import CachedBlock, root_digest
from headway.core.kv.cache_report import BlockContent
from headway.core.kv.device_blocks import DeviceBlocks
from headway.core.kv.moves import PlannedCopies
from headway.core.kv.prefix_cache import PrefixCache
from headway.core.kv.tiered_cache import TieredCache
from headway.core.request import Request


class Holding:
    """The block table of an admitted request, and the state of its blocks."""

    __slots__ = ("num_announced", "num_cached", "num_landed_tokens", "promised", "table")

    def __init__(self) -> None:
        self.table: list[int] = []
        self.promised = 0  # how many blocks it still needs for the tokens that it was admitted with
        self.num_cached = 0  # how many of its first blocks are in the prefix cache
        self.num_announced = 0  # how many of its first blocks it will have in the prefix cache
        self.num_landed_tokens = 0  # how many tokens have landed, while it is in `uncached`


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
        """Create it over these parts. Copies of tails are added to `copies`."""
        self.uncached: dict[Request, int] = {}
        """How many tokens each request was admitted with, until all of these have landed."""
        self._cache = cache
        self._device = device
        self._tiers = tiers
        self._copies = copies
        self._block_size = block_size

    # ---- finding --------------------------------------------------------------------------------------------------

    def find(self, request: Request) -> list[CachedBlock]:
        """Return the cached blocks that a request's tokens begin with."""
        if not request.reads_cache:
            return []
        most = request.num_shareable_blocks(self._block_size)
        return self._cache.find(request.block_digests(self._block_size, most)[:most])

    def num_found_blocks(self, request: Request) -> int:
        """Return how many blocks `find` would return."""
        if not request.reads_cache:
            return 0
        most = request.num_shareable_blocks(self._block_size)
        return self._cache.num_found(request.block_digests(self._block_size, most), most)

    def is_being_computed(self, request: Request) -> bool:
        """Whether a running request is computing the block that follows those that `find` returns."""
        if not request.reads_cache:
            return False
        most, num_found = request.num_shareable_blocks(self._block_size), len(self.find(request))
        if num_found >= most:
            return False
        return self._cache.is_announced(request.block_digests(self._block_size, most)[num_found])

    # ---- entering and leaving -------------------------------------------------------------------------------------

    def enter(self, request: Request, holding: Holding, *, restores: bool) -> int:
        """Begin a table with the cached blocks, and announce the blocks that will be computed. Returns how many tokens
        were found. `restores`: whether blocks in the host tier are copied back."""
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
        """Begin the block after the shared ones with a copy of a cached tail, if there is one. Returns how many of its
        tokens the request shares."""
        if not request.reads_cache:
            return 0
        start = len(holding.table) * self._block_size
        end = min(start + self._block_size, request.num_known_tokens - 1)
        before = self._digest_before(request, len(holding.table))
        block, num_equal = self._cache.find_tail(before, request.known_tokens(start, end))
        if block is None:
            return 0
        self._cache.copy_from(block)
        # The tail itself may be evicted to make room for its copy. Its contents stay until the next step writes.
        new_blocks = self._device.take(1)
        if new_blocks is None:
            return 0
        holding.table += new_blocks
        if new_blocks[0] != block.block_id:
            self._copies.copied.append((block.block_id, new_blocks[0]))
        return num_equal

    def _digest_before(self, request: Request, num_blocks: int) -> bytes:
        """Return the digest of the first `num_blocks` blocks, which the next block follows."""
        if not num_blocks:
            return root_digest(request.options.cache_salt)
        return request.block_digests(self._block_size, num_blocks)[num_blocks - 1]

    def leave(self, request: Request, holding: Holding, *, keep: bool) -> None:
        """Note that a request is about to give up its blocks. With `keep`, the full ones it has computed are cached."""
        if keep:
            self._keep_full(request, holding, self._num_landed_tokens(request, holding))
        self.uncached.pop(request, None)
        self._withdraw(request, holding)

    # ---- caching what has landed ----------------------------------------------------------------------------------

    def land(self, request: Request, holding: Holding, num_tokens: int) -> None:
        """Note that tokens have been computed, as in `KVCacheManager.land`."""
        if num_tokens >= self.uncached.get(request, math.inf):
            del self.uncached[request]
        holding.num_landed_tokens = num_tokens
        self._keep_full(request, holding, num_tokens)
        if num_tokens == request.num_prompt_tokens:
            self._keep_tail(request, holding, num_tokens)

    def complete(self, request: Request, holding: Holding) -> None:
        """Let other requests find all that a running request has computed, because it has its last token."""
        num_tokens = self._num_landed_tokens(request, holding)
        self._keep_full(request, holding, num_tokens)
        self._keep_tail(request, holding, num_tokens)

    def cached_blocks(self, holding: Holding) -> list[CachedBlock]:
        """Return the first blocks of a table, those that are in the prefix cache."""
        return [self._device.nodes[block_id] for block_id in holding.table[: holding.num_cached]]

    def _num_landed_tokens(self, request: Request, holding: Holding) -> int:
        """Return how many tokens have landed, so that no step in flight computes them. Once all tokens that a request
        was admitted with have landed, these are all known tokens but the last."""
        return holding.num_landed_tokens if request in self.uncached else request.num_known_tokens - 1

    def _keep_full(self, request: Request, holding: Holding, num_tokens: int) -> None:
        """Cache the full blocks among the first `num_tokens` tokens, which have landed."""
        num_full, num_before = num_tokens // self._block_size, holding.num_cached
        if num_before >= num_full:
            return
        nodes, cache = self._device.nodes, self._cache
        digests = request.block_digests(self._block_size, num_full)
        above = self._last_cached(holding)
        self._drop_tail(nodes[holding.table[num_before]])  # only the first of these blocks can have been a tail
        for index in range(num_before, num_full):
            block = nodes[holding.table[index]]
            content = self._content(request, digests, index) if cache.wants_contents else None
            if not cache.insert(block, digests[index], above, content):
                # Another request cached an equal block first. The blocks of this request from here on are its own
                # copies. They cannot be children of the other's block, because this request does not hold that block.
                self._withdraw(request, holding)
                break
            above = block
            holding.num_cached += 1
        else:
            if num_before < holding.num_announced:
                cache.withdraw(digests[num_before:num_full], request.request_id)
        if request.options.cache_ttl_s:
            self._pin(request, self.cached_blocks(holding)[num_before:])

    def _content(self, request: Request, digests: Sequence[bytes], index: int) -> BlockContent:
        """Return what a full block of a request holds."""
        start = index * self._block_size
        tokens = array("i", request.known_tokens(start, start + self._block_size))
        if index:
            return BlockContent(digests[index - 1], tokens.tobytes())
        return BlockContent(None, tokens.tobytes(), request.options.cache_salt)

    def _last_cached(self, holding: Holding) -> CachedBlock | None:
        """Return the last cached block of a request, the parent of its next one."""
        return self._device.nodes[holding.table[holding.num_cached - 1]] if holding.num_cached else None

    def _pin(self, request: Request, blocks: Iterable[CachedBlock]) -> None:
        """Pin the full prompt blocks among these for as long as the request asks, whether computed or found."""
        for block in blocks:
            if block.depth < request.num_prompt_tokens // self._block_size:
                self._cache.pin(block, request.options.cache_ttl_s)

    def _keep_tail(self, request: Request, holding: Holding, num_tokens: int) -> None:
        """Cache the last block, which is not full, so that other requests may start from a copy of it. `num_tokens`
        tokens have landed."""
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
        """Take a block out of the cache if it is a tail, since it holds more tokens by now."""
        if block.is_cached and block.tail is not None:
            self._cache.drop_tail(block)

    def _withdraw(self, request: Request, holding: Holding) -> None:
        """Withdraw all announcements of a request, which will not compute these blocks."""
        if holding.num_announced:
            digests = request.block_digests(self._block_size, holding.num_announced)
            self._cache.withdraw(digests[: holding.num_announced], request.request_id)
            holding.num_announced = 0
