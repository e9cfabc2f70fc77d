"""The blocks of KV memory: a pool of equal blocks, and the record of each cached block.

    block ids   0 1 2 3 4 5 6 7
    ref counts  1 0 2 1 0 0 1 0        2 is shared by two requests
    free        1 4 5                  oldest freed first; 7 has no owner but is kept for its contents

Every operation of the pool costs O(1) per block. A cached block is known by its digest:

    digest of block i = blake2b(digest of block i - 1, tokens of block i)        before the first: the root

Two full blocks have the same digest exactly when the same tokens lead up to and through them, so their keys and values
are the same. The digest is cryptographic (256 bits), so no prompt can be constructed that is taken for another one. The
root depends on what else separates caches, such as the salt of a tenant.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 32


class BlockPool:
    """Reference-counted blocks `0 .. num_blocks - 1`."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free_blocks(self) -> int:
        """The number of free blocks, which hold nothing of use."""
        return len(self._free)

    @property
    def num_taken_blocks(self) -> int:
        """The number of blocks that have owners or are kept."""
        return self.num_blocks - len(self._free)

    def ref_count(self, block_id: int) -> int:
        """How many owners a block has."""
        return self._ref_counts[block_id]

    def is_free(self, block_id: int) -> bool:
        """Whether a block is on the free list."""
        return block_id in self._free

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take this many blocks, each with one owner. Returns `None` and takes nothing if there are not enough."""
        if num_blocks > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block_id in taken:
            self._ref_counts[block_id] = 1
        return taken

    def share(self, block_id: int) -> None:
        """Add an owner to a block that is in use, or that was kept when its last owner left."""
        if block_id in self._free:
            raise RuntimeError(f"block {block_id} is free and cannot be shared")
        self._ref_counts[block_id] += 1

    def drop(self, block_id: int) -> bool:
        """Drop one owner of a block. Returns whether it was the last; then call `put_back`, or keep the block."""
        if self._ref_counts[block_id] == 0:
            raise RuntimeError(f"block {block_id} has no owner to drop")
        self._ref_counts[block_id] -= 1
        return self._ref_counts[block_id] == 0

    def put_back(self, block_id: int) -> None:
        """Make a block without owners free."""
        if self._ref_counts[block_id] or block_id in self._free:
            raise RuntimeError(f"block {block_id} is freed twice, or in use")
        self._free[block_id] = None


def root_digest(salt: str | None) -> bytes:
    """Return the digest before the first block of a request with this salt. Any string is allowed, also invalid
    Unicode."""
    return blake2b(
        (salt or "").encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES, person=b"headway-root"
    ).digest()


def tail_digest(before: bytes, tokens: Sequence[int]) -> bytes:
    """Return the digest of a block that is not full. `before` is the digest of the previous block."""
    packed = struct.pack(f"{len(tokens)}i", *tokens)
    return blake2b(before + packed, digest_size=DIGEST_BYTES, person=b"headway-tail").digest()


def block_digests(before: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Return the digests of consecutive full blocks with these tokens; the first block follows the digest `before`."""
    packed = struct.pack(f"{len(tokens)}i", *tokens)
    digests, digest, size = [], before, 4 * block_size
    for start in range(0, len(packed), size):
        # The previous digest always has the same number of bytes, so these cannot be taken for tokens.
        digest = blake2b(digest + packed[start : start + size], digest_size=DIGEST_BYTES).digest()
        digests.append(digest)
    return digests


class CachedBlock:
    """A node in the tree of prefixes: `parent` holds the tokens just before.

    There is one for each block of memory. It is created at the start and filled in whenever that block is put into the
    cache: nodes created anew each time would be most of what the garbage collector has to traverse.
    """

    __slots__ = (
        "before",
        "block_id",
        "depth",
        "digest",
        "is_cached",
        "is_idle",
        "last_used",
        "num_children",
        "num_hits",
        "parent",
        "pinned_until_s",
        "tail",
        "version",
        "worth",
    )

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.digest = b""
        self.parent: CachedBlock | None = None
        self.tail: tuple[int, ...] | None = None  # its tokens, if it is not full
        self.before = b""  # if it is a tail: the digest of the previous block
        self.depth = 0
        self.num_children = 0
        self.num_hits = 0  # how often a request found it here
        self.last_used = 0  # the number of the last time a request released it
        self.worth = 0.0  # the eviction policy's key, computed at that time
        self.is_cached = False  # it is in the tree; otherwise the other fields are those of its last time there
        self.is_idle = False  # no request uses it
        self.pinned_until_s = 0.0
        self.version = 0  # counts changes and is never reset; an eviction candidate of an older version is invalid

    def enter(
        self, digest: bytes, parent: CachedBlock | None, *, tail: tuple[int, ...] | None = None, before: bytes = b""
    ) -> None:
        """Take a place in the tree. The request that has computed the block still uses it."""
        self.digest = digest
        self.parent = parent
        self.tail = tail
        self.before = before
        if parent is None:
            self.depth = 0
        else:
            self.depth = parent.depth + 1
            parent.num_children += 1
        self.num_hits = 0
        self.pinned_until_s = 0.0
        self.is_cached = True

    def __repr__(self) -> str:
        return f"CachedBlock({self.block_id}, depth={self.depth}, children={self.num_children}, idle={self.is_idle})"
