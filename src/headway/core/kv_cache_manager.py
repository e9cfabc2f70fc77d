"""Which blocks hold which request's keys and values.

A request's block table maps its token positions to blocks; position p lives in block `table[p // block_size]` at offset
`p % block_size`. Only the last block of a table can be partly empty, so at most `block_size - 1` slots per request are
waste:

    table   [ 7 ][ 2 ][ 9 ]          block_size 4, 10 tokens
    slots   ████  ████  ██··

Blocks are taken when tokens are about to be computed, not when a request is admitted. What keeps admission honest is
the promise: an admitted request has been promised the blocks of all tokens it has now (its prompt, chunk by chunk), and
no other request is admitted into them.
"""

from __future__ import annotations

from headway.core.block_pool import BlockPool
from headway.core.request import Request


class KVCacheManager:
    """Hands out blocks to requests. The only way to say "does not fit" is `None`."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size}")
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._tables: dict[str, list[int]] = {}
        self._promised: dict[str, int] = {}  # blocks each admitted request still needs for the tokens it came with
        self._num_promised_blocks = 0

    @property
    def num_blocks(self) -> int:
        """Size of the cache in blocks."""
        return self.pool.num_blocks

    @property
    def capacity_tokens(self) -> int:
        """Size of the cache in tokens."""
        return self.pool.num_blocks * self.block_size

    @property
    def num_promised_blocks(self) -> int:
        """Free blocks that admitted requests are going to need for tokens they already have."""
        return self._num_promised_blocks

    def num_promised_to(self, request_id: str) -> int:
        """Blocks one request has been promised and not yet taken."""
        return self._promised.get(request_id, 0)

    @property
    def requests_with_blocks(self) -> tuple[str, ...]:
        """Ids of all requests that are admitted."""
        return tuple(self._tables)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def block_table(self, request_id: str) -> tuple[int, ...]:
        """The blocks of a request, in token order; empty if it has none."""
        return tuple(self._tables.get(request_id, ()))

    def num_blocks_of(self, request_id: str) -> int:
        """How many blocks a request holds."""
        return len(self._tables.get(request_id, ()))

    def can_ever_fit(self, request: Request) -> bool:
        """Whether the request, alone in the cache, could run to its very end."""
        return self.blocks_for(request.max_kv_tokens) <= self.num_blocks

    def can_admit(self, request: Request, *, num_spare_blocks: int) -> bool:
        """Whether all tokens the request has now fit beside what is promised, leaving `num_spare_blocks` free."""
        num_needed = self.blocks_for(request.num_tokens) + self._num_promised_blocks + num_spare_blocks
        return num_needed <= self.pool.num_free_blocks

    def admit(self, request: Request) -> None:
        """Open a block table for the request and promise it the blocks of its present tokens."""
        if request.request_id in self._tables:
            raise RuntimeError(f"request {request.request_id} is admitted twice")
        self._tables[request.request_id] = []
        self._promised[request.request_id] = self.blocks_for(request.num_tokens)
        self._num_promised_blocks += self._promised[request.request_id]

    def allocate(self, request: Request, num_tokens: int) -> list[int] | None:
        """Make room for the next `num_tokens` tokens. Returns the blocks added to the table (maybe none), or `None`."""
        table = self._tables[request.request_id]
        num_new_blocks = self.blocks_for(request.num_computed_tokens + num_tokens) - len(table)
        if num_new_blocks <= 0:
            return []
        new_blocks = self.pool.allocate(num_new_blocks)
        if new_blocks is None:
            return None
        table.extend(new_blocks)
        if self._promised[request.request_id]:
            self._keep_promise(request.request_id, num_new_blocks)
        return new_blocks

    def num_tokens_that_fit(self, request: Request) -> int:
        """How many more tokens of the request could be computed with the blocks that are free right now."""
        num_blocks = len(self._tables[request.request_id]) + self.pool.num_free_blocks
        return num_blocks * self.block_size - request.num_computed_tokens

    def free(self, request: Request) -> None:
        """Give back all blocks of a request, last one first, and forget what was promised to it."""
        self._num_promised_blocks -= self._promised.pop(request.request_id)
        self.pool.release(reversed(self._tables.pop(request.request_id)))

    def _keep_promise(self, request_id: str, num_blocks: int) -> None:
        kept = min(num_blocks, self._promised[request_id])
        self._promised[request_id] -= kept
        self._num_promised_blocks -= kept
