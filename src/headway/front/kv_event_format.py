"""The changes of prefix caches as vLLM tells them to gateways.

    [timestamp, [event, …], rank]                              a batch: the changes of one replica's cache
    ["BlockStored", block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name, extra_keys]
    ["BlockRemoved", block_hashes, medium]
    ["AllBlocksCleared"]

A replica is a rank, as with vLLM's data parallelism. Hashes are the digests of Headway's blocks. Gateways do not
compute them: they hash `token_ids` themselves. `extra_keys` has the salt of a chain, at its first block.

Only full blocks in the device's memory are published. A tail, which is not full, is published when it has become a full
block, and it is never the parent of another block.

A gateway may know only one cache per address, and count how often a block was stored there. Therefore, if one of
several replicas loses its cache, each of its blocks is published as removed. `AllBlocksCleared` would clear the blocks
of the other replicas too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from headway.core.kv.cache_report import BlockContent, CacheReport

DEVICE = "GPU"
"""vLLM's name for the memory that the model reads, whatever the device is."""


class BlockStored(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Blocks that follow one another have entered the cache."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    """The hash of the block before the first of them."""
    token_ids: list[int]
    """The tokens of all of them."""
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    """For each block, what its hash depends on besides tokens."""


class BlockRemoved(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Blocks have left the cache."""

    block_hashes: list[bytes]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True, gc=False):
    """The cache is empty."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """The events of one message."""

    ts: float
    """The time of publication, as Unix time."""
    events: list[Event]
    data_parallel_rank: int
    """The place of the replica."""


def stored_events(digests: Sequence[bytes], contents: Sequence[BlockContent], block_size: int) -> Iterator[BlockStored]:
    """One event for each run of blocks of which each follows the one before it."""
    event: BlockStored | None = None
    for digest, content in zip(digests, contents, strict=True):
        if event is not None and content.parent == event.block_hashes[-1]:
            event.block_hashes.append(digest)
            event.token_ids += content.tokens
            if event.extra_keys is not None:
                event.extra_keys.append(None)
            continue
        if event is not None:
            yield event
        event = BlockStored([digest], content.parent, content.tokens, block_size, medium=DEVICE)
        if content.salt is not None:
            event.extra_keys = [[content.salt]]
    if event is not None:
        yield event


class KVEventFeed:
    """Turns reports of caches into batches. If one cannot be taken, the replica has to report its whole cache again."""

    def __init__(
        self,
        num_replicas: int,
        *,
        block_size: Callable[[int], int],
        offer: Callable[[EventBatch], bool],
        ask_again: Callable[[int], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        """`block_size` returns that of a replica. `offer` returns whether it has taken a batch. `ask_again` asks a
        replica for its whole cache."""
        self._block_size = block_size
        self._offer = offer
        self._ask_again = ask_again
        self._now = now
        self._published: list[dict[bytes, None]] = [{} for _ in range(num_replicas)]
        """The blocks that subscribers believe each replica to hold."""
        self._is_behind: set[int] = set()
        """Replicas whose changes could not all be published."""
        for place in range(num_replicas):  # what an earlier process published is not valid any more
            self._publish(place, [AllBlocksCleared()])

    def clear(self, place: int) -> None:
        """Publish that a replica's cache is unknown or lost."""
        published = self._published[place]
        cleared: Event = AllBlocksCleared() if len(self._published) == 1 else BlockRemoved(list(published), DEVICE)
        if (published or place in self._is_behind) and not self._publish(place, [cleared]):
            return
        self._is_behind.discard(place)
        published.clear()

    def take(self, place: int, report: CacheReport) -> None:
        """Publish the changes in a report. A report of the whole cache comes after `clear`."""
        if place in self._is_behind:
            if report.is_whole:
                self._ask_again(place)  # `clear` could not be published
            return
        published, events = self._published[place], list[Event]()
        if report.evicted:
            events.append(BlockRemoved(list(report.evicted), DEVICE))
        events += stored_events(report.stored, report.contents, self._block_size(place))
        if not events or not self._publish(place, events):
            return
        for digest in report.evicted:
            published.pop(digest, None)
        published.update(dict.fromkeys(report.stored))

    def _publish(self, place: int, events: list[Event]) -> bool:
        if self._offer(EventBatch(self._now(), events, place)):
            return True
        if place not in self._is_behind:
            self._is_behind.add(place)
            self._ask_again(place)
        return False
