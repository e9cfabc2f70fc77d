"""Blocks that are elsewhere: what a waiting request should wait for, and what becomes of blocks that leave the device.

    absent ──► fetching ──► on host ──► prefetched ──► cached
                  fetch()      fetch_done()   prefetch()     the request is admitted: restore()

The first four are states of a block in the host tier (`PartState`; absent: it has no slot), the last is the prefix
cache's. A block that the prefix cache evicts goes back to the host, and from there to disk.

A request that waits has what is there of its chain pinned: nothing of it leaves the host before the request is
admitted or gone. While it waits for others, blocks that have come may be prefetched: copied to device blocks that it
alone will find. They count as room, and are given back when other requests need it.
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
"""`DeviceBlocks.take`"""


class FetchKind(enum.Enum):
    """What a waiting request should do about blocks that are elsewhere."""

    NOTHING = "nothing"
    """There are none that would help now."""
    COMPUTE = "compute"
    """There are, and computing them is faster: it need not ask again."""
    BLOCKED = "blocked"
    """Wait until there is room for them on the host."""
    WAIT = "wait"
    """Wait until they have come."""


class FetchDecision(NamedTuple):
    """With the blocks to wait for, in the order of its tokens."""

    kind: FetchKind
    digests: Sequence[bytes] = ()


_NOTHING = FetchDecision(FetchKind.NOTHING)


class TieredCache:
    """The host tier behind a prefix cache, and what is known of places behind that."""

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
        """`copies`: where copies between device and host are planned. `restore_block_s`: how long it takes to copy a
        block back to the device."""
        self.host = host
        self.restore_block_s = restore_block_s
        self._cache = prefix_cache
        self._pool = pool
        self._copies = copies
        self._block_size = block_size
        self._pinned_for: dict[str, Sequence[bytes]] = {}
        self._to_prefetch: dict[bytes, None] = {}  # blocks that have come since the last `prefetch`
        self._prefetched: dict[bytes, int] = {}  # the block of the device that each one has, the latest last

    # ---- requests that wait ---------------------------------------------------------------------------------------

    def fetch(self, request: Request, *, token_s: float | None) -> FetchDecision:
        """Have blocks fetched that continue what is here of a waiting request's tokens: from disk if that is faster
        than to compute them, or from the replica that it names. `token_s`: what computing a prompt token takes; while
        that is not known, fetching is taken to be faster."""
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
        # The first ones last, since without them the others are of no use.
        self._cache.touch(self._cache.find(digests[:num_cached]))
        self.host.touch(reversed([*on_host, *wanted]))
        return self._begin(request, source, on_host, wanted)

    def _is_worth_fetching(self, token_s: float | None) -> bool:
        """Whether a block is read from disk sooner than computed. While blocks are read, those before them are copied
        to the device."""
        block_s = math.inf if token_s is None else self._block_size * token_s
        disk = self.host.disk
        return self.restore_block_s < block_s and disk is not None and disk.is_worth_fetching(block_s)

    def _can_come(self, digest: bytes, source: str) -> bool:
        """Whether a block is here, coming, or where it can be fetched from."""
        if source or self.host.state_of(digest) is not None:
            return True
        return self.host.disk is not None and digest in self.host.disk

    def _num_slots_for(self, wanted: Iterable[bytes]) -> int:
        num_new = sum(self.host.state_of(digest) is None for digest in wanted)
        return min(num_new, self.host.num_slots)

    def _begin(self, request: Request, source: str, on_host: Iterable[bytes], wanted: Iterable[bytes]) -> FetchDecision:
        """Begin fetches in the order of the tokens, as far as there are slots: to make room for the first ones, the
        last ones of its own chain may go."""
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
        """It has what was fetched for it, or does not need it."""
        pinned = self._pinned_for.pop(request.request_id, None)
        if pinned is not None:
            self.host.unpin(pinned)
            self._free_prefetched([digest for digest in pinned if digest not in self.host.pins])

    @property
    def pinned_for(self) -> Mapping[str, Collection[bytes]]:
        """Which blocks are pinned for each request."""
        return self._pinned_for

    # ---- before a request is admitted -----------------------------------------------------------------------------

    @property
    def num_prefetched(self) -> int:
        """Blocks of the device that hold something prefetched; each of them can be given back."""
        return len(self._prefetched)

    @property
    def prefetched(self) -> Mapping[bytes, int]:
        """These blocks of the device, by their digests."""
        return self._prefetched

    def may_prefetch(self, digest: bytes) -> None:
        """A block has come, and a request that waits for it waits for others still."""
        self._to_prefetch[digest] = None

    def prefetch(self, take: Take, *, most: int) -> None:
        """Plan copies to the device of blocks that have come; of `most` blocks at most."""
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
        """Blocks of the device that are needed for something else; the end of a chain goes first."""
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
        """Blocks of the device for the beginning of this chain that is on the host: prefetched ones, and new ones to
        which it is copied. There must be room for them."""
        found = self.host.find(digests)
        blocks = {digest: self._end_prefetch(digest) for digest in found if digest in self._prefetched}
        for block_id in blocks.values():
            self._pool.share(block_id)
        self.host.touch(blocks)
        missing = [digest for digest in found if digest not in blocks]
        slots = [self.host.read(digest) for digest in missing]  # first: to take blocks may need slots
        taken = take(len(missing)) if missing else []
        assert taken is not None, "a request is admitted for whose blocks there is no room"
        self._copies.moved_in.extend(zip(slots, taken, strict=True))
        blocks.update(zip(missing, taken, strict=True))
        return [blocks[digest] for digest in found]

    # ---- blocks that leave the device -----------------------------------------------------------------------------

    def move_out(self, block: CachedBlock) -> bool:
        """Plan to copy a full block to the host that leaves the device. False if it need not, or there is no room."""
        slot = self.host.put(block.digest)
        if slot is None:
            return False
        self._copies.moved_out.append((block.block_id, slot))
        return True

    def landed(self, moves: BlockMoves, *, has_failed: bool) -> None:
        """The step that made these moves has a result, or they were made without one. If that has failed, maybe before
        any was made, what was to be copied out or prefetched is forgotten."""
        if has_failed and self._prefetched:
            lost = {block_id for _, block_id in moves.moved_in}
            self._free_prefetched([digest for digest, block_id in self._prefetched.items() if block_id in lost])
        if moves.moved_out:
            slots = {slot for _, slot in moves.moved_out}
            if has_failed:
                self.host.discard(slots)
            self.host.copied_out(slot for _, slot in moves.moved_out)

    def add_transfers(self, moves: BlockMoves) -> BlockMoves:
        """The copies of a step that has been planned, and with them the transfers that begin now."""
        if moves.moved_in:
            self.host.step_planned()
        fetched, stored = self.host.take_transfers()
        return moves._replace(fetched=fetched, stored=stored) if fetched or stored else moves

    # ---- the disk at the start and at the end ---------------------------------------------------------------------

    def fetch_latest(self, most: int) -> list[bytes]:
        """Have blocks fetched from disk that no request has asked for: those used last, the very last one first, as
        long as more than a quarter of the slots is free. Returns which."""
        host, disk = self.host, self.host.disk
        if disk is None:
            return []
        num_kept = host.num_slots // 4
        missing = [digest for digest in disk.latest(host.num_slots - num_kept) if host.state_of(digest) is None]
        num_wanted = min(most, host.num_free_above(num_kept))
        return [digest for digest in missing[:num_wanted] if host.fetch(digest, "")]

    def note_latest(self, digests: Sequence[bytes]) -> None:
        """`fetch_latest` has had these fetched. That is no use of them: they stay in the order that they were in."""
        self.host.touch(reversed(digests))
        disk = self.host.disk
        for digest in reversed(digests):
            if disk is not None and digest in disk:
                disk.add(digest)

    def store_rest(self) -> None:
        """For the end, while nothing is in flight and no request runs: plan the next moves on the way of all kept
        blocks to disk, those used last first. Plans none, when all that has been begun is done."""
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
        """Digests of full blocks that are kept, on the device and in host memory; used longest ago first."""
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
