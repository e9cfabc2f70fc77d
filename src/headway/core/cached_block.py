"""A block whose keys and values others may use: a full one as it is, the tail of a request by copying it."""

from __future__ import annotations


class CachedBlock:
    """A place in the tree of prefixes: `parent` holds the tokens just before."""

    __slots__ = (
        "before",
        "block_id",
        "depth",
        "digest",
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

    def __init__(
        self,
        digest: bytes,
        block_id: int,
        parent: CachedBlock | None,
        *,
        tail: tuple[int, ...] | None = None,
        before: bytes = b"",
    ) -> None:
        self.digest = digest
        self.block_id = block_id
        self.parent = parent
        self.tail = tail  # its tokens, if it is not full
        self.before = before  # of a tail: the digest that it comes after
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.num_children = 0
        self.num_hits = 0  # how often a request found it here
        self.last_used = 0  # the number of the last time a request let go of it
        self.worth = 0.0  # the eviction policy's key, from that time
        self.is_idle = False  # no request uses it
        self.pinned_until_s = 0.0
        self.version = 0  # counts changes; a candidate of an older version is none any more

    def __repr__(self) -> str:
        return f"CachedBlock({self.block_id}, depth={self.depth}, children={self.num_children}, idle={self.is_idle})"
