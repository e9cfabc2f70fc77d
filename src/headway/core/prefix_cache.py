"""Full blocks that stay after their request, found again by the tokens they hold.

Cached blocks form a tree: below each stand the blocks that came after it in some request.

    [You are a helpful] ─ [assistant.\\nWhat is] ─ [the capital of Peru]      used by a request
                                            └─── [the weather like in]      idle: nobody uses it, it may be given up

Who uses a block uses all blocks above it, so what is idle hangs at the bottom. Given up are leaves only, so no chain is
ever split: a block can always be found from the root. Which leaf goes first is the eviction policy's to say; blocks
that are pinned go when there is nothing else.

The last block of a request, which is not full, may hang in the tree too: it is a tail. Nobody else can write into it,
but who begins with some of its tokens can start from a copy:

    [You are a helpful] ─ [assistant.\nWhat is] ─ [the capital]                two of four tokens

A block that is not in the tree yet may be on its way: a running request is computing it. Others that need it should
wait rather than compute it too.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from headway.core.block_hash import tail_digest
from headway.core.cached_block import CachedBlock
from headway.core.eviction import EvictionPolicy, LeastRecentlyUsed

MAX_TAILS = 32
"""So many tails are kept below one block: who looks for one compares its tokens with all of them."""

_Candidate = tuple[bool, float, int, int, CachedBlock]
"""(pinned, the policy's key, order of arrival, version, block): what is least is given up first"""


@dataclass(slots=True)
class PrefixCacheStats:
    """Counts since the start."""

    num_queried_tokens: int = 0
    """Tokens of admitted requests that were looked up."""
    num_hit_tokens: int = 0
    """Of these, how many did not have to be computed."""
    num_inserted_blocks: int = 0
    num_evicted_blocks: int = 0

    @property
    def hit_rate(self) -> float:
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0


class PrefixCache:
    """The tree. Knows blocks by their digests and never touches the pool: it says which block to give up."""

    def __init__(self, policy: EvictionPolicy | None = None) -> None:
        self.policy = policy or LeastRecentlyUsed()
        self.stats = PrefixCacheStats()
        self.now_s = 0.0  # told from outside; only pins look at it
        self._blocks: dict[bytes, CachedBlock] = {}
        self._tails: dict[bytes, dict[bytes, CachedBlock]] = {}  # by the digest before them, the oldest first
        self._on_their_way: dict[bytes, str] = {}
        self._candidates: list[_Candidate] = []
        self._pins: list[tuple[float, int, int, CachedBlock]] = []  # (until, order of arrival, version, block)
        self._num_idle = 0
        self._num_uses = 0
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[CachedBlock]:
        return iter(self._blocks.values())

    @property
    def num_idle_blocks(self) -> int:
        """Cached blocks that nobody uses; every one of them can be given up."""
        return self._num_idle

    # ---- finding --------------------------------------------------------------------------------------------------

    def find(self, digests: Iterable[bytes]) -> list[CachedBlock]:
        """The longest chain from the root that is cached."""
        chain = []
        for digest in digests:
            block = self._blocks.get(digest)
            if block is None:
                break
            chain.append(block)
        return chain

    def num_found(self, digests: Sequence[bytes], most: int) -> int:
        """How long that chain is, `most` at most. A block is only there if all before it are, so that few of them need
        to be looked up."""
        blocks, low, high = self._blocks, 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if digests[middle - 1] in blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def find_tail(self, before: bytes, tokens: Sequence[int]) -> tuple[CachedBlock | None, int]:
        """The tail behind this digest that begins with most of these tokens, and with how many."""
        best, most = None, 0
        for block in self._tails.get(before, {}).values():
            assert block.tail is not None
            num_equal = _num_equal(block.tail, tokens)
            if num_equal > most:
                best, most = block, num_equal
        return best, most

    def copy_from(self, block: CachedBlock) -> None:
        """A request has found a tail and starts from a copy of it."""
        is_idle = block.is_idle
        if is_idle:
            self.policy.found(block)
        block.num_hits += 1
        if is_idle:
            self._touch(block)

    def use(self, chain: Sequence[CachedBlock]) -> None:
        """A request has found these and uses them from now on."""
        for block in chain:
            if block.is_idle:
                self.policy.found(block)
                block.is_idle = False
                block.version += 1
                self._num_idle -= 1
            block.num_hits += 1

    # ---- what is on its way ---------------------------------------------------------------------------------------

    def announce(self, digests: Iterable[bytes], request_id: str) -> None:
        """A request is going to compute these blocks, as far as nobody else has or is about to."""
        for digest in digests:
            if digest not in self._blocks:
                self._on_their_way.setdefault(digest, request_id)

    def withdraw(self, digests: Iterable[bytes], request_id: str) -> None:
        """The request is not going to compute these blocks any more, or has."""
        for digest in digests:
            if self._on_their_way.get(digest) == request_id:
                del self._on_their_way[digest]

    def is_on_its_way(self, digest: bytes) -> bool:
        """Whether a running request is computing this block."""
        return digest in self._on_their_way

    @property
    def announced(self) -> dict[bytes, str]:
        """What is on its way, and who computes it."""
        return dict(self._on_their_way)

    # ---- coming and going -----------------------------------------------------------------------------------------

    def insert(self, block: CachedBlock, digest: bytes, parent: CachedBlock | None) -> bool:
        """Keep a block that a request has just computed and still uses. False if there is one like it already."""
        if digest in self._blocks:
            return False
        block.enter(digest, parent)
        self._blocks[digest] = block
        self.stats.num_inserted_blocks += 1
        return True

    def insert_tail(
        self, block: CachedBlock, before: bytes, tokens: tuple[int, ...], parent: CachedBlock | None
    ) -> bool:
        """Keep a block that is not full and that a request still uses. False if there is one like it already, or too
        many others that are in use."""
        digest = tail_digest(before, tokens)
        tails = self._tails.setdefault(before, {})
        if digest in tails or (len(tails) >= MAX_TAILS and all(not tail.is_idle for tail in tails.values())):
            return False
        block.enter(digest, parent, tail=tokens, before=before)
        self._blocks[digest] = tails[digest] = block
        self.stats.num_inserted_blocks += 1
        return True

    def surplus_tail(self, before: bytes) -> CachedBlock | None:
        """The oldest idle tail behind this digest, if there are too many."""
        tails = self._tails.get(before, {})
        if len(tails) <= MAX_TAILS:
            return None
        return next((block for block in tails.values() if block.is_idle), None)

    def drop_tail(self, block: CachedBlock) -> None:
        """The request that uses this tail has written more into it, so what was kept of it is no tail any more."""
        assert not block.is_idle
        self._unlink(block)

    def pin(self, block: CachedBlock, seconds: float) -> None:
        """Give a block up only when nothing else is left, for so long from now on."""
        block.pinned_until_s = max(block.pinned_until_s, self.now_s + seconds)

    def let_go(self, block: CachedBlock) -> None:
        """Nobody uses the block any more; blocks below it have been let go before."""
        block.is_idle = True
        self._num_idle += 1
        self._touch(block)

    def evict(self, num_blocks: int) -> list[CachedBlock]:
        """Forget so many blocks, each time the one that is worth least. Returns what they were: fewer, if no more are
        idle."""
        self._unpin_expired()
        evicted: list[CachedBlock] = []
        candidates, above = self._candidates, None
        while len(evicted) < num_blocks and (candidates or above is not None):
            # Mostly the block above the last one is next: it was let go just after it. Then the heap stays as it is.
            least = heapq.heappop(candidates) if above is None else heapq.heappushpop(candidates, above)
            above = None
            _, key, _, version, block = least
            if version == block.version and block.num_children == 0:
                self.policy.evicted(key)
                evicted.append(block)
                parent = self._remove(block)
                above = None if parent is None else self._candidate(parent)
        if above is not None:
            heapq.heappush(candidates, above)
        self.stats.num_evicted_blocks += len(evicted)
        return evicted

    def forget(self, block: CachedBlock) -> bool:
        """Forget an idle leaf that must not be found again. Returns whether it was one."""
        if not block.is_idle or block.num_children:
            return False
        parent = self._remove(block)
        if parent is not None:
            self._offer(parent)
        return True

    def check_candidates(self) -> None:
        """Raise `AssertionError` unless exactly the idle leaves can be given up."""
        found = {id(block) for _, _, _, version, block in self._candidates if version == block.version}
        leaves = {id(block) for block in self if block.is_idle and not block.num_children}
        assert leaves <= found, "an idle leaf cannot be given up"

    def _touch(self, block: CachedBlock) -> None:
        """An idle block was used just now."""
        self._num_uses += 1
        block.last_used = self._num_uses
        block.worth = self.policy.key(block)
        block.version += 1
        if block.num_children == 0:
            self._offer(block)

    def _remove(self, block: CachedBlock) -> CachedBlock | None:
        """Take an idle leaf out of the tree. Returns the block above it, if that is an idle leaf now."""
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
        if block.parent is not None:
            block.parent.num_children -= 1

    def _forget_tail(self, block: CachedBlock) -> None:
        before = block.before
        tails = self._tails[before]
        del tails[block.digest]
        if not tails:
            del self._tails[before]

    def _offer(self, block: CachedBlock) -> None:
        """An idle leaf may be given up from now on."""
        heapq.heappush(self._candidates, self._candidate(block))
        if max(len(self._candidates), len(self._pins)) > 2 * len(self._blocks) + 64:
            self._clean_up()

    def _candidate(self, block: CachedBlock) -> _Candidate:
        """An idle leaf as it stands among the others."""
        self._num_pushed += 1
        is_pinned = block.pinned_until_s > self.now_s
        if is_pinned:
            heapq.heappush(self._pins, (block.pinned_until_s, self._num_pushed, block.version, block))
        return (is_pinned, block.worth, self._num_pushed, block.version, block)

    def _unpin_expired(self) -> None:
        while self._pins and self._pins[0][0] <= self.now_s:
            _, _, version, block = heapq.heappop(self._pins)
            if version == block.version:
                block.version += 1
                self._offer(block)

    def _clean_up(self) -> None:
        """Drop candidates that are none any more, so that the lists stay as short as the tree."""
        self._candidates = [one for one in self._candidates if one[3] == one[4].version and one[4].num_children == 0]
        heapq.heapify(self._candidates)
        self._pins = [one for one in self._pins if one[2] == one[3].version]
        heapq.heapify(self._pins)


def _num_equal(some: Sequence[int], others: Sequence[int]) -> int:
    """How many of the first tokens are the same."""
    for place, (one, other) in enumerate(zip(some, others, strict=False)):
        if one != other:
            return place
    return min(len(some), len(others))
