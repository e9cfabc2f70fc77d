"""A block whose keys and values others may use: a full one as it is, the tail of a request by copying it.

There is one of these for each block of memory, made at the start and filled in whenever that block is put into the
cache. Made anew each time they would be most of what the garbage collector has to walk through.
"""

from __future__ import annotations


class CachedBlock:
    """A place in the tree of prefixes: `parent` holds the tokens just before."""

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
        self.last_used = 0  # the number of the last time a request let go of it
        self.worth = 0.0  # the eviction policy's key, from that time
        self.is_cached = False  # it is in the tree; otherwise the rest says what it was last
        self.is_idle = False  # no request uses it
        self.pinned_until_s = 0.0
        self.version = 0  # counts changes, for ever; a candidate of an older version is none any more

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
