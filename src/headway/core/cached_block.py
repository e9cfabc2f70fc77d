"""A block whose keys and values other requests may use, and the digest it is known by.

    digest of block i = blake2b(digest of block i - 1, tokens of block i)        before the first: the root

Two full blocks have the same digest exactly when the same tokens lead up to and through them, so their keys and values
are the same. The digest is cryptographic (256 bits): no prompt can be made up that is taken for another one. The root
holds what else separates caches, the salt of a tenant for instance.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 32


def root_digest(salt: str | None) -> bytes:
    """The digest before the first block of a request with this salt. Any string is allowed, also invalid Unicode."""
    return blake2b(
        (salt or "").encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES, person=b"headway-root"
    ).digest()


def tail_digest(before: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a block that is not full: it holds `tokens`, `before` is the digest of the block before it."""
    packed = struct.pack(f"{len(tokens)}i", *tokens)
    return blake2b(before + packed, digest_size=DIGEST_BYTES, person=b"headway-tail").digest()


def block_digests(before: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """The digests of full blocks with these tokens, the first of which comes after the digest `before`."""
    packed = struct.pack(f"{len(tokens)}i", *tokens)
    digests, digest, size = [], before, 4 * block_size
    for start in range(0, len(packed), size):
        # Always as many bytes of the digest before, so that they cannot be taken for tokens.
        digest = blake2b(digest + packed[start : start + size], digest_size=DIGEST_BYTES).digest()
        digests.append(digest)
    return digests


class CachedBlock:
    """A node in the tree of prefixes: `parent` holds the tokens just before.

    There is one for each block of memory, made at the start and filled in whenever that block is put into the cache.
    Made anew each time they would be most of what the garbage collector has to walk through.
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
        self.before = b""  # of a tail: the digest that it comes after
        self.depth = 0
        self.num_children = 0
        self.num_hits = 0  # how often a request found it here
        self.last_used = 0  # the number of the last time a request released it
        self.worth = 0.0  # the eviction policy's key, from that time
        self.is_cached = False  # it is in the tree; otherwise the other fields describe its last time there
        self.is_idle = False  # no request uses it
        self.pinned_until_s = 0.0
        self.version = 0  # counts changes, for ever; an eviction candidate of an older version is invalid

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
