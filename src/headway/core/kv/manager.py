"""Which blocks hold which request's keys and values.

A request's block table maps its token positions to blocks; position p lives in block `table[p // block_size]` at offset
`p % block_size`. Only the last block of a table can be partly empty, so at most `block_size - 1` slots per request are
waste:

    table   [ 7 ][ 2 ][ 9 ]          block_size 4, 10 tokens
    slots   ████  ████  ██··

Blocks are taken when tokens are about to be computed, not when a request is admitted. What keeps admission honest is
the promise: an admitted request has been promised the blocks of all tokens it has now (its prompt, chunk by chunk), and
no other request is admitted into them.

With a prefix cache, full blocks are kept when their last owner leaves, and a request that begins with the same tokens
starts with them in its table:

    free ──► in use ──► kept (idle) ──► in use again
      ▲         │            │
      └─────────┴────────────┘          not full, or evicted because another request needs room

Kept blocks count as room, since they can be evicted at any time. A last block that is not full is kept too; a request
that begins with the same tokens gets a copy of it, since the rest of it is going to differ. Blocks that are fetched for
a request from further away may be brought ahead: copied in while it waits for the others, and found by nobody else.

A step that has been launched may still fail, so a block is cached only when the result of its step has come: its tokens
have landed.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from headway.core.kv.blocks import BlockPool, CachedBlock, root_digest
from headway.core.kv.host_tier import HostTier
from headway.core.kv.moves import NO_MOVES, BlockMoves
from headway.core.kv.prefix_cache import PrefixCache
from headway.core.request import Request


class _Holding:
    """What an admitted request has."""

    __slots__ = ("announced", "num_cached", "num_landed_tokens", "promised", "table")

    def __init__(self) -> None:
        self.table: list[int] = []
        self.promised = 0  # blocks it still needs for the tokens it came with
        self.num_cached = 0  # how many of its first blocks are in the cache
        self.announced = 0  # how many of its first blocks it is going to put there
        self.num_landed_tokens = 0  # what steps have computed for sure, while it is in `unlanded`


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
        """`restore_block_s`: how long it takes to copy a block back from the host tier. `reserve_tokens`: every request
        is promised room for at least this many tokens when it is admitted, used or not."""
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size}")
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.reserve_tokens = reserve_tokens
        self.prefix_cache = prefix_cache
        self.host_tier = host_tier
        self.restore_block_s = restore_block_s
        self.unlanded: dict[Request, int] = {}
        """With a prefix cache: how many tokens requests were admitted with, until all of them have landed."""
        self._holdings: dict[str, _Holding] = {}
        self._fetched_for: dict[str, list[bytes]] = {}
        self._arrived: dict[bytes, None] = {}  # of these, what may be brought ahead
        self._ahead: dict[bytes, int] = {}  # blocks that were, by digest
        num_places = 0 if prefix_cache is None else num_blocks
        self._blocks = [CachedBlock(block_id) for block_id in range(num_places)]  # by their ids, cached or not
        self._moved_out: list[tuple[int, int]] = []  # these three as in `BlockMoves`, for the next step
        self._copied: list[tuple[int, int]] = []
        self._moved_in: list[tuple[int, int]] = []
        self._num_promised_blocks = 0
        self._num_table_entries = 0

    @property
    def num_blocks(self) -> int:
        """Size of the cache in blocks."""
        return self.pool.num_blocks

    @property
    def capacity_tokens(self) -> int:
        """Size of the cache in tokens."""
        return self.pool.num_blocks * self.block_size

    @property
    def num_idle_blocks(self) -> int:
        """Blocks that no request uses and that are kept for what they hold."""
        return 0 if self.prefix_cache is None else self.prefix_cache.num_idle_blocks + len(self._ahead)

    @property
    def ahead(self) -> Mapping[bytes, int]:
        """Idle blocks that have been copied in for requests that wait for others still, by digest."""
        return self._ahead

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be handed out: free ones, and kept ones that would be evicted."""
        return self.pool.num_free_blocks + self.num_idle_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks that at least one request holds."""
        return self.pool.num_taken_blocks - self.num_idle_blocks

    @property
    def num_table_entries(self) -> int:
        """Lengths of all block tables together: more than the used blocks, where blocks are shared."""
        return self._num_table_entries

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks that are used, or promised and so kept from others."""
        return self.num_used_blocks + self._num_promised_blocks

    @property
    def num_promised_blocks(self) -> int:
        """Blocks that admitted requests are going to need for tokens they already have."""
        return self._num_promised_blocks

    def num_promised_to(self, request_id: str) -> int:
        """Blocks one request has been promised and not yet taken."""
        holding = self._holdings.get(request_id)
        return 0 if holding is None else holding.promised

    @property
    def requests_with_blocks(self) -> tuple[str, ...]:
        """Ids of all requests that are admitted."""
        return tuple(self._holdings)

    @property
    def kept_blocks(self) -> dict[int, CachedBlock]:
        """All cached blocks by their id, whether a request uses them or not."""
        return {block.block_id: block for block in self._blocks if block.is_cached}

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def block_table(self, request_id: str) -> tuple[int, ...]:
        """The blocks of a request, in token order; empty if it has none."""
        holding = self._holdings.get(request_id)
        return () if holding is None else tuple(holding.table)

    def cached_blocks(self, request_id: str) -> tuple[CachedBlock, ...]:
        """The first blocks of a request's table, as far as they are in the prefix cache."""
        holding = self._holdings.get(request_id)
        return () if holding is None else tuple(self._blocks[i] for i in holding.table[: holding.num_cached])

    def num_announced_blocks(self, request_id: str) -> int:
        """How many of its first blocks a request has announced for the prefix cache."""
        return self._holdings[request_id].announced

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
        found = self._find(request)
        if self.reserve_tokens:
            num_spare_blocks = 0  # no request ever needs more than was promised
        num_own = self._blocks_to_promise(request) - len(found)
        num_needed = num_own + self._num_promised_blocks + num_spare_blocks
        if leaving:
            num_needed -= self._num_left_behind(leaving, found)
        return num_needed <= self.num_available_blocks - sum(block.is_idle for block in found)

    def _num_left_behind(self, leaving: Sequence[Request], found: Sequence[CachedBlock]) -> int:
        """How many blocks only these requests use, or are promised. Without the `found` ones: the request that found
        them needs no others in their place."""
        holdings = [self._holdings[request.request_id] for request in leaving]
        num_users = Counter(block_id for holding in holdings for block_id in holding.table)
        for block in found:
            num_users.pop(block.block_id, None)
        num_freed = sum(self.pool.ref_count(block_id) == count for block_id, count in num_users.items())
        return num_freed + sum(holding.promised for holding in holdings)

    def _blocks_to_promise(self, request: Request) -> int:
        return self.blocks_for(max(request.num_tokens, self.reserve_tokens))

    def num_cached_tokens(self, request: Request) -> int:
        """How many tokens of a waiting request are in full blocks of the prefix cache."""
        cache = self.prefix_cache
        if cache is None or not request.reads_cache:
            return 0
        most = self._most_shared(request)
        return self.block_size * cache.num_found(request.block_digests(self.block_size, most), most)

    def num_own_tokens(self, request: Request) -> int:
        """How many computed tokens of a running request are in blocks that no other request uses."""
        table = self._holdings[request.request_id].table
        num_shared = sum(self.pool.ref_count(block_id) > 1 for block_id in table)
        return request.num_computed_tokens - num_shared * self.block_size

    def should_wait(self, request: Request) -> bool:
        """Whether a running request is just computing the next block that this one needs."""
        if self.prefix_cache is None or not request.reads_cache:
            return False
        num_found, most = len(self._find(request)), self._most_shared(request)
        if num_found >= most:
            return False
        return self.prefix_cache.is_announced(request.block_digests(self.block_size, most)[num_found])

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
        holding = self._holdings[request.request_id] = _Holding()
        num_computed = 0
        if self.prefix_cache is not None:
            self.unlanded[request] = request.num_tokens
            block_s = self.block_size * token_s if token_s is not None else math.inf
            restores = restore_mode == "swap" or (restore_mode == "auto" and self.restore_block_s < block_s)
            num_computed = self._share(request, holding, self.prefix_cache, restores=restores)
            self.release_fetched(request)
        holding.promised = self._blocks_to_promise(request) - len(holding.table)
        self._num_promised_blocks += holding.promised
        return tuple(holding.table), num_computed

    def fetch(self, request: Request, *, token_s: float | None) -> list[bytes] | None:
        """Have blocks fetched that continue what is here of a waiting request's tokens: from disk if that is faster
        than to compute them, or from the replica that it names. Returns those to wait for; `None` while others hold the
        room that they need. Until it is admitted, or `release_fetched`, it holds what is there of its chain. `token_s`
        as in `admit`."""
        tier, source = self.host_tier, request.options.blocks_at
        if tier is None or self.prefix_cache is None or not request.reads_cache:
            return []
        if not source and not tier.far:
            return []
        most = self._most_shared(request)
        digests = request.block_digests(self.block_size, most)[:most]
        num_found = self.prefix_cache.num_found(digests, most)
        in_tier = tier.find(digests[num_found:])
        num_found += len(in_tier)
        is_whole = num_found == most
        if is_whole or (not source and not self._is_worth_fetching(request, digests[num_found], tier, token_s)):
            return []
        wanted = list(itertools.takewhile(lambda digest: self._can_come(digest, source, tier), digests[num_found:]))
        num_new = sum(digest not in tier and not tier.is_fetching(digest) for digest in wanted)
        if tier.held and min(num_new, tier.num_slots) > tier.num_takeable:
            return None
        # The first ones last, since without them the others are of no use.
        self.prefix_cache.touch(self.prefix_cache.find(digests[: num_found - len(in_tier)]))
        tier.touch(reversed([*in_tier, *wanted]))
        awaited, held = [], dict.fromkeys(in_tier)
        for digest in wanted:  # to make room for the first ones, the last ones may go
            if digest not in tier:
                if not tier.is_fetching(digest) and not tier.fetch(digest, source, keep=held):
                    break
                awaited.append(digest)
            held[digest] = None
        if awaited:
            self._fetched_for[request.request_id] = [*held]
            tier.hold([*held])
        return awaited

    @staticmethod
    def _can_come(digest: bytes, source: str, tier: HostTier) -> bool:
        """Whether a block is here, coming, or where it can be fetched from."""
        is_there = bool(source) or (tier.far is not None and digest in tier.far)
        return is_there or digest in tier or tier.is_fetching(digest)

    def release_fetched(self, request: Request) -> None:
        """It has what was fetched for it, or does not need it."""
        held = self._fetched_for.pop(request.request_id, None)
        if held is not None and self.host_tier is not None:
            self.host_tier.release(held)
            self._drop_ahead(digest for digest in held if digest not in self.host_tier.held)

    @property
    def fetched_for(self) -> Mapping[str, Sequence[bytes]]:
        """What is held in the host tier, by request."""
        return self._fetched_for

    def _is_worth_fetching(self, request: Request, digest: bytes, tier: HostTier, token_s: float | None) -> bool:
        """Whether the next block is on disk and there sooner than computed: decided once for each request. While blocks
        are read those before them are copied in."""
        if tier.far is None or digest not in tier.far:
            return False
        block_s = self.block_size * token_s if token_s is not None else math.inf
        request.has_fetched = self.restore_block_s >= block_s or not tier.is_worth_fetching("", block_s)
        return not request.has_fetched

    def note_arrived(self, digest: bytes) -> None:
        """A block is in the host tier, and who waits for it waits for others still."""
        self._arrived[digest] = None

    def bring_ahead(self) -> BlockMoves:
        """Have blocks that have arrived copied in, as far as there is room, before the requests that wait for them can
        be admitted. The moves have to be made at once."""
        tier, cache = self.host_tier, self.prefix_cache
        if not self._arrived or tier is None or cache is None:
            return NO_MOVES
        if self._moved_out or self._copied or self._moved_in:
            return NO_MOVES  # what is planned for the next step stays in it
        arrived, self._arrived = self._arrived, {}
        wanted = [digest for digest in arrived if digest in tier.held and digest in tier]
        wanted = [digest for digest in wanted if digest not in self._ahead and not cache.has(digest)]
        num_blocks = min(len(wanted), self.num_available_blocks - len(self._ahead) - self._num_promised_blocks)
        blocks = self._take(num_blocks) if num_blocks > 0 else None
        if not blocks:
            return NO_MOVES
        for digest, block_id in zip(wanted, blocks, strict=False):
            self._moved_in.append((tier.read(digest), block_id))
            self.pool.drop(block_id)
            self._ahead[digest] = block_id
        return self.take_moves()

    def _drop_ahead(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            block_id = self._ahead.pop(digest, None)
            if block_id is not None:
                self.pool.put_back(block_id)

    def fetch_done(self, digest: bytes, ok: bool, *, seconds: float = 0.0) -> None:
        """A fetch has ended, after so long: the block is in the host tier, or not."""
        if self.host_tier is not None:
            self.host_tier.fetch_done(digest, ok, seconds=seconds)

    def touch(self, digests: Iterable[bytes]) -> None:
        """Count blocks of the host tier as used just now, the last of them last."""
        if self.host_tier is not None:
            self.host_tier.touch(digests)

    def store_done(self, digest: bytes, ok: bool) -> None:
        """A block of the host tier has been stored, or not."""
        if self.host_tier is not None:
            self.host_tier.store_done(digest, ok)

    def _share(self, request: Request, holding: _Holding, cache: PrefixCache, *, restores: bool) -> int:
        """Take what is cached, and announce what is going to be. Returns how many tokens were found."""
        found = self._find(request)
        for block in found:
            self.pool.share(block.block_id)
        cache.use(found)
        if request.options.cache_ttl_s:
            self._pin(request, found, cache)
        holding.num_cached = len(found)
        holding.table = [block.block_id for block in found]
        digests = request.block_digests(self.block_size, request.num_known_tokens // self.block_size)
        if restores and request.reads_cache:
            self._restore(holding, digests[len(found) : self._most_shared(request)])
        num_found = len(holding.table) * self.block_size + self._copy_tail(request, holding, cache)
        self._num_table_entries += len(holding.table)
        if request.reads_cache:
            cache.stats.num_queried_tokens += request.num_tokens
            cache.stats.num_hit_tokens += num_found
        holding.announced = len(digests)
        cache.announce(digests[num_found // self.block_size :], request.request_id)
        return num_found

    def _restore(self, holding: _Holding, digests: list[bytes]) -> None:
        """Continue the table with blocks from the host tier."""
        tier = self.host_tier
        found = [] if tier is None else tier.find(digests)
        if tier is None or not found:
            return
        there = {digest: self._ahead.pop(digest) for digest in found if digest in self._ahead}
        for block_id in there.values():
            self.pool.share(block_id)
        tier.touch(there)
        missing = [digest for digest in found if digest not in there]
        slots = [tier.read(digest) for digest in missing]
        blocks = self._take(len(missing))
        assert blocks is not None, "a request is admitted for whose blocks there is no room"
        self._moved_in += zip(slots, blocks, strict=True)
        there.update(zip(missing, blocks, strict=True))
        holding.table += [there[digest] for digest in found]

    def _copy_tail(self, request: Request, holding: _Holding, cache: PrefixCache) -> int:
        """Begin the block after the shared ones with a copy of a cached tail. Returns how many tokens of it are this
        request's too."""
        if not request.reads_cache:
            return 0
        start = len(holding.table) * self.block_size
        end = min(start + self.block_size, request.num_known_tokens - 1)
        before = self._digest_before(request, len(holding.table))
        block, num_equal = cache.find_tail(before, request.known_tokens(start, end))
        if block is None:
            return 0
        cache.copy_from(block)
        # The tail itself may be evicted for the copy's block: what is in it stays until the next step writes.
        new_blocks = self._take(1)
        if new_blocks is None:
            return 0
        holding.table += new_blocks
        if new_blocks[0] != block.block_id:
            self._copied.append((block.block_id, new_blocks[0]))
        return num_equal

    def _digest_before(self, request: Request, num_blocks: int) -> bytes:
        """The digest that the block after the first `num_blocks` ones comes after."""
        if not num_blocks:
            return root_digest(request.options.cache_salt)
        return request.block_digests(self.block_size, num_blocks)[num_blocks - 1]

    def _find(self, request: Request) -> list[CachedBlock]:
        if self.prefix_cache is None or not request.reads_cache:
            return []
        most = self._most_shared(request)
        return self.prefix_cache.find(request.block_digests(self.block_size, most)[:most])

    def _most_shared(self, request: Request) -> int:
        """Full blocks that need not be computed: at least one token must be, or nothing could be sampled."""
        return (request.num_known_tokens - 1) // self.block_size

    # ---- growing --------------------------------------------------------------------------------------------------

    def allocate(self, request: Request, num_tokens: int) -> list[int] | None:
        """Make room for the next `num_tokens` tokens. Returns the blocks added to the table (maybe none), or `None`."""
        holding = self._holdings[request.request_id]
        num_new_blocks = self.blocks_for(request.num_computed_tokens + num_tokens) - len(holding.table)
        if num_new_blocks <= 0:
            return []
        new_blocks = self._take(num_new_blocks)
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
        num_blocks = len(self._holdings[request.request_id].table) + self.num_available_blocks
        return num_blocks * self.block_size - request.num_computed_tokens

    def num_free_slots(self, request: Request) -> int:
        """How many more tokens fit into the blocks that it has."""
        return len(self._holdings[request.request_id].table) * self.block_size - request.num_computed_tokens

    # ---- caching what has landed ----------------------------------------------------------------------------------

    def land(self, request: Request, num_tokens: int) -> None:
        """Note that a running request's first `num_tokens` tokens have been computed: other requests may find its full
        blocks from now on, and the rest of a complete prompt.

        That is for the tokens it was admitted with. What it generates is cached when it leaves: hardly any request
        begins with an answer before its end, and all blocks at once cost less than one at a time."""
        if num_tokens >= self.unlanded.get(request, math.inf):
            del self.unlanded[request]
        self._holdings[request.request_id].num_landed_tokens = num_tokens
        self._keep_computed(request, num_tokens)
        if num_tokens == request.num_prompt_tokens:
            self._keep_tail(request, num_tokens)

    def complete(self, request: Request) -> None:
        """Let other requests find all that a running request has computed: it has its last token."""
        num_tokens = self._num_landed_tokens(request)
        self._keep_computed(request, num_tokens)
        self._keep_tail(request, num_tokens)

    def _num_landed_tokens(self, request: Request) -> int:
        """Tokens that are in the cache for sure: no step that computes them is in flight. Once all that a request was
        admitted with has landed, that is every known token but the last."""
        if request in self.unlanded:
            return self._holdings[request.request_id].num_landed_tokens
        return request.num_known_tokens - 1

    def _keep_computed(self, request: Request, num_tokens: int) -> None:
        """Cache the full blocks among the first `num_tokens` tokens, which have landed."""
        holding = self._holdings.get(request.request_id)
        cache = self.prefix_cache
        if cache is None or holding is None:
            return
        num_full, num_before = num_tokens // self.block_size, holding.num_cached
        if num_before >= num_full:
            return
        digests = request.block_digests(self.block_size, num_full)
        above = self._last_cached(holding)
        self._drop_tail(self._blocks[holding.table[num_before]], cache)  # only the first can have been a tail
        for index in range(num_before, num_full):
            block = self._blocks[holding.table[index]]
            if not cache.insert(block, digests[index], above):
                # Another request was first. What this one has from here on is its own copy: it cannot hang below the
                # other's block, which this one does not hold.
                self._withdraw(request, holding)
                break
            above = block
            holding.num_cached += 1
        else:
            if num_before < holding.announced:
                cache.withdraw(digests[num_before:num_full], request.request_id)
        if request.options.cache_ttl_s:
            self._pin(request, self.cached_blocks(request.request_id)[num_before:], cache)

    def _last_cached(self, holding: _Holding) -> CachedBlock | None:
        """The block that the next one of a request hangs below."""
        return self._blocks[holding.table[holding.num_cached - 1]] if holding.num_cached else None

    def _pin(self, request: Request, blocks: Iterable[CachedBlock], cache: PrefixCache) -> None:
        """Keep blocks for as long as the request asks, whether computed or found, as far as they are of its prompt."""
        for block in blocks:
            if block.depth < request.num_prompt_tokens // self.block_size:
                cache.pin(block, request.options.cache_ttl_s)

    def _keep_tail(self, request: Request, num_tokens: int) -> None:
        """Cache the last block, which is not full: other requests may start from a copy. `num_tokens` have landed."""
        holding = self._holdings.get(request.request_id)
        cache = self.prefix_cache
        num_full, num_in_tail = divmod(num_tokens, self.block_size)
        if cache is None or holding is None or not num_in_tail or holding.num_cached != num_full:
            return
        block = self._blocks[holding.table[num_full]]
        self._drop_tail(block, cache)
        before = self._digest_before(request, num_full)
        tokens = request.known_tokens(num_full * self.block_size, num_tokens)
        if not cache.insert_tail(block, before, tokens, self._last_cached(holding)):
            return
        surplus = cache.surplus_tail(before)
        if surplus is not None and cache.forget(surplus):
            self.pool.put_back(surplus.block_id)

    def _drop_tail(self, block: CachedBlock, cache: PrefixCache) -> None:
        """Forget what was cached of a block that is not full, since there is more in it by now."""
        if block.is_cached and block.tail is not None:
            cache.drop_tail(block)

    def _take(self, num_blocks: int) -> list[int] | None:
        """Take blocks, evicting kept ones where free ones do not suffice; `None` if there are not enough."""
        num_free = self.pool.num_free_blocks
        if num_blocks <= num_free:
            return self.pool.allocate(num_blocks)
        if num_blocks > self.num_available_blocks:
            return None
        taken = (self.pool.allocate(num_free) if num_free else None) or []
        return taken + self._take_kept(num_blocks - num_free)

    def _take_kept(self, num_blocks: int) -> list[int]:
        """Evict the kept blocks that are worth least; full ones may go to the host tier. Those brought ahead come last,
        the end of a chain first."""
        assert self.prefix_cache is not None
        taken = []
        for block in self.prefix_cache.evict(num_blocks):
            if self.host_tier is not None and block.tail is None:
                slot = self.host_tier.put(block.digest)
                if slot is not None:
                    self._moved_out.append((block.block_id, slot))
            taken.append(block.block_id)
        taken += [self._ahead.popitem()[1] for _ in range(num_blocks - len(taken))]
        for block_id in taken:
            self.pool.share(block_id)
        return taken

    # ---- copies ---------------------------------------------------------------------------------------------------

    def take_moves(self) -> BlockMoves:
        """All copies planned since the last call, to be made before the next step computes anything, and transfers."""
        fetched, stored = ((), ()) if self.host_tier is None else self.host_tier.take_transfers()
        if not (self._moved_out or self._copied or self._moved_in or fetched or stored):
            return NO_MOVES
        moves = BlockMoves(tuple(self._moved_out), tuple(self._copied), tuple(self._moved_in), fetched, stored)
        for planned in (self._moved_out, self._copied, self._moved_in):
            planned.clear()
        if self.host_tier is not None:
            self.host_tier.step_planned()
        return moves

    def take_transfers(self) -> BlockMoves:
        """Those only: there is no step to make copies for."""
        fetched, stored = ((), ()) if self.host_tier is None else self.host_tier.take_transfers()
        return BlockMoves(fetched=fetched, stored=stored) if fetched or stored else NO_MOVES

    def store_rest(self) -> BlockMoves:
        """For the end, while nothing is in flight and no request runs: the next moves on the way of all kept blocks to
        disk, those used last first. Ends with empty ones, when all that has been begun is done."""
        tier, cache = self.host_tier, self.prefix_cache
        if tier is None or tier.far is None or cache is None:
            return NO_MOVES
        tier.store_some(tier.num_slots)
        kept = [block for block in cache if block.is_idle and block.tail is None]
        for block in sorted(kept, key=lambda block: -block.last_used):
            if block.digest in tier or block.digest in tier.far:
                continue
            slot = tier.put(block.digest)
            if slot is None:
                break
            self._moved_out.append((block.block_id, slot))
        return self.take_moves()

    @property
    def order_of_use(self) -> list[bytes]:
        """Digests of full blocks that are kept, on the device and in host memory; used longest ago first."""
        cache, tier = self.prefix_cache, self.host_tier
        kept = [] if cache is None else [block for block in cache if block.tail is None]
        on_device = dict.fromkeys(block.digest for block in sorted(kept, key=lambda block: block.last_used))
        return [*(digest for digest in tier or () if digest not in on_device), *on_device]

    def landed(self, moves: BlockMoves, *, has_failed: bool) -> None:
        """The step that made these moves has a result, or they were made without one. If that has failed, maybe before
        any was made, what was to be copied out or brought ahead is forgotten."""
        if has_failed and self._ahead:
            lost = {block_id for _, block_id in moves.moved_in}
            self._drop_ahead([digest for digest, block_id in self._ahead.items() if block_id in lost])
        if self.host_tier is not None and moves.moved_out:
            slots = {slot for _, slot in moves.moved_out}
            if has_failed:
                self.host_tier.discard_slots(slots)
            self.host_tier.landed(slot for _, slot in moves.moved_out)

    # ---- leaving --------------------------------------------------------------------------------------------------

    def free(self, request: Request, *, keep: bool = True) -> None:
        """Take back all blocks of a request, last one first. Cached ones stay for other requests, and those it has
        computed are cached now; `keep=False`: none are, because what is in them cannot be trusted."""
        if keep:
            self._keep_computed(request, self._num_landed_tokens(request))
        holding = self._holdings.pop(request.request_id)
        self.unlanded.pop(request, None)
        self._num_promised_blocks -= holding.promised
        self._num_table_entries -= len(holding.table)
        self._withdraw(request, holding)
        for block_id in reversed(holding.table):
            if self.pool.drop(block_id):
                self._release(block_id, keep=keep)

    def _release(self, block_id: int, *, keep: bool) -> None:
        """Keep or free a block that has lost its last owner."""
        cache = self.prefix_cache
        if cache is not None and (block := self._blocks[block_id]).is_cached:
            cache.release(block)
            if keep or not cache.forget(block):
                return
        self.pool.put_back(block_id)

    def _withdraw(self, request: Request, holding: _Holding) -> None:
        if self.prefix_cache is not None and holding.announced:
            digests = request.block_digests(self.block_size, holding.announced)
            self.prefix_cache.withdraw(digests[: holding.announced], request.request_id)
            holding.announced = 0
