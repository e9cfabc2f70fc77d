"""The KV cache manager: it keeps the block table of each request.

A block table maps a request's token positions to blocks. Position p is in block `table[p // block_size]` at offset
`p % block_size`. Only the last block of a table can be partly empty, so at most `block_size - 1` slots per request are
wasted:

    table   [ 7 ][ 2 ][ 9 ]          block_size 4, 10 tokens
    slots   ████  ████  ██··

Blocks are taken when tokens are about to be computed, not when a request is admitted. At admission a request is only
promised the blocks of all its present tokens, which it computes chunk by chunk. Promised blocks do not count as room
for other requests.

    KVCacheManager   block tables and promises
    PrefixSharing    puts blocks of requests into the prefix cache, and finds shared blocks there
    DeviceBlocks     which blocks are free, in use, or idle
    TieredCache      blocks that are not on the device
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headway.core.kv.blocks import BlockPool, CachedBlock
from headway.core.kv.device_blocks import DeviceBlocks
from headway.core.kv.host_tier import HostTier
from headway.core.kv.moves import NO_MOVES, BlockMoves, PlannedCopies
from headway.core.kv.prefix_cache import PrefixCache
from headway.core.kv.sharing import Holding, PrefixSharing
from headway.core.kv.tiered_cache import TieredCache
from headway.core.request import Request


class CacheReset(NamedTuple):
    """What a reset of the cache did."""

    num_forgotten: int
    """Blocks that were forgotten."""
    num_kept: int
    """Blocks that stay cached, because requests use them or wait for them."""


class KVCacheManager:
    """Allocates blocks to requests. `None` is the only result that means "does not fit"."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        prefix_cache: PrefixCache | None = None,
        host_tier: HostTier | None = None,
        restore_block_s: float = 0.0,
        reserve_tokens: int = 0,
    ) -> None:
        """`host_tier` takes the blocks that the prefix cache evicts; `restore_block_s`: how long it takes to copy a
        block back from there. `reserve_tokens`: every request is promised room for at least this many tokens at
        admission, whether it uses them or not."""
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size}")
        self.block_size = block_size
        self.reserve_tokens = reserve_tokens
        self.restore_block_s = restore_block_s
        self.prefix_cache = prefix_cache
        pool, self._copies = BlockPool(num_blocks), PlannedCopies([], [], [])
        self.tiers: TieredCache | None = None
        if prefix_cache is not None and host_tier is not None:
            self.tiers = TieredCache(
                host_tier,
                prefix_cache,
                pool=pool,
                copies=self._copies,
                block_size=block_size,
                restore_block_s=restore_block_s,
            )
        self.device = DeviceBlocks(pool, prefix_cache=prefix_cache, tiers=self.tiers)
        self._sharing: PrefixSharing | None = None
        self.uncached: Mapping[Request, int] = {}
        """With a prefix cache: how many tokens each request was admitted with, until all of these have landed."""
        if prefix_cache is not None:
            self._sharing = PrefixSharing(
                prefix_cache, self.device, tiers=self.tiers, copies=self._copies, block_size=block_size
            )
            self.uncached = self._sharing.uncached
        self._holdings: dict[str, Holding] = {}
        self._num_promised_blocks = 0
        self._num_table_entries = 0

    @property
    def num_blocks(self) -> int:
        """The size of the cache in blocks."""
        return self.device.pool.num_blocks

    @property
    def capacity_tokens(self) -> int:
        """The size of the cache in tokens."""
        return self.num_blocks * self.block_size

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be allocated: free ones, and idle ones, which would be evicted."""
        return self.device.num_available

    @property
    def num_used_blocks(self) -> int:
        """Blocks that at least one request holds."""
        return self.device.num_used

    @property
    def num_table_entries(self) -> int:
        """The sum of the lengths of all block tables: more than the used blocks if blocks are shared."""
        return self._num_table_entries

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks that are used or promised."""
        return self.device.num_used + self._num_promised_blocks

    @property
    def num_promised_blocks(self) -> int:
        """Blocks that admitted requests will need for tokens that they already have."""
        return self._num_promised_blocks

    @property
    def holdings(self) -> Mapping[str, Holding]:
        """The holding of each admitted request, by its id."""
        return self._holdings

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def block_table(self, request_id: str) -> tuple[int, ...]:
        """Return the blocks of a request, in token order; empty if it has none."""
        holding = self._holdings.get(request_id)
        return () if holding is None else tuple(holding.table)

    def advance(self, now_s: float) -> None:
        """Set the current time, at which pins of blocks may expire."""
        if self.prefix_cache is not None:
            self.prefix_cache.advance(now_s)

    # ---- admission ------------------------------------------------------------------------------------------------

    def can_ever_fit(self, request: Request) -> bool:
        """Whether the request could run to its end if it had the whole cache to itself."""
        return self.blocks_for(max(request.max_kv_tokens, self.reserve_tokens)) <= self.num_blocks

    def can_admit(self, request: Request, *, num_spare_blocks: int, leaving: Sequence[Request] = ()) -> bool:
        """Whether all present tokens of the request fit beside the promised blocks, with `num_spare_blocks` left over.
        With `leaving`: whether they would fit after these requests had left."""
        found = [] if self._sharing is None else self._sharing.find(request)
        if self.reserve_tokens:
            num_spare_blocks = 0  # no request ever needs more than it was promised
        num_own = self._blocks_to_promise(request) - len(found)
        num_needed = num_own + self._num_promised_blocks + num_spare_blocks
        if leaving:
            num_needed -= self._num_left_behind(leaving, found)
        return num_needed <= self.device.num_available - sum(block.is_idle for block in found)

    def _num_left_behind(self, leaving: Sequence[Request], found: Sequence[CachedBlock]) -> int:
        """Return how many blocks would become available if these requests left: blocks that only they use, and promised
        ones. The `found` blocks do not count, since the waiting request is going to use them itself."""
        holdings = [self._holdings[request.request_id] for request in leaving]
        num_users = Counter(block_id for holding in holdings for block_id in holding.table)
        for block in found:
            num_users.pop(block.block_id, None)
        num_freed = sum(self.device.pool.ref_count(block_id) == count for block_id, count in num_users.items())
        return num_freed + sum(holding.promised for holding in holdings)

    def _blocks_to_promise(self, request: Request) -> int:
        return self.blocks_for(max(request.num_tokens, self.reserve_tokens))

    def num_cached_tokens(self, request: Request) -> int:
        """Return how many tokens of a waiting request are in full blocks of the prefix cache."""
        return 0 if self._sharing is None else self.block_size * self._sharing.num_found_blocks(request)

    def num_own_tokens(self, request: Request) -> int:
        """Return how many computed tokens of a running request are in blocks that no other request uses."""
        table = self._holdings[request.request_id].table
        num_shared = sum(self.device.pool.ref_count(block_id) > 1 for block_id in table)
        return request.num_computed_tokens - num_shared * self.block_size

    def should_wait(self, request: Request) -> bool:
        """Whether a running request is computing the next block that this one needs, so that waiting saves work."""
        return self._sharing is not None and self._sharing.is_being_computed(request)

    def admit(
        self, request: Request, *, restore_mode: str = "auto", token_s: float | None = None
    ) -> tuple[tuple[int, ...], int]:
        """Create a block table and promise the blocks of the present tokens. Returns the cached blocks that the table
        begins with, and how many tokens in them are computed already. There must be room: see `can_admit`.

        `restore_mode`: whether blocks in the host tier are copied back ("swap") or their tokens computed again
        ("recompute"); "auto" chooses the faster. `token_s`: the time to compute a prompt token; while it is not known,
        copying is assumed to be faster."""
        if request.request_id in self._holdings:
            raise RuntimeError(f"request {request.request_id} is admitted twice")
        holding = self._holdings[request.request_id] = Holding()
        num_computed = 0
        if self._sharing is not None:
            block_s = self.block_size * token_s if token_s is not None else math.inf
            restores = restore_mode == "swap" or (restore_mode == "auto" and self.restore_block_s < block_s)
            num_computed = self._sharing.enter(request, holding, restores=restores)
            self._num_table_entries += len(holding.table)
        holding.promised = self._blocks_to_promise(request) - len(holding.table)
        self._num_promised_blocks += holding.promised
        return tuple(holding.table), num_computed

    # ---- growing and leaving --------------------------------------------------------------------------------------

    def allocate(self, request: Request, num_tokens: int) -> list[int] | None:
        """Make room for the next `num_tokens` tokens. Returns the blocks added to the table, possibly none; `None` if
        there are not enough."""
        holding = self._holdings[request.request_id]
        num_new_blocks = self.blocks_for(request.num_computed_tokens + num_tokens) - len(holding.table)
        if num_new_blocks <= 0:
            return []
        new_blocks = self.device.take(num_new_blocks)
        if new_blocks is None:
            return None
        holding.table.extend(new_blocks)
        self._num_table_entries += num_new_blocks
        if holding.promised:
            kept = min(num_new_blocks, holding.promised)
            holding.promised -= kept
            self._num_promised_blocks -= kept
        return new_blocks

    def num_tokens_that_fit(self, request: Request) -> int:
        """Return how many more tokens of the request could be computed with the blocks that are available now."""
        num_blocks = len(self._holdings[request.request_id].table) + self.device.num_available
        return num_blocks * self.block_size - request.num_computed_tokens

    def num_free_slots(self, request: Request) -> int:
        """Return how many more tokens fit into the blocks that the request has."""
        return len(self._holdings[request.request_id].table) * self.block_size - request.num_computed_tokens

    def land(self, request: Request, num_tokens: int) -> None:
        """Note that a running request's first `num_tokens` tokens have been computed. From now on other requests may
        find its full blocks, and, if its prompt is complete, the prompt's last block.

        This is for the tokens that it was admitted with. Generated tokens are cached when it leaves: hardly any request
        begins with an answer before its end, and caching all blocks at once is cheaper than one at a time."""
        if self._sharing is not None:
            self._sharing.land(request, self._holdings[request.request_id], num_tokens)

    def complete(self, request: Request) -> None:
        """Let other requests find all that a running request has computed, because it has its last token."""
        if self._sharing is not None:
            self._sharing.complete(request, self._holdings[request.request_id])

    def free(self, request: Request, *, keep: bool = True) -> None:
        """Free all blocks of a request, last one first. The full blocks that it has computed are cached for other
        requests. `keep=False`: they are not, because their contents cannot be trusted."""
        holding = self._holdings.pop(request.request_id)
        if self._sharing is not None:
            self._sharing.leave(request, holding, keep=keep)
        self._num_promised_blocks -= holding.promised
        self._num_table_entries -= len(holding.table)
        for block_id in reversed(holding.table):
            self.device.drop(block_id, keep=keep)

    def forget_idle(self) -> CacheReset:
        """Forget all cached blocks, on the device and in host memory, that no request uses or waits for."""
        num_forgotten = self.device.forget_idle()
        num_kept = 0 if self.prefix_cache is None else len(self.prefix_cache)
        if self.tiers is not None:
            num_forgotten += self.tiers.host.forget_idle()
            num_kept += len(self.tiers.host)
        return CacheReset(num_forgotten, num_kept)

    # ---- copies ---------------------------------------------------------------------------------------------------

    def prefetch(self) -> BlockMoves:
        """Plan to copy blocks that have arrived in host memory to the device, as long as there is room, before the
        requests that wait for them can be admitted. Returns the moves, which must be made at once."""
        if self.tiers is None or any(self._copies):  # copies for the next step must not be taken here
            return NO_MOVES
        num_free = self.device.num_available - self.tiers.num_prefetched - self._num_promised_blocks
        self.tiers.prefetch(self.device.take, most=num_free)
        return self.take_moves() if any(self._copies) else NO_MOVES

    def take_moves(self) -> BlockMoves:
        """Return all copies planned since the last call, and the transfers to start. The copies must be made before the
        next step computes anything."""
        moves = NO_MOVES
        if any(self._copies):
            moved_out, copied, moved_in = self._copies
            moves = BlockMoves(tuple(moved_out), tuple(copied), tuple(moved_in))
            for planned in self._copies:
                planned.clear()
        return moves if self.tiers is None else self.tiers.add_transfers(moves)

    def take_transfers(self) -> BlockMoves:
        """Return only the transfers to start, if there is no step to make copies for."""
        return NO_MOVES if self.tiers is None else self.tiers.add_transfers(NO_MOVES)
