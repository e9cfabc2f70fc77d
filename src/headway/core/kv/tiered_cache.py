"""The tiers beyond the device: fetches blocks for waiting requests, and moves evicted blocks to the host and to disk.

    absent ──► fetching ──► on host ──► prefetched ──► cached
                  fetch()      fetch_done()   prefetch()     the request is admitted: restore()

The first four are states of a block in the host tier (`PartState`; absent: it has no slot). The last is the state in
the prefix cache. A block that the prefix cache evicts is copied back to the host, and from there to disk.

For a fetching request, the blocks of its chain that are in host memory are pinned: they stay there until it is admitted
or has ended. While it waits for more, blocks that have arrived may be prefetched: copied to device blocks that are not
in the prefix cache. Such blocks count as available, and are given back when other requests need them.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from headway.core.kv.blocks import BlockPool, CachedBlock
from headway.core.kv.host_tier import HostTier, PartState
from headway.core.kv.moves import BlockMoves, PlannedCopies
from headway.core.kv.prefix_cache import PrefixCache
from headway.core.request import Request

Take = Callable[[int], list[int] | None]
"""The type of `DeviceBlocks.take`."""


class FetchKind(enum.Enum):
    """What a waiting request should do about remote blocks."""

    NOTHING = "nothing"
    """No remote blocks would help now."""
    COMPUTE = "compute"
    """There are remote blocks, but computing them is faster. It need not ask again."""
    BLOCKED = "blocked"
    """Wait until there is room for the blocks on the host."""
    WAIT = "wait"
    """Wait until the blocks have arrived."""


class FetchDecision(NamedTuple):
    """What a request should do, with the blocks to wait for, in the order of its tokens."""

    kind: FetchKind
    digests: Sequence[bytes] = ()


_NOTHING = FetchDecision(FetchKind.NOTHING)


class TieredCache:
    """The host tier below a prefix cache, and the blocks on disk and at other replicas that it can fetch."""

    def __init__(
        self,
        host: HostTier,
        prefix_cache: PrefixCache,
        *,
        pool: BlockPool,
        copies: PlannedCopies,
        block_size: int,
        restore_block_s: float,
    ) -> None:
        """Create it over these parts. Copies between device and host are added to `copies`. `restore_block_s`: how long
        it takes to copy a block back to the device."""
        self.host = host
        self.restore_block_s = restore_block_s
        self._cache = prefix_cache
        self._pool = pool
        self._copies = copies
        self._block_size = block_size
        self._pinned_for: dict[str, Sequence[bytes]] = {}
        self._to_prefetch: dict[bytes, None] = {}  # blocks that have arrived since the last `prefetch`
        self._prefetched: dict[bytes, int] = {}  # the device block of each prefetched block, latest last

    # ---- requests that wait ---------------------------------------------------------------------------------------

    def fetch(self, request: Request, *, token_s: float | None) -> FetchDecision:
        """Fetch the blocks that follow the local ones of a waiting request's chain: from the replica that the request
        names, or else from disk if that is faster than computing them. Returns what the request should do. `token_s`:
        the time to compute a prompt token; while it is not known, fetching is assumed to be faster."""
        source, disk = request.options.blocks_at, self.host.disk
        if not request.reads_cache or not (source or disk):
            return _NOTHING
        most = request.num_shareable_blocks(self._block_size)
        digests = request.block_digests(self._block_size, most)[:most]
        num_cached = self._cache.num_found(digests, most)
        on_host = self.host.find(digests[num_cached:])
        missing = digests[num_cached + len(on_host) :]
        if not missing:
            return _NOTHING
        if not source:
            if disk is None or missing[0] not in disk:
                return _NOTHING
            if not self._is_worth_fetching(token_s):
                return FetchDecision(FetchKind.COMPUTE)
        wanted = list(itertools.takewhile(lambda digest: self._can_come(digest, source), missing))
        if self.host.pins and self._num_slots_for(wanted) > self.host.num_takeable:
            return FetchDecision(FetchKind.BLOCKED)
        # The first blocks are touched last, since the others are useless without them.
        self._cache.touch(self._cache.find(digests[:num_cached]))
        self.host.touch(reversed([*on_host, *wanted]))
        return self._begin(request, source, on_host, wanted)

    def _is_worth_fetching(self, token_s: float | None) -> bool:
        """Whether a block is read from disk faster than it is computed. Reading overlaps with copying earlier blocks to
        the device, so both must be faster."""
        block_s = math.inf if token_s is None else self._block_size * token_s
        disk = self.host.disk
        return self.restore_block_s < block_s and disk is not None and disk.is_worth_fetching(block_s)

    def _can_come(self, digest: bytes, source: str) -> bool:
        """Whether a block is in host memory, is being fetched, or can be fetched."""
        if source or self.host.state_of(digest) is not None:
            return True
        return self.host.disk is not None and digest in self.host.disk

    def _num_slots_for(self, wanted: Iterable[bytes]) -> int:
        num_new = sum(self.host.state_of(digest) is None for digest in wanted)
        return min(num_new, self.host.num_slots)

    def _begin(self, request: Request, source: str, on_host: Iterable[bytes], wanted: Iterable[bytes]) -> FetchDecision:
        """Start fetches in the order of the tokens, until no more slots can be freed. Later blocks of the same chain
        may be dropped to make room for earlier ones."""
        awaited, pinned = [], dict.fromkeys(on_host)
        for digest in wanted:
            if digest not in self.host:
                is_coming = self.host.state_of(digest) is PartState.FETCHING
                if not is_coming and not self.host.fetch(digest, source, keep=pinned):
                    break
                awaited.append(digest)
            pinned[digest] = None
        if not awaited:
            return _NOTHING
        self._pinned_for[request.request_id] = list(pinned)
        self.host.pin(list(pinned))
        return FetchDecision(FetchKind.WAIT, awaited)

    def release(self, request: Request) -> None:
        """Unpin the blocks of a request, which has been admitted or has ended."""
        pinned = self._pinned_for.pop(request.request_id, None)
        if pinned is not None:
            self.host.unpin(pinned)
            self._free_prefetched([digest for digest in pinned if digest not in self.host.pins])

    @property
    def pinned_for(self) -> Mapping[str, Collection[bytes]]:
        """The blocks that are pinned for each request, by its id."""
        return self._pinned_for

    # ---- before a request is admitted -----------------------------------------------------------------------------

    @property
    def num_prefetched(self) -> int:
        """How many device blocks hold prefetched blocks; each of them can be given back."""
        return len(self._prefetched)

    @property
    def prefetched(self) -> Mapping[bytes, int]:
        """The device blocks that hold prefetched blocks, by digest."""
        return self._prefetched

    def may_prefetch(self, digest: bytes) -> None:
        """Note that a block has arrived for a request that still waits for others."""
        self._to_prefetch[digest] = None

    def prefetch(self, take: Take, *, most: int) -> None:
        """Plan to copy blocks that have arrived to the device, at most `most` of them."""
        wanted = [digest for digest in self._to_prefetch if self._is_wanted(digest)]
        self._to_prefetch.clear()
        blocks = take(min(len(wanted), most)) if wanted and most > 0 else None
        for digest, block_id in zip(wanted, blocks or (), strict=False):
            self._copies.moved_in.append((self.host.read(digest), block_id))
            self.host.mark_prefetched(digest, is_prefetched=True)
            self._prefetched[digest] = block_id
            self._pool.drop(block_id)

    def _is_wanted(self, digest: bytes) -> bool:
        is_on_host = self.host.state_of(digest) is PartState.ON_HOST
        return is_on_host and digest in self.host.pins and not self._cache.has(digest)

    def give_back_prefetched(self, num_blocks: int) -> list[int]:
        """Give back this many device blocks of prefetched ones, the latest first, and return them."""
        latest = list(itertools.islice(reversed(self._prefetched), num_blocks))
        return [self._end_prefetch(digest) for digest in latest]

    def _free_prefetched(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            if digest in self._prefetched:
                self._pool.put_back(self._end_prefetch(digest))

    def _end_prefetch(self, digest: bytes) -> int:
        self.host.mark_prefetched(digest, is_prefetched=False)
        return self._prefetched.pop(digest)

    def restore(self, digests: Sequence[bytes], take: Take) -> list[int]:
        """Return device blocks for the blocks that this chain begins with and that are on the host. Some have been
        prefetched; for the others new blocks are taken and copies planned. There must be room for them."""
        found = self.host.find(digests)
        blocks = {digest: self._end_prefetch(digest) for digest in found if digest in self._prefetched}
        for block_id in blocks.values():
            self._pool.share(block_id)
        self.host.touch(blocks)
        missing = [digest for digest in found if digest not in blocks]
        slots = [self.host.read(digest) for digest in missing]  # before `take`, which may need slots for evicted blocks
        taken = take(len(missing)) if missing else []
        assert taken is not None, "a request is admitted for whose blocks there is no room"
        self._copies.moved_in.extend(zip(slots, taken, strict=True))
        blocks.update(zip(missing, taken, strict=True))
        return [blocks[digest] for digest in found]

    # ---- blocks that leave the device -----------------------------------------------------------------------------

    def move_out(self, block: CachedBlock) -> bool:
        """Plan to copy a full block that leaves the device to the host. Returns False if it is there already, or if
        there is no room."""
        slot = self.host.put(block.digest)
        if slot is None:
            return False
        self._copies.moved_out.append((block.block_id, slot))
        return True

    def landed(self, moves: BlockMoves, *, has_failed: bool) -> None:
        """Note that these moves have been made, with a step or without one. If that has failed, possibly before any of
        them was made, the blocks to be copied out or prefetched are forgotten."""
        if has_failed and self._prefetched:
            lost = {block_id for _, block_id in moves.moved_in}
            self._free_prefetched([digest for digest, block_id in self._prefetched.items() if block_id in lost])
        if moves.moved_out:
            slots = {slot for _, slot in moves.moved_out}
            if has_failed:
                self.host.discard(slots)
            self.host.copied_out(slot for _, slot in moves.moved_out)

    def add_transfers(self, moves: BlockMoves) -> BlockMoves:
        """Return the copies of a planned step together with the transfers that start now."""
        if moves.moved_in:
            self.host.step_planned()
        fetched, stored = self.host.take_transfers()
        return moves._replace(fetched=fetched, stored=stored) if fetched or stored else moves

    # ---- the disk at the start and at the end ---------------------------------------------------------------------

    def fetch_latest(self, most: int) -> list[bytes]:
        """Fetch blocks from disk that no request has asked for, most recently used first, as long as more than a
        quarter of the slots is free. Returns their digests."""
        host, disk = self.host, self.host.disk
        if disk is None:
            return []
        num_kept = host.num_slots // 4
        missing = [digest for digest in disk.latest(host.num_slots - num_kept) if host.state_of(digest) is None]
        num_wanted = min(most, host.num_free_above(num_kept))
        return [digest for digest in missing[:num_wanted] if host.fetch(digest, "")]

    def note_latest(self, digests: Sequence[bytes]) -> None:
        """Restore the order of use of blocks that `fetch_latest` has fetched, since that does not count as a use."""
        self.host.touch(reversed(digests))
        disk = self.host.disk
        for digest in reversed(digests):
            if disk is not None and digest in disk:
                disk.add(digest)

    def store_rest(self) -> None:
        """Plan the next moves that bring all kept blocks to disk at shutdown, most recently used first. Nothing may be
        in flight, and no request may run. Plans none when all has been stored."""
        host, disk = self.host, self.host.disk
        if disk is None:
            return
        host.store_some(host.num_slots)
        kept = [block for block in self._cache if block.is_idle and block.tail is None]
        for block in sorted(kept, key=lambda block: -block.last_used):
            if block.digest not in host and block.digest not in disk and not self.move_out(block):
                break

    @property
    def order_of_use(self) -> list[bytes]:
        """The digests of all kept full blocks, on the device and in host memory, least recently used first."""
        kept = sorted((block for block in self._cache if block.tail is None), key=lambda block: block.last_used)
        on_device = dict.fromkeys(block.digest for block in kept)
        return [*(digest for digest in self.host if digest not in on_device), *on_device]

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless pins and states agree."""
        self.host.check_invariants()
        pinned = Counter(itertools.chain.from_iterable(self._pinned_for.values()))
        assert pinned == self.host.pins, "blocks are pinned for no request, or not pinned"
        for digest in self._prefetched:
            assert self.host.state_of(digest) is PartState.PREFETCHED, "a prefetched block is not on the host"
            assert digest in self.host.pins, "a block is prefetched for no request"
