"""Which blocks hold which request's keys and values.

A request's block table maps its token positions to blocks; position p lives in block `table[p // block_size]` at offset
`p % block_size`. Only the last block of a table can be partly empty, so at most `block_size - 1` slots per request are
waste:

    table   [ 7 ][ 2 ][ 9 ]          block_size 4, 10 tokens
    slots   ████  ████  ██··

Blocks are taken when tokens are about to be computed, not when a request is admitted. What keeps admission honest is
the promise: an admitted request has been promised the blocks of all tokens it has now (its prompt, chunk by chunk), and
no other request is admitted into them.

    KVCacheManager   tables and promises
    PrefixSharing    blocks that several requests have in common, or had: into the prefix cache, and out of it
    DeviceBlocks     which blocks are free, in use, or kept although no request uses them
    TieredCache      blocks that are elsewhere
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from headway.core.kv.blocks import BlockPool, CachedBlock
from headway.core.kv.device_blocks import DeviceBlocks
from headway.core.kv.host_tier import HostTier
from headway.core.kv.moves import NO_MOVES, BlockMoves, PlannedCopies
from headway.core.kv.prefix_cache import PrefixCache
from headway.core.kv.sharing import Holding, PrefixSharing
from headway.core.kv.tiered_cache import TieredCache
from headway.core.request import Request


class KVCacheManager:
    """Hands out blocks to requests. The only way to say "does not fit" is `None`."""

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
        """`host_tier` takes what the prefix cache gives up; `restore_block_s`: how long it takes to copy a block back
        from there. `reserve_tokens`: every request is promised room for at least this many tokens when it is admitted,
        used or not."""
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
        """With a prefix cache: how many tokens requests were admitted with, until all of them have landed."""
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
        """Size of the cache in blocks."""
        return self.device.pool.num_blocks

    @property
    def capacity_tokens(self) -> int:
        """Size of the cache in tokens."""
        return self.num_blocks * self.block_size

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be handed out: free ones, and idle ones that would be evicted."""
        return self.device.num_available

    @property
    def num_used_blocks(self) -> int:
        """Blocks that at least one request holds."""
        return self.device.num_used

    @property
    def num_table_entries(self) -> int:
        """Lengths of all block tables together: more than the used blocks, where blocks are shared."""
        return self._num_table_entries

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks that are used, or promised and so kept from others."""
        return self.device.num_used + self._num_promised_blocks

    @property
    def num_promised_blocks(self) -> int:
        """Blocks that admitted requests are going to need for tokens they already have."""
        return self._num_promised_blocks

    @property
    def holdings(self) -> Mapping[str, Holding]:
        """What each admitted request has, by its id."""
        return self._holdings

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def block_table(self, request_id: str) -> tuple[int, ...]:
        """The blocks of a request, in token order; empty if it has none."""
        holding = self._holdings.get(request_id)
        return () if holding is None else tuple(holding.table)

    def advance(self, now_s: float) -> None:
        """Set the time, which pinned blocks go by."""
        if self.prefix_cache is not None:
            self.prefix_cache.advance(now_s)

    # ---- admission ------------------------------------------------------------------------------------------------

    def can_ever_fit(self, request: Request) -> bool:
        """Whether the request, alone in the cache, could run to its very end."""
        return self.blocks_for(max(request.max_kv_tokens, self.reserve_tokens)) <= self.num_blocks

    def can_admit(self, request: Request, *, num_spare_blocks: int, leaving: Sequence[Request] = ()) -> bool:
        """Whether all tokens the request has now fit beside what is promised, leaving `num_spare_blocks`; or would fit,
        if those that are `leaving` had left."""
        found = [] if self._sharing is None else self._sharing.find(request)
        if self.reserve_tokens:
            num_spare_blocks = 0  # no request ever needs more than was promised
        num_own = self._blocks_to_promise(request) - len(found)
        num_needed = num_own + self._num_promised_blocks + num_spare_blocks
        if leaving:
            num_needed -= self._num_left_behind(leaving, found)
        return num_needed <= self.device.num_available - sum(block.is_idle for block in found)

    def _num_left_behind(self, leaving: Sequence[Request], found: Sequence[CachedBlock]) -> int:
        """How many blocks only these requests use, or are promised. Without the `found` ones: the request that found
        them needs no others in their place."""
        holdings = [self._holdings[request.request_id] for request in leaving]
        num_users = Counter(block_id for holding in holdings for block_id in holding.table)
        for block in found:
            num_users.pop(block.block_id, None)
        num_freed = sum(self.device.pool.ref_count(block_id) == count for block_id, count in num_users.items())
        return num_freed + sum(holding.promised for holding in holdings)

    def _blocks_to_promise(self, request: Request) -> int:
        return self.blocks_for(max(request.num_tokens, self.reserve_tokens))

    def num_cached_tokens(self, request: Request) -> int:
        """How many tokens of a waiting request are in full blocks of the prefix cache."""
        return 0 if self._sharing is None else self.block_size * self._sharing.num_found_blocks(request)

    def num_own_tokens(self, request: Request) -> int:
        """How many computed tokens of a running request are in blocks that no other request uses."""
        table = self._holdings[request.request_id].table
        num_shared = sum(self.device.pool.ref_count(block_id) > 1 for block_id in table)
        return request.num_computed_tokens - num_shared * self.block_size

    def should_wait(self, request: Request) -> bool:
        """Whether a running request is just computing the next block that this one needs."""
        return self._sharing is not None and self._sharing.is_being_computed(request)

    def admit(
        self, request: Request, *, restore_mode: str = "auto", token_s: float | None = None
    ) -> tuple[tuple[int, ...], int]:
        """Open a block table and promise the blocks of the present tokens. Returns the beginning of the table, from
        the prefix cache, and how many tokens are computed there already. There must be room: see `can_admit`.

        `restore_mode`: whether blocks in the host tier are copied back ("swap") or their tokens computed again
        ("recompute"); "auto" is what takes less time. `token_s`: what computing a prompt token takes; while that is not
        known, copying is taken to be faster."""
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
        """Make room for the next `num_tokens` tokens. Returns the blocks added to the table (maybe none), or `None`."""
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
        """How many more tokens of the request could be computed with the blocks that are available right now."""
        num_blocks = len(self._holdings[request.request_id].table) + self.device.num_available
        return num_blocks * self.block_size - request.num_computed_tokens

    def num_free_slots(self, request: Request) -> int:
        """How many more tokens fit into the blocks that it has."""
        return len(self._holdings[request.request_id].table) * self.block_size - request.num_computed_tokens

    def land(self, request: Request, num_tokens: int) -> None:
        """Note that a running request's first `num_tokens` tokens have been computed: other requests may find its full
        blocks from now on, and the rest of a complete prompt.

        That is for the tokens it was admitted with. What it generates is cached when it leaves: hardly any request
        begins with an answer before its end, and all blocks at once cost less than one at a time."""
        if self._sharing is not None:
            self._sharing.land(request, self._holdings[request.request_id], num_tokens)

    def complete(self, request: Request) -> None:
        """Let other requests find all that a running request has computed: it has its last token."""
        if self._sharing is not None:
            self._sharing.complete(request, self._holdings[request.request_id])

    def free(self, request: Request, *, keep: bool = True) -> None:
        """Take back all blocks of a request, last one first. Cached ones stay for other requests, and those it has
        computed are cached now; `keep=False`: none are, because what is in them cannot be trusted."""
        holding = self._holdings.pop(request.request_id)
        if self._sharing is not None:
            self._sharing.leave(request, holding, keep=keep)
        self._num_promised_blocks -= holding.promised
        self._num_table_entries -= len(holding.table)
        for block_id in reversed(holding.table):
            self.device.drop(block_id, keep=keep)

    # ---- copies ---------------------------------------------------------------------------------------------------

    def prefetch(self) -> BlockMoves:
        """Have blocks that have come to the host copied to the device, as far as there is room, before the requests
        that wait for them can be admitted. The moves have to be made at once."""
        if self.tiers is None or any(self._copies):  # what is planned for the next step stays in it
            return NO_MOVES
        num_free = self.device.num_available - self.tiers.num_prefetched - self._num_promised_blocks
        self.tiers.prefetch(self.device.take, most=num_free)
        return self.take_moves() if any(self._copies) else NO_MOVES

    def take_moves(self) -> BlockMoves:
        """All copies planned since the last call, to be made before the next step computes anything, and transfers."""
        moves = NO_MOVES
        if any(self._copies):
            moved_out, copied, moved_in = self._copies
            moves = BlockMoves(tuple(moved_out), tuple(copied), tuple(moved_in))
            for planned in self._copies:
                planned.clear()
        return moves if self.tiers is None else self.tiers.add_transfers(moves)

    def take_transfers(self) -> BlockMoves:
        """Those only: there is no step to make copies for."""
        return NO_MOVES if self.tiers is None else self.tiers.add_transfers(NO_MOVES)
